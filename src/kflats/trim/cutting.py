"""Models with fewer vocabulary entries: a copy with some rows of the token tables, their heads and biases.

Token tables are those that ``get_input_embeddings`` and ``get_output_embeddings`` name, and all modules that share
their parameters. Biases of heads follow; ids in configs (begin, end, padding, tokens that generation avoids) are
numbered anew. Another tensor of the vocabulary's size is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.evaluation.encoding import evaluating, last_hidden_state
from kflats.model.weights import factored_layers, pretrained_models, vocabulary_end

_LISTS = (
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
)  # ids in configs under other names than _token_id
_CHECKED = 24  # ids that both models read in the end


@dataclass(frozen=True)
class Tables:
    """The tensors of a model that have a row for each entry of its vocabulary.

    Args:
        rows: the number of entries.
        tables: parameters (rows, d). biases: parameters and buffers (rows,) or (1, rows).
        required: ids that the model or its configs mention.
    """

    rows: int
    tables: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    required: frozenset[int]

    @property
    def nbytes(self) -> int:
        """Bytes of all these tensors; shared ones count once."""
        return sum(t.numel() * t.element_size() for t in (*self.tables, *self.biases))


def find_tables(model: nn.Module) -> Tables:
    """The token tables of ``model`` and of the transformers models inside it.

    Raises:
        KflatsError: no token table, several vocabularies, factored tables, or tensors of the vocabulary's size that
            are neither tables nor biases of heads.
    """
    parts = [part for _, part in pretrained_models(model)]
    if any(True for _ in factored_layers(model)):
        raise KflatsError(
            "a compressed model cannot be trimmed",
            cause="its coordinates have no single rows",
            hint="trim the original first, then compress",
        )
    found: dict[int, Tensor] = {}
    for part in parts:
        source, head = vocabulary_end(part, "get_input_embeddings"), vocabulary_end(part, "get_output_embeddings")
        for end, kind in ((source, nn.Embedding), (head, nn.Linear)):
            if isinstance(end, kind):
                found[id(end.weight)] = end.weight
    if not any(isinstance(vocabulary_end(part, "get_input_embeddings"), nn.Embedding) for part in parts):
        raise KflatsError(f"{type(model).__name__} has no token embeddings", hint="a text model of transformers")
    sizes = {table.shape[0] for table in found.values()}
    if len(sizes) > 1:
        raise KflatsError(
            f"the model has token tables of {', '.join(map(str, sorted(sizes)))} rows",
            cause="several vocabularies, or a head that predicts something else than tokens",
            hint="a model with one vocabulary",
        )
    rows = sizes.pop()
    tables = tuple(found.values())
    biases = {id(tensor): tensor for tensor in _biases(model, rows, {id(table) for table in tables})}
    left = [
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if rows in tensor.shape and id(tensor) not in found and id(tensor) not in biases
    ]
    if left:
        raise KflatsError(
            f"{left[0]!r} has a side of {rows} as the vocabulary, and is no token table and no bias of one",
            cause="a table of another use whose rows are tokens",
            hint="another model; please report this architecture",
        )
    return Tables(rows, tables, tuple(biases.values()), frozenset(_required(model, tables, rows)))


def cut(model: nn.Module, found: Tables, kept: Sequence[int]) -> nn.Module:
    """A copy of ``model`` whose vocabulary is the ``kept`` ids, numbered 0, 1, ...; the model itself stays.

    All other parameters are copied, and shared parameters stay shared. Then both models read the same kept tokens, and
    their outputs are compared.

    Raises:
        KflatsError: the outputs differ, because the model keeps token ids in a place that is not known here.
    """
    index = torch.tensor(kept, dtype=torch.int64)
    new = {old: row for row, old in enumerate(kept)}
    memo: dict[int, Any] = {}
    for tensor in found.tables:
        memo[id(tensor)] = _like(tensor, tensor.detach().index_select(0, index.to(tensor.device)))
    for tensor in found.biases:
        memo[id(tensor)] = _like(tensor, tensor.detach().index_select(tensor.ndim - 1, index.to(tensor.device)))
    # deepcopy takes the new tensors from the memo: ties hold, and no old table is copied.
    made = copy.deepcopy(model, memo)
    tables = {id(memo[id(tensor)]) for tensor in found.tables}
    for module in made.modules():
        _resize_(module, tables, found.rows, len(kept), new)
    configs: dict[int, Any] = {}
    for _, part in pretrained_models(made):
        for config in (part.config, getattr(part, "generation_config", None)):
            configs |= {id(inner): inner for inner in _nested(config)}
    for config in configs.values():
        _renumber_(config, found.rows, len(kept), new)
    _check_same(model, made, kept)
    return made


def _biases(model: nn.Module, rows: int, tables: set[int]) -> Iterator[Tensor]:
    for module in model.modules():
        weight = module._parameters.get("weight")
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            long = tensor is not None and tensor.ndim in (1, 2) and tensor.numel() == rows == tensor.shape[-1]
            if tensor is not None and long and "bias" in name and (weight is None or id(weight) in tables):
                yield tensor


def _required(model: nn.Module, tables: Sequence[Tensor], rows: int) -> Iterator[int]:
    """Ids that padding, configs and positions need."""
    own = {id(table) for table in tables}
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if not isinstance(padding, int) or isinstance(padding, bool) or not 0 <= padding < rows:
            continue
        if any(id(p) in own for p in module._parameters.values()):
            yield padding
        elif "position" in name.lower() or "position" in type(module).__name__.lower():
            # RoBERTa and others number positions from the padding id on: it must not move.
            yield from range(padding + 1)
    for _, part in pretrained_models(model):
        for config in (part.config, getattr(part, "generation_config", None)):
            for inner in _nested(config):
                for name, value in vars(inner).items():
                    if _holds_ids(name):
                        yield from (i for i in _flat(value) if 0 <= i < rows)


def _resize_(module: nn.Module, tables: set[int], rows: int, size: int, new: dict[int, int]) -> None:
    """Set the sizes and the padding id of ``module`` to those of its new tables."""
    weight = module._parameters.get("weight")
    held = module.__dict__
    if id(weight) in tables:
        held.update({name: size for name in ("num_embeddings", "out_features") if held.get(name) == rows})
    if held.get("vocab_size") == rows:
        held["vocab_size"] = size
    if isinstance(held.get("padding_idx"), int) and (weight is None or id(weight) in tables):
        held["padding_idx"] = new.get(held["padding_idx"], held["padding_idx"])


def _nested(config: Any) -> Iterator[Any]:
    """A config and the configs inside it."""
    if config is None:
        return
    yield config
    for value in vars(config).values():
        if type(value).__name__.endswith("Config") and hasattr(value, "to_dict"):
            yield from _nested(value)


def _holds_ids(name: str) -> bool:
    return name.endswith(("_token_id", "_token_ids", "_token_index")) or name in _LISTS


def _flat(value: Any) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _flat(inner)


def _renumber_(config: Any, rows: int, size: int, new: dict[int, int]) -> None:
    def renumbered(value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return new.get(value, value)  # an id outside the table stays, such as -1
        return [renumbered(inner) for inner in value] if isinstance(value, list | tuple) else value

    if getattr(config, "vocab_size", None) == rows:
        config.vocab_size = size
    for name, value in list(vars(config).items()):
        if _holds_ids(name) and value is not None:
            setattr(config, name, renumbered(value))


def _like(tensor: Tensor, rows: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return rows
    made = nn.Parameter(rows, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


def _check_same(original: nn.Module, made: nn.Module, kept: Sequence[int]) -> None:
    """Raise if the models give different states or logits for the same kept tokens, evenly spaced ones."""
    rows = sorted({int(i) for i in torch.linspace(0, len(kept) - 1, min(_CHECKED, len(kept))).tolist()})
    name, part = next(pair for pair in pretrained_models(original) if vocabulary_end(pair[1], "get_input_embeddings"))
    before, logits = _outputs(part, [kept[row] for row in rows])
    after, new_logits = _outputs(made.get_submodule(name), rows)
    if logits is not None and new_logits is not None:
        before = torch.cat([before, logits[..., torch.tensor(kept)]], dim=-1)
        after = torch.cat([after, new_logits], dim=-1)
    tolerance = 1e-3 if next(part.parameters()).dtype in (torch.float32, torch.float64) else 0.05
    if not float((before - after).abs().max()) <= tolerance * max(float(before.abs().max()), 1e-6):
        raise KflatsError(
            f"{type(part).__name__} gives other outputs after its vocabulary was cut",
            cause="the model keeps token ids in a place that is not known here",
            hint="the original model, which is unchanged; please report this architecture",
        )


def _outputs(model: Any, ids: list[int]) -> tuple[Tensor, Tensor | None]:
    """Last hidden states, and the head's logits of them."""
    inputs = {"input_ids": torch.tensor([ids], device=next(model.parameters()).device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with evaluating(model), torch.inference_mode():
        hidden = last_hidden_state(model, inputs)
        head = vocabulary_end(model, "get_output_embeddings")
        fits = isinstance(head, nn.Linear) and head.in_features == hidden.shape[-1]
        logits = head(hidden).float().cpu() if head is not None and fits else None
    return hidden.float().cpu(), logits
