"""``resize_token_embeddings`` for factored vocabularies.

transformers reads and replaces the ``weight`` of an embedding to resize it. In a factored embedding ``weight`` holds
only coordinates. So ``swap_`` gives the model its own methods. They resize the matrix, every layer that uses it, and
the bias of the head, or they refuse before anything has changed. The model's class resizes its
other tables itself (BART has a bias on its logits).
"""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError
from kflats.matrices.layers import FactoredEmbedding, FactoredLinear, mark_initialized
from kflats.matrices.registry import Matrix
from kflats.model.weights import FactoredLayer, factored_layers, pretrained_models, vocabulary_end

_PLACES = "_places"


def guard_resizing_(model: nn.Module, matrix: Matrix, *, places: int) -> None:
    """Give each transformers model in ``model`` whose vocabulary is ``matrix`` methods that resize factors.

    ``places`` is the number of layers that use ``matrix``.
    """
    matrix.__dict__[_PLACES] = places
    shared = {id(layer) for _, layer in factored_layers(model) if layer.matrix is matrix}
    for _, part in pretrained_models(model):
        ends = (vocabulary_end(part, "get_input_embeddings"), vocabulary_end(part, "get_output_embeddings"))
        if any(id(end) in shared for end in ends):
            # A bound method follows its model through copy.deepcopy.
            for method in _METHODS:
                part.__dict__[method.__name__] = MethodType(method, part)


def unguard_resizing_(model: nn.Module) -> None:
    """Undo every ``guard_resizing_``."""
    for _, part in pretrained_models(model):
        for method in _METHODS:
            part.__dict__.pop(method.__name__, None)


def resize_token_embeddings(self: Any, *args: Any, **settings: Any) -> nn.Module:
    """As transformers' method of that name, for a model whose vocabulary is factored.

    Rows that stay are unchanged. A new row begins at the mean coordinates of the rows that it joins. ``mean_resizing``
    concerns only a table that is still dense.

    Raises:
        KflatsError: the factors cannot have that size; nothing has changed then.
    """
    type(self).resize_token_embeddings(self, *args, **settings)
    found: nn.Module = self.get_input_embeddings()
    return found


def _resize_token_embeddings(
    self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
) -> Any:
    """The step of transformers' ``resize_token_embeddings`` that resizes tables."""
    source, head = vocabulary_end(self, "get_input_embeddings"), vocabulary_end(self, "get_output_embeddings")
    if source is None:
        raise KflatsError(
            f"the vocabulary of {type(self).__name__} cannot be resized",
            cause="the class does not say which of its layers are the token embeddings",
        )
    if new_num_tokens is None and pad_to_multiple_of is None:
        return source
    old = source.matrix.shape[0] if isinstance(source, FactoredLayer) else cast(nn.Embedding, source).num_embeddings
    size = _padded(old if new_num_tokens is None else new_num_tokens, pad_to_multiple_of)

    ends = [end for end in (source, head) if isinstance(end, FactoredLayer)]
    for end in ends:
        _check_end(self, end)
    resized = {id(end.matrix): end.matrix.resized(size) for end in ends if end.matrix.shape[0] != size}

    if not isinstance(source, FactoredLayer):
        self.set_input_embeddings(self._get_resized_embeddings(source, size, None, mean_resizing))
    if head is not None and not isinstance(head, FactoredLayer):
        self.set_output_embeddings(self._get_resized_lm_head(head, size, mean_resizing=mean_resizing))
    for _, layer in list(factored_layers(self)):
        if (matrix := resized.get(id(layer.matrix))) is not None:
            _take(self, layer, matrix)
    # The caller takes the new size from the table's first dimension, and ragged coordinates have no such dimension.
    return SimpleNamespace(weight=torch.empty(size, 0, device="meta"))


_METHODS = (resize_token_embeddings, _resize_token_embeddings)


def _padded(size: int, multiple: int | None) -> int:
    for value in (size, 1 if multiple is None else multiple):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise KflatsError(f"a vocabulary cannot be resized to {value!r}", hint="whole numbers, at least 1")
    return size if multiple is None else -(-size // multiple) * multiple


def _check_end(model: nn.Module, end: FactoredLayer) -> None:
    if isinstance(end, FactoredLinear) and end.matrix_rows == "in_features":
        raise KflatsError(
            "the output head cannot be resized",
            cause="its tokens are columns of a factored matrix, and coordinates belong to rows",
            hint="resize before compressing, or kflats.restore_(model) first",
            command="resize the original model, then compress it",
        )
    here = sum(layer.matrix is end.matrix for _, layer in factored_layers(model))
    if here != end.matrix.__dict__.get(_PLACES, here):
        raise KflatsError(
            f"the vocabulary has places outside this {type(model).__name__}",
            cause="it is part of a larger model whose head is tied to it",
            hint="resize the whole model",
        )


def _take(model: nn.Module, layer: FactoredLayer, matrix: Matrix) -> None:
    """Let ``layer`` use ``matrix``, and resize its bias."""
    matrix.__dict__[_PLACES] = layer.matrix.__dict__.get(_PLACES, 1)
    for parameter in matrix.parameters():
        mark_initialized(parameter)
    bias = layer._parameters.get("bias")
    layer._take(matrix, own=layer.owns_matrix)
    if isinstance(layer, FactoredEmbedding):
        layer.num_embeddings = matrix.shape[0]
    else:
        layer._parameters["bias"] = bias  # the parameters of an owner are now those of the new matrix
        layer.out_features = matrix.shape[0]
    if bias is not None and bias.shape[0] != matrix.shape[0]:
        longer = nn.Parameter(_resized_bias(bias.detach(), matrix.shape[0]), requires_grad=bias.requires_grad)
        for module in model.modules():  # BERT has its bias under two names
            module._parameters.update({key: longer for key, p in module._parameters.items() if p is bias})
    padding = layer.padding_idx if isinstance(layer, FactoredEmbedding) else None
    if padding is not None and padding >= matrix.shape[0]:
        layer.padding_idx = None


def _resized_bias(bias: Tensor, size: int) -> Tensor:
    extra = size - bias.shape[0]
    return bias[:size].clone() if extra <= 0 else torch.cat([bias, bias.mean().expand(extra)])
