"""A compressed model for software without kflats: dense tables in the type that the model computes in.

The sizes are those of the original, and the outputs those of the compressed model.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_model as save_tensors
from torch import nn

from kflats.common.errors import KflatsError
from kflats.common.formatting import number, some
from kflats.common.paths import expanded
from kflats.evaluation.outputs import Judge, load_tokenizer
from kflats.evaluation.running import modality_of
from kflats.io import load_model, save_model
from kflats.io.atomic import new_folder
from kflats.io.sources import copy_companions, resolve_model, static_folder, weights_folder
from kflats.model.run_as import set_run_form_
from kflats.model.swap import restore_
from kflats.model.weights import factored_layers, held_matrices, is_sentence_transformer, pretrained_models
from kflats.report.model_card import CARD, dense_card, rewrite_


@dataclass(frozen=True)
class DenseExport:
    """The result of ``export_dense``.

    Args:
        folder: the written folder.
        weight_bytes: bytes of its weight files.
        weights: names of the weights that were multiplied out.
        dropped_biases: layers that lost a bias of the compression; empty unless ``drop_biases`` allowed it.
        bias_loss: the loss of the outputs that this makes (as ``kflats.compare``), between the compressed model and
            the written one; None: no bias was lost, or the model's outputs cannot be compared without more data.
    """

    folder: Path
    weight_bytes: int
    weights: tuple[str, ...]
    dropped_biases: tuple[str, ...] = ()
    bias_loss: float | None = None

    def __str__(self) -> str:
        again = f"{len(self.weights)} of them dense again" if self.weights else "none of which was compressed"
        lines = [f"{self.folder}: {self.weight_bytes:,} bytes of weights, {again}"]
        if self.dropped_biases:
            known = "" if self.bias_loss is None else f", and lose {number(self.bias_loss)} more by it"
            lines.append(f"biases left out, so outputs differ{known}: {some(self.dropped_biases)}")
        return "\n".join(lines)


def export_dense(
    model: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    drop_biases: bool = False,
    force: bool = False,
) -> DenseExport:
    """Write ``model`` with dense tables into the new folder ``out``, which loads where kflats is not installed.

    Each factored matrix M is multiplied out, in the type that its layer computes in. Outputs are those of the
    compressed model up to rounding, sizes those of the original. For servers, converters and runtimes that read
    ordinary checkpoints; anything that can ``import kflats`` is better served by the compressed folder. A folder whose
    weights are torch's pickles is written as safetensors, which every command here reads.

    Args:
        model: a compressed folder or hub name (tokenizer, sentence-transformers modules and prompts come along), a
            transformers model, a SentenceTransformer, or any torch module, which is left as it is.
        out: the folder to be. Of a plain torch module it holds ``model.safetensors``, for
            ``safetensors.torch.load_model``: tied parameters are stored once.
        drop_biases: allow layers to lose a bias that compression gave them, where the architecture has no place for
            it. Their outputs then differ from the compressed model's by that constant; ``bias_loss`` says how much
            those of the model lose.
        force: replace an existing folder that kflats wrote and nobody changed since.

    Raises:
        KflatsError: nothing in ``model`` is factored; a bias would be lost; ``out`` exists, overlaps the model or is
            written by another run; a full disk.

    >>> import kflats, tempfile, torch
    >>> from safetensors.torch import load_model
    >>> model = torch.nn.ModuleDict({"words": torch.nn.Embedding(200, 16)})
    >>> report = kflats.compress_(model, {"words": kflats.SVD()}, keep="50%", quiet=True)
    >>> made = export_dense(model, tempfile.mkdtemp() + "/dense")
    >>> plain = torch.nn.ModuleDict({"words": torch.nn.Embedding(200, 16)})
    >>> load_model(plain, made.folder / "model.safetensors")
    (set(), [])
    >>> torch.allclose(plain["words"].weight, model["words"].matrix.dense())
    True
    """
    folder = None if isinstance(model, nn.Module) else resolve_model(model, pickled=True)
    with new_folder(out, force, [] if folder is None else [folder]) as aside:
        dense: Any = copy.deepcopy(model) if folder is None else load_model(folder, pickled=True)
        pickles = folder is not None and not any(weights_folder(folder, pickled=True).glob("*.safetensors"))
        lost = () if pickles else _check(dense, drop_biases)
        names = tuple(name for name, layer in factored_layers(dense) if layer.owns_matrix)
        names += tuple(name for name, _ in held_matrices(dense))
        judge = _judge(dense, folder) if lost else None
        restore_(dense)
        bias_loss = None if judge is None else judge(dense).loss
        if folder is None:
            _save(dense, aside)
        else:
            inner = aside / weights_folder(folder, pickled=True).relative_to(folder)
            if static_folder(folder) is None:
                dense.save_pretrained(inner)
            else:
                save_model(dense, inner)
            copy_companions(folder, aside)
            if (aside / CARD).is_file():
                rewrite_(aside, dense_card)
        size = sum(path.stat().st_size for path in aside.rglob("*.safetensors"))
    return DenseExport(expanded(out).resolve(), size, names, lost, bias_loss)


def _judge(model: nn.Module, folder: Path | None) -> Judge | None:
    """Who compares with ``model``; None for a text model without a tokenizer, or outputs that cannot be compared."""
    set_run_form_(model, "dense")
    try:
        reads_text = modality_of(model) == "input_ids"
        return Judge(model, load_tokenizer(folder) if reads_text and folder is not None else None)
    except KflatsError:
        return None


def _save(dense: Any, folder: Path) -> None:
    if is_sentence_transformer(dense) or any(part is dense for _, part in pretrained_models(dense)):
        dense.save_pretrained(folder)
    else:
        save_tensors(dense, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _check(model: nn.Module, drop_biases: bool) -> tuple[str, ...]:
    """The layers that will lose a bias."""
    layers = list(factored_layers(model))
    if not layers and not any(True for _ in held_matrices(model)):
        raise KflatsError(
            f"nothing in this {type(model).__name__} is factored, so it is dense already",
            hint="a folder that kflats compress wrote",
        )
    gained = tuple(name for name, layer in layers if layer.gained_bias)
    if gained and not drop_biases:
        raise KflatsError(
            f"an ordinary checkpoint cannot hold the bias of {gained[0]!r}, the first of {len(gained)}",
            cause="compression added the bias, for the mean of the error, and the architecture has none there",
            hint="drop_biases=True, which leaves it out: outputs then differ by that constant",
        )
    return gained
