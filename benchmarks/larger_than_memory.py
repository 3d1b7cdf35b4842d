"""Question: how much memory does it take to compress a folder that is larger than memory, and how long?

Folders of the shape of Llama with random numbers in float16, in shards. ``kflats compress`` runs in a process of its
own, under a limit of its private memory (``RLIMIT_DATA``), and without one, which must write the same bytes. Folders of
half as many layers show whether the time of a weight depends on how many there are.

"measured" has 16 texts of 120 words drawn by Zipf's law: inputs and gradients, layer by layer, activations on disk.
"wide" has the same texts, measures inputs alone, and stores integers with feedback. A matrix in each of its two layers
has 12,288 inputs; their Gram matrix takes 1.2 GB.
"each" has tables of 12 M numbers beside two layers, and every method and every codec in turn, without data.
"large" has tables of 49 M numbers; what would take more than is allowed goes to disk under that limit.
"private memory" is the most of the pages that belong to the process alone (RssAnon), read every 5 ms. "allowed" is the
largest weight in float32, or three Grams of its inputs in float64 if that is more, and 700 MB.

transformers imports torchao, scipy and accelerate where they are installed, which takes private memory.
``--python`` runs kflats in another environment, such as one of ``pip install 'kflats[hf,codes]'`` alone; which of the
three are in it stands under the table.

    python benchmarks/larger_than_memory.py --write benchmarks/results/larger_than_memory.md
    python benchmarks/larger_than_memory.py --measured 1 --write benchmarks/results/larger_than_memory_measured.md
    python benchmarks/larger_than_memory.py --wide 1 --write benchmarks/results/larger_than_memory_wide.md
    python benchmarks/larger_than_memory.py --each 1 --write benchmarks/results/larger_than_memory_each.md
    python benchmarks/larger_than_memory.py --large 1 --write benchmarks/results/larger_than_memory_large.md
    python benchmarks/larger_than_memory.py --quick 1         # small folders
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from _common import arguments, publish, table
from safetensors.torch import save_file

_SHARD = 4  # layers in a file
_DENSE = ("--method", "keep-dense", "--codec")
_ALIKE = ("--importance", "uniform")
EACH = {
    "SVD": ("--method", "svd"),
    "flats": ("--method", "flats", "--flats", "3"),
    "MESSI": ("--method", "messi", "--flats", "3", "--restarts", "2"),
    "k-means, an SVD in each cluster": ("--method", "kmeans-svd", "--flats", "3"),
    "lp low rank": ("--method", "robust-svd"),
    "subspace by distances": ("--method", "subspace"),
    "8 bits": (*_DENSE, "int8"),
    "4 bits": (*_DENSE, "int4 64"),
    "SVD, coded": ("--method", "svd", "--codec", "transform"),
    "feedback": (*_DENSE, "feedback"),
    "the way chosen for each weight": ("--method", "auto"),
    "l1 fit": ("--method", "entrywise"),
}
"""Each method and codec, and what asks for it."""
LARGE = ("SVD, coded", "lp low rank", "the way chosen for each weight", "feedback")
"""Those that hold a weight several times where memory allows it."""


@dataclass(frozen=True)
class Shape:
    """A Llama-shaped model: layers, and the sizes of its matrices."""

    layers: int
    hidden: int
    inner: int
    vocabulary: int

    def tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of one layer's tensors; of layer -1 those outside of the layers."""
        if layer < 0:
            yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
            yield "lm_head.weight", (self.vocabulary, self.hidden)
            yield "model.norm.weight", (self.hidden,)
            return
        at = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            yield f"{at}self_attn.{name}_proj.weight", (self.hidden, self.hidden)
        for name in ("gate", "up"):
            yield f"{at}mlp.{name}_proj.weight", (self.inner, self.hidden)
        yield f"{at}mlp.down_proj.weight", (self.hidden, self.inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", (self.hidden,)

    @property
    def allowed(self) -> int:
        """Bytes of private memory that a run may take."""
        weight = 4 * max(self.vocabulary, self.inner) * self.hidden
        return max(weight, 3 * 8 * self.inner**2) + 700_000_000

    def write(self, folder: Path) -> int:
        """Write the folder, a few layers at a time; its bytes."""
        import transformers

        folder.mkdir()
        config = transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 64,
            max_position_embeddings=512,
            architectures=["LlamaForCausalLM"],
            dtype="float16",
        )
        config.save_pretrained(folder)
        draw, places, total = torch.Generator().manual_seed(0), dict[str, str](), 0
        parts = [[-1], *(range(a, min(a + _SHARD, self.layers)) for a in range(0, self.layers, _SHARD))]
        for number, part in enumerate(parts, 1):
            name = f"model-{number:05}-of-{len(parts):05}.safetensors"
            tensors = {}
            for key, shape in (one for layer in part for one in self.tensors(layer)):
                values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draw) / shape[1] ** 0.5
                tensors[key] = values.half()
                total += tensors[key].nbytes
            save_file(tensors, folder / name, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, name)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return total


