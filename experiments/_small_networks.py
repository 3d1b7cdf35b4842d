"""Small networks for images, their data from a folder or the hub, and how they are trained.

LeNet-300-100 on MNIST; ResNet-20 and VGG-19 on CIFAR-10. ``train_small.py`` trains and keeps the first two.
"""

from __future__ import annotations

import gzip
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError, first_line
from kflats.common.hashing import sha256
from kflats.common.release import needed


class Dense(nn.Module):
    """Three linear layers with relu between them: y = fc2 relu fc1 relu fc0 x.

    Args:
        sizes: of x, of the two hidden layers, and of y.
        state: weights w0, w1, w2 and biases b0, b1, b2; None: drawn by torch.
    """

    def __init__(self, sizes: tuple[int, int, int, int], state: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            layer = nn.Linear(inputs, outputs)
            if state is not None:
                layer.weight.data, layer.bias.data = state[f"w{i}"], state[f"b{i}"]
            setattr(self, f"fc{i}", layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(F.relu(self.fc0(x)))))


class LeNet(Dense):
    """LeNet-300-100 on pixels / 256, 266,610 parameters."""

    def __init__(self, state: dict[str, Tensor] | None = None) -> None:
        super().__init__((784, 300, 100, 10), state)


class VGG19(nn.Module):
    """VGG-19 in its CIFAR form with batch normalization: 16 convolutions in five stages, two hidden layers of 512.

    Args:
        width: channels of the first stage, 64 as published, 16 or 4. A narrower network pools less often, so that 512
            numbers reach the first hidden layer in any case: 512 x 1 x 1, 128 x 2 x 2 or 32 x 4 x 4.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        if width not in (4, 16, 64):
            raise KflatsError(f"a VGG-19 of width {width} is not supported", hint="64, 16 or 4")
        layers: list[nn.Module] = []
        inputs, side = 3, 32
        for count, factor in zip((2, 2, 4, 4, 4), (1, 2, 4, 8, 8), strict=True):
            for _ in range(count):
                outputs = factor * width
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
                inputs = outputs
            if 8 * width * (side // 2) ** 2 >= 512:
                layers.append(nn.MaxPool2d(2))
                side //= 2
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.head = Dense((512, 512, 512, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Block(nn.Module):
    """Two 3 x 3 convolutions; the shortcut drops every second pixel and pads channels with zeros."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.stride, self.extra = stride, (out - channels) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1 or self.extra:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra, self.extra))
        return F.relu(y + x)


