"""Static models: a table with one vector for each token; the vector of a text is the mean of its tokens' vectors.

sentence-transformers (``StaticEmbedding``) and model2vec write such folders, and their own code reads and writes them
here. kflats adds one form: the table as factors or codes, of which only the rows that a text asks for are decoded.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from kflats.common.errors import KflatsError, first_line
from kflats.common.release import needed
from kflats.common.schema import JsonObject
from kflats.io.sources import is_model2vec

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class StaticConfig:
    """What other code asks the config of a model: the entries of its vocabulary."""

    vocab_size: int

    def get_text_config(self, **_: object) -> StaticConfig:
        """Itself: there is no other part."""
        return self


@dataclass(frozen=True)
class StaticOutput:
    """``last_hidden_state`` (texts, tokens, d): the vectors of the tokens."""

    last_hidden_state: Tensor


class StaticModel(nn.Module):
    """A table of token vectors as a model that is measured, compressed and compared like others.

    Args:
        embedding: the table, an ``nn.Embedding`` until it is compressed.
        tokenizer: of the library ``tokenizers``.
        origin: the config of model2vec that belongs to it (whether vectors are normalised, the longest text); empty
            where the table is sentence-transformers'.
    """

    def __init__(self, embedding: nn.Embedding, tokenizer: Tokenizer, origin: JsonObject) -> None:
        super().__init__()
        self.embedding, self.tokenizer, self.origin = embedding, tokenizer, origin
        self.config = StaticConfig(embedding.num_embeddings)

    @classmethod
    def of(cls, folder: Path, embedding: nn.Embedding, origin: JsonObject) -> StaticModel:
        """With the tokenizer in ``folder``.

        Raises:
            KflatsError: it has none that can be read.
        """
        return cls(embedding, read_tokenizer(folder), origin)

    def get_input_embeddings(self) -> nn.Module:
        """The table, as models of transformers call it."""
        return self.embedding

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> StaticOutput:
        """``(texts, tokens)`` ids -> the vectors of the tokens. Who takes means leaves out what the mask does."""
        return StaticOutput(self.embedding(input_ids))


def static_embedding() -> Any:
    """The class ``StaticEmbedding`` of sentence-transformers, wherever its version has it.

    Raises:
        KflatsError: sentence-transformers is missing.
    """
    needed("sentence_transformers", "kflats[static]", "a StaticEmbedding")
    try:
        return importlib.import_module("sentence_transformers.sentence_transformer.modules").StaticEmbedding
    except ImportError:  # before version 6
        return importlib.import_module("sentence_transformers.models").StaticEmbedding


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a static model, which adds no special tokens.

    Raises:
        KflatsError: there is none that can be read.
    """
    library: Any = needed("tokenizers", "kflats[static]", "a static model")
    try:
        tokenizer: Tokenizer = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception for a damaged file
        raise KflatsError(
            f"{folder} has no tokenizer that can be loaded",
            cause="tokenizer.json is missing or damaged",
            hint="put the tokenizer's file into the folder",
        ) from error
    return tokenizer


def fast_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a static model, in the form of transformers' tokenizers.

    Raises:
        KflatsError: as ``read_tokenizer``; transformers is missing.
    """
    library: Any = needed("transformers", "kflats[static]", "a tokenizer")
    backend = read_tokenizer(folder)
    backend.post_processor = None  # it adds special tokens, which static models do not read
    unknown = getattr(backend.model, "unk_token", None)
    names = {} if unknown is None else {"unk_token": unknown}
    tokenizer: PreTrainedTokenizerBase = library.PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    return tokenizer


def import_library(origin: JsonObject) -> None:
    """Import what ``read_static`` imports, for those who measure what loading alone takes.

    Raises:
        KflatsError: the library is missing.
    """
    if is_model2vec(origin):
        needed("model2vec", "kflats[static]", "a model of model2vec")
    else:
        static_embedding()


def read_static(folder: Path, origin: JsonObject) -> StaticModel:
    """A static model as its own library reads it.

    model2vec may store a weight for each token, and one row for several tokens. Both become part of the table, which
    then has a row for each token, as in sentence-transformers. Integers become float16, which holds them exactly.

    Args:
        folder: with the table. origin: its config; empty where it is not model2vec's.

    Raises:
        KflatsError: the library is missing, or cannot read the folder.
    """
    try:
        if is_model2vec(origin):
            library: Any = needed("model2vec", "kflats[static]", "a model of model2vec")
            static = library.StaticModel.from_pretrained(folder)
            table = static.embedding if static.token_mapping is None else static.embedding[static.token_mapping]
            if static.weights is not None:
                table = (table * static.weights[:, None]).astype(
                    np.float16 if table.dtype == np.float16 else np.float32
                )
            rows = torch.from_numpy(np.ascontiguousarray(table))
        else:
            origin = {}
            rows = static_embedding().load(str(folder)).embedding.weight.detach()
    except KflatsError:
        raise
    except Exception as error:  # both libraries raise many kinds of exceptions for a damaged folder
        raise KflatsError(
            f"the static model in {folder} cannot be loaded: {first_line(error)}",
            cause="a damaged folder, or one of another version of its library",
        ) from error
    rows = rows if rows.is_floating_point() else rows.to(torch.float16)
    return StaticModel.of(folder, nn.Embedding.from_pretrained(rows, freeze=False), origin)


def write_static(model: StaticModel, folder: Path) -> None:
    """Write a model whose table is dense as its own library does; both libraries read either form.

    Raises:
        KflatsError: the library is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = model.embedding.weight.detach().cpu()
    if is_model2vec(model.origin):
        library: Any = needed("model2vec.persistence", "kflats[static]", "a model of model2vec")
        rows = table.float() if table.dtype == torch.bfloat16 else table
        library.save_pretrained(folder, rows.numpy(), model.tokenizer, model.origin, create_model_card=False)
    else:
        static_embedding()(model.tokenizer, embedding_weights=table).save(str(folder))