def tokenizer(folder: Path, words: int) -> None:
    """A vocabulary of words; beside the folder, texts of words drawn by Zipf's law."""
    import tokenizers
    import transformers

    ids = {word: i for i, word in enumerate(["<pad>", "<unk>", *(f"word{i}" for i in range(words - 2))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>")
    fast.save_pretrained(folder)
    shares = 1 / (3.0 + torch.arange(words - 2))
    drawn = torch.multinomial(shares, 16 * 120, replacement=True, generator=torch.Generator().manual_seed(0)).tolist()
    lines = [" ".join(f"word{i}" for i in drawn[a : a + 120]) for a in range(0, len(drawn), 120)]
    (folder.parent / "texts.txt").write_text("\n".join(lines))


def run(command: list[str], limit: int | None) -> tuple[float, int]:
    """Seconds of a command, and the most private memory that it took."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    began, most = time.perf_counter(), 0
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, preexec_fn=limited) as process:
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
                most = max(most, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")))
            except (OSError, TypeError):
                pass
            time.sleep(0.005)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return time.perf_counter() - began, most * 1024


def digest(folder: Path) -> str:
    """Of all weight files."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(2**24):
                total.update(block)
    return total.hexdigest()


def imported_too(python: str) -> str:
    """The packages of an environment that kflats does not need, and transformers imports where they are."""
    names = ("torchao", "scipy", "accelerate")
    find = f"from importlib.util import find_spec; print(*filter(find_spec, {names}), sep=', ')"
    return subprocess.run([python, "-c", find], check=True, capture_output=True, text=True).stdout.strip() or "-"


_IN_MEMORY = """
import sys

import kflats
from kflats.codecs import from_name
from kflats.compress.pipeline import plan_folder
from kflats.io.saving import load_model

source, out = sys.argv[1:3]
recipe = kflats.Recipe(kflats.KeepDense(), codec=from_name("int4 64"))
plan = plan_folder(source, size="30%", method=recipe, weights=("all",), quiet=True)
model = load_model(source)
kflats.compress_(model, plan, quiet=True)
model.save_pretrained(out)
"""
"""What the command does with a folder, by a model in memory."""
_MEASURED = """

`KeepDense` in `int4 64` with `KroneckerFisher()`, measured with 16 texts of 120 words; a vocabulary of 4,096 words.
"same bytes" compares the run without a limit with the one under it."""
"""What is said of "measured"."""


def main() -> None:
    options = arguments(__doc__, quick=0, measured=0, wide=0, each=0, large=0, python=sys.executable)
    small = bool(options.quick)
    plain = Shape(4, 256, 704, 2000) if small else Shape(36, 2560, 6912, 32000)
    half = Shape(plain.layers // 2, plain.hidden, plain.inner, plain.vocabulary)
    read = Shape(4, 256, 704, 2000) if small else Shape(40, 1024, 2816, 4096)
    coded = ["--method", "keep-dense", "--codec", "int4 64", "--size", "30%", "--weights", "all"]
    calibrated = [*coded, "--importance", "kronecker", "--samples", "16"]
    cases: list[tuple[str, Shape, list[str], int | None]] = [
        ("4 bits, without data", half, [], None),
        ("4 bits, without data", half, coded, None),
        ("4 bits, without data", half, coded, 3_000_000_000),
        ("4 bits, without data", plain, coded, 3_000_000_000),
    ]
    if options.measured:
        cases = [
            ("4 bits, measured", read, calibrated, 1_200_000_000),
            ("4 bits, measured", read, calibrated, None),
        ]
    if options.wide:
        broad = Shape(2, 64, 1024, 2000) if small else Shape(2, 256, 12288, 2000)
        feedback = ["--method", "keep-dense", "--codec", "feedback", "--size", "30%", "--weights", "all"]
        calibrated = [*feedback, "--importance", "input-gram", "--samples", "16"]
        cases = [
            ("feedback, measured, wide", broad, calibrated, 2_000_000_000),
            ("feedback, measured, wide", broad, calibrated, None),
        ]
    if options.each:
        shape = Shape(2, 64, 176, 4000) if small else Shape(2, 512, 1408, 24000)
        sizes = {what: "60%" if "int8" in how else "30%" for what, how in EACH.items()}
        cases = [
            (what, shape, ["--size", sizes[what], "--weights", "all", *how, *_ALIKE], None)
            for what, how in EACH.items()
        ]
    if options.large:
        shape = Shape(1, 64, 176, 8000) if small else Shape(1, 512, 1408, 96000)
        cases = [
            (what, shape, ["--size", "30%", "--weights", "all", *EACH[what], *_ALIKE], limit)
            for what in LARGE
            for limit in (shape.allowed, None)
        ]
    lines: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as place:
        sources: dict[Shape, tuple[Path, int]] = {}
        seen: dict[tuple[str, Shape], str] = {}
        calibrated += ["--texts", str(Path(place) / "texts.txt")]
        for what, shape, how, limit in cases:
            if shape not in sources:
                source = Path(place) / f"source-{len(sources)}"
                sources[shape] = source, shape.write(source)
                if how is calibrated:
                    tokenizer(source, shape.vocabulary)
            source, total = sources[shape]
            out = Path(place) / f"out-{len(lines)}"
            command = ["-m", "kflats", "compress", str(source), "--out", str(out), "--no-proof", "--quiet", *how]
            command = command if how else ["-c", _IN_MEMORY, str(source), str(out)]
            seconds, most = run([options.python, *command], limit)
            made, before = digest(out), seen.get((what, shape))
            same = "-" if before is None else before == made  # the first of its kind is compared with none
            seen[what, shape] = made
            weights = 7 * shape.layers + 2
            line: dict[str, object] = {"run": what, "folder": f"{total / 1e9:.2f} GB", "weights": weights}
            line |= {"limit": f"{limit / 1e9:.2f} GB" if limit else "-" if how else "-, the model in memory"}
            line |= {"private memory": f"{most / 1e9:.2f} GB", "allowed": f"{shape.allowed / 1e9:.2f} GB"}
            line |= {"seconds": f"{seconds:.0f}", "a GB": f"{seconds / total * 1e9:.0f} s"}
            line |= {"a weight": f"{seconds / weights:.1f} s", "same bytes": same}
            lines.append(line)
            print(line, flush=True)
    title = "The memory and time to compress a folder that is larger than memory"
    note = _MEASURED if options.measured else ""
    publish(title, f"{table(lines)}\n\ntransformers imports too: {imported_too(options.python)}{note}", options)


if __name__ == "__main__":
    main()