class ResNet20(nn.Module):
    """ResNet-20 in its CIFAR form (He et al. 2016), option-A shortcuts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(y.mean((2, 3)))


@dataclass(frozen=True)
class Images:
    """Images and their classes."""

    images: Tensor
    classes: Tensor

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def digest(self) -> str:
        """Of all pixels and classes."""
        return sha256([self.images, self.classes])[:16]

    def part(self, index: Tensor) -> Images:
        """The chosen ones."""
        return Images(self.images[index], self.classes[index])


def mnist(part: str, folder: Path | None) -> Images:
    """Pixels / 256 (N, 784) and classes; ``part`` is "train" or "t10k", ``folder`` has the idx files in "mnist"."""
    if folder is None:
        pixels, classes = _from_hub("ylecun/mnist", {"train": "train", "t10k": "test"}[part], "image", "label")
        return Images(pixels.reshape(-1, 784).float() / 256, classes)

    def read(kind: str, header: int) -> np.ndarray:
        found = [p for p in sorted((folder / "mnist").glob("*")) if p.name.startswith(part) and kind in p.name]
        if not found:
            raise KflatsError(f"{folder / 'mnist'} has no {part}-{kind} file", hint='the idx files of MNIST, or "hub"')
        raw = gzip.decompress(found[0].read_bytes()) if found[0].suffix == ".gz" else found[0].read_bytes()
        return np.frombuffer(raw, dtype=np.uint8, offset=header)

    images = torch.from_numpy(read("images", 16).reshape(-1, 784).copy()).float() / 256
    return Images(images, torch.from_numpy(read("labels", 8).astype(np.int64)))


def cifar(name: str, folder: Path | None) -> Images:
    """Normalised images (N, 3, 32, 32) and classes of one file of cifar10/ ("train20k", "test10k"), or of the hub."""
    if folder is None:
        split = "train" if name.startswith("train") else "test"
        pixels, classes = _from_hub("uoft-cs/cifar10", split, "img", "label")
    else:
        path = folder / "cifar10" / f"{name}.npz"
        if not path.is_file():
            raise KflatsError(f"there is no file {path}", hint="--task-data hub, which has CIFAR-10")
        kept = np.load(path)
        x = kept["residual"].transpose(1, 2, 3, 0).copy()
        x[:, :, 0] = np.cumsum(x[:, :, 0], axis=1, dtype=np.uint8)
        x = np.cumsum(x, axis=2, dtype=np.uint8)
        x[..., 0] += x[..., 1]
        x[..., 2] += x[..., 1]
        pixels, classes = torch.from_numpy(x), torch.from_numpy(kept["label"].astype(np.int64))
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return Images(((pixels.float() / 255 - mean) / deviation).permute(0, 3, 1, 2).contiguous(), classes)


def _from_hub(repository: str, split: str, pixels: str, label: str) -> tuple[Tensor, Tensor]:
    try:
        rows = needed("datasets", "kflats[tasks]", "images of the hub").load_dataset(repository, split=split)
    except OSError as error:  # those of networks too
        raise KflatsError(
            f"{repository} cannot be read: {first_line(error)}", hint="a network, or --task-data FOLDER"
        ) from error
    stacked = np.stack([np.asarray(image, dtype=np.uint8) for image in rows[pixels]])
    return torch.from_numpy(stacked), torch.tensor(list(rows[label]))


def blobs(count: int, seed: int, pattern: tuple[int, ...] = (784,), shape: tuple[int, ...] = (784,)) -> Images:
    """Generated images for ``--quick``: ten random patterns, spread to a shape, with noise around them."""
    gen = torch.Generator().manual_seed(7)
    patterns = torch.rand(10, *pattern, generator=gen)
    noise = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 10, (count,), generator=noise)
    return Images((patterns[classes] + 0.4 * torch.randn(count, *shape, generator=noise)).clamp(0, 1), classes)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, classes: Tensor) -> float:
    """Share of right answers; the model's mode is as it was afterwards."""
    mode = model.training
    model.eval()
    pairs = zip(images.split(250), classes.split(250), strict=True)
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs)
    model.train(mode)
    return right / len(classes)


def train_(
    model: nn.Module,
    data: Images,
    epochs: int,
    *,
    seed: int,
    lr: float = 1e-3,
    batch: int = 128,
    augmented: bool = False,
) -> None:
    """Train in place: Adam, a step size that falls linearly to 0, cross-entropy.

    Args:
        augmented: images are shifted by up to 4 pixels and mirrored (He et al. 2016, section 4.2).
    """
    gen = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    steps = epochs * -(-len(data) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(data), generator=gen).split(batch):
            x = data.images[index]
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(shifted(x, gen) if augmented else x), data.classes[index]).backward()
            optimizer.step()
            schedule.step()
    model.eval()


def shifted(x: Tensor, gen: torch.Generator) -> Tensor:
    """Each image shifted by up to 4 pixels, and mirrored with probability 1/2."""
    n, _, height, width = x.shape
    padded = F.pad(x, (4, 4, 4, 4))
    top, left = torch.randint(0, 9, (2, n), generator=gen)
    rows = (top[:, None] + torch.arange(height))[:, None, :, None]
    columns = left[:, None] + torch.arange(width)
    mirrored = torch.rand(n, generator=gen) < 0.5
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)[:, None, None, :]
    return padded[torch.arange(n)[:, None, None, None], torch.arange(x.shape[1])[None, :, None, None], rows, columns]


def lenet(data: Images, epochs: int, seed: int) -> LeNet:
    """A LeNet-300-100, drawn and trained by ``seed``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LeNet()
    train_(model, data, epochs, seed=seed)
    return model


def vgg19(data: Images, epochs: int, seed: int, width: int) -> VGG19:
    """A VGG-19, drawn and trained by ``seed``; on the GPU if there is one, whence it comes back."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = VGG19(width)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cast(Any, model).to(device, memory_format=torch.channels_last)
    train_(model, Images(data.images.to(device), data.classes.to(device)), epochs, seed=seed, augmented=True)
    return model.cpu()
