"""The role of a module: which layers hold a matrix that can be factored, and why others do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from kflats.matrices.conv import FactoredConv2d
from kflats.matrices.layers import FactoredEmbedding, FactoredHead, FactoredLinear

FactoredLayer = FactoredEmbedding | FactoredHead | FactoredLinear | FactoredConv2d

READ_DIRECTLY = "it is part of a layer that reads the dense tensor directly, as torch's own transformer layers do"

# These modules read the tensors of layers inside them directly and never call the layers: torch's fused kernels, and
# some modules of transformers. _READERS has the end of the class name and the layers that are read, () for all.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_READERS: dict[str, tuple[str, ...]] = {
    "AltUp": ("prediction_coefs", "correction_coefs"),
    "BambaMixer": ("out_proj",),
    "DebertaEncoder": ("rel_embeddings",),
    "DebertaV2Encoder": ("rel_embeddings",),
    "DisentangledSelfAttention": ("in_proj",),
    "FalconH1Mixer": ("out_proj",),
    "LSHSelfAttention": ("query_key", "value"),
    "LayoutLMv2Encoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
    "LayoutLMv3Encoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
    "MHAttentionMap": ("k_proj", "k_linear"),
    "Mamba2Mixer": ("out_proj",),
    "MambaLayer": ("out_proj",),
    "MambaMixer": ("x_proj", "dt_proj", "out_proj"),
    "MobileBertLMPredictionHead": (),
    "PerceiverTextPreprocessor": (),
    "SEWDTransformerEncoder": ("rel_embeddings",),
    "TDNNLayer": ("kernel",),
    "VectorQuantizer": (),
    "ViltEmbeddings": ("patch_embeddings",),
    "WavLMAttention": (),
}


@dataclass(frozen=True)
class Role:
    """The role of a module: "embedding", "linear", "conv1d", "conv2d", or "" and the reason why it has none."""

    name: str
    reason: str = ""


def role_of(module: nn.Module) -> Role:
    """The role of one module, at any place of a model.

    >>> role_of(nn.Linear(3, 4)).name, role_of(nn.Conv2d(4, 4, 3, groups=2)).reason
    ('linear', 'a grouped convolution (groups=2) is 2 small matrices, not one')
    """
    kind = type(module)
    if isinstance(module, FactoredLayer):
        return Role("", "it is factored already")
    weight = module._parameters.get("weight")
    dimensions = 4 if isinstance(module, nn.Conv2d) else 2
    if not isinstance(weight, nn.Parameter) or weight.ndim != dimensions or not weight.is_floating_point():
        return Role("", f"a {kind.__name__} without a plain floating-point weight matrix")
    if weight.numel() == 0:
        return Role("", f"an empty {kind.__name__}")
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            return Role("", "max_norm rescales rows of the table while they are read, and factors have no such rows")
        if module.scale_grad_by_freq:
            return Role(
                "", "scale_grad_by_freq divides the gradient of a row by its count, and a basis has no such count"
            )
        if kind is not nn.Embedding and not _is_scaled(kind):
            return Role("", f"{kind.__name__} is a subclass of nn.Embedding that kflats does not know")
        return Role("embedding")
    if kind is nn.Linear:
        return Role("linear")
    if kind is nn.Conv2d:
        groups = module.groups
        if groups != 1:
            return Role("", f"a grouped convolution (groups={groups}) is {groups} small matrices, not one")
        return Role("conv2d")
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return Role("conv1d")
    return Role("", f"a {kind.__name__} is neither an embedding, an exact nn.Linear nor an exact nn.Conv2d")


def slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """For every attribute that holds a module, also a shared one: path, module, is its tensor read directly?"""
    seen: set[tuple[int, str]] = set()
    fused: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, leaf = name.rpartition(".")
        slot = (id(model.get_submodule(parent)) if name else 0, leaf)
        if slot in seen:
            continue
        seen.add(slot)
        for read in _read_by(module):
            fused.update(id(inner) for inner in read.modules())
        yield name, module, id(module) in fused


def embedding_scale(module: nn.Module) -> float | None:
    """The factor by which a scaled word embedding multiplies its output; NaN where it is on the meta device."""
    scale = getattr(module, "embed_scale", None)
    if isinstance(scale, Tensor):
        return float("nan") if scale.is_meta else float(scale)
    return None if scale is None else float(scale)


def _read_by(module: nn.Module) -> list[nn.Module]:
    """The modules inside ``module``, perhaps itself, whose tensors it reads."""
    if isinstance(module, _FUSED):
        return [module]
    name = type(module).__name__
    for end, children in _READERS.items():
        if name.endswith(end):
            found = [module._modules.get(child) for child in children] if children else [module]
            return [inner for inner in found if inner is not None]
    return []


def _is_scaled(kind: type) -> bool:
    """Gemma's, BART's, ...: transformers' word embeddings whose output is multiplied by ``embed_scale``."""
    return kind.__name__.endswith("ScaledWordEmbedding") and kind.__module__.startswith("transformers.")
