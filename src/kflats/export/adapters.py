"""LoRA adapters (PEFT) on factored and coded layers: trained beside the frozen matrix, and kept beside it."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

from kflats.common.errors import KflatsError
from kflats.common.release import needed
from kflats.matrices.layers import FactoredEmbedding, FactoredLinear


def adapt_lora_(config: Any) -> None:
    """Let ``config``, a ``peft.LoraConfig``, target factored layers too; PEFT itself knows dense ones only.

        layer(x) = x M + scaling (x A) B      M factored or coded and frozen, A and B dense and trained

    Once for a new adapter, and once for one that is loaded, since PEFT does not save it. ``target_modules`` names
    the layers as they are called in the model; "all-linear" names dense ones only. An adapter is never merged: M has
    fewer numbers than the sum would need. To merge, make the model dense first (``kflats.restore_``).

    Raises:
        KflatsError: peft is not installed; a setting that reads the dense table (DoRA; PiSSA and other starts).

    >>> import peft, torch
    >>> from kflats.matrices.registry import LowRankMatrix
    >>> model = torch.nn.Sequential(FactoredLinear(LowRankMatrix(torch.ones(9, 2), torch.ones(2, 8))))
    >>> config = peft.LoraConfig(target_modules=["0"], r=2)
    >>> adapt_lora_(config)
    >>> adapted = peft.get_peft_model(model, config)
    >>> adapted(torch.ones(1, 9)).shape
    torch.Size([1, 8])
    """
    starts = (True, False, "gaussian", "orthogonal")
    if getattr(config, "use_dora", False) or getattr(config, "init_lora_weights", True) not in starts:
        raise KflatsError(
            "an adapter that starts from the dense weight is not supported with a factored layer",
            cause="use_dora, and init_lora_weights such as pissa, olora or loftq, read the dense weight",
            hint="init_lora_weights=True or 'gaussian', without DoRA; or kflats.restore_(model) first",
        )
    config._register_custom_module(_classes())


class _NeverMerged:
    """The differences between an adapter of a factored layer and one of a dense layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unsupported layer type")  # it is supported here
            super().__init__(*args, **kwargs)

    def merge(self, *_: Any, **__: Any) -> None:
        raise KflatsError(
            "an adapter cannot be merged into a factored layer",
            hint="keep the adapter beside it, or make the model dense before adapting it: kflats.restore_(model)",
        )


@cache
def _classes() -> dict[type, type]:
    lora = needed("peft.tuners.lora", "peft", "an adapter")
    return {
        FactoredLinear: type("FactoredLora", (_NeverMerged, lora.Linear), {}),
        FactoredEmbedding: type("FactoredEmbeddingLora", (_NeverMerged, lora.Embedding), {}),
    }
