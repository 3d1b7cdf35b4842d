"""The module of sentence-transformers for compressed static models: ``SentenceTransformer(FOLDER)`` finds it by name.

``kflats.io.plugin`` offers this file as ``sentence_transformers.kflats``, the name that ``modules.json`` holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from kflats.common.errors import KflatsError
from kflats.io.saving import load_static, save_model
from kflats.io.static import StaticModel, static_embedding
from kflats.matrices.base import distinct
from kflats.model.weights import factored_layers

_Dense: Any = static_embedding()


class Bag(nn.Module):
    """An ``nn.EmbeddingBag`` (mode "mean") on the table of a static model; rows that are read are decoded, no others.

    ``(ids,)`` and the ``offsets`` at which bags begin, or ``(bags, ids)``, -> ``(bags, d)``.
    """

    mode = "mean"

    def __init__(self, static: StaticModel) -> None:
        super().__init__()
        self.static = static
        self.num_embeddings, self.embedding_dim = static.embedding.num_embeddings, static.embedding.embedding_dim

    @property
    def weight(self) -> Tensor:
        """The first factor, for code that reads a layer's dtype or device."""
        return self.static.embedding.weight

    def forward(self, input: Tensor, offsets: Tensor | None = None) -> Tensor:
        """The means of the bags' rows; zeros for an empty bag."""
        values, places = distinct(input)
        return F.embedding_bag(places.view_as(input), self.static.embedding(values), offsets, mode=self.mode)


class StaticEmbedding(_Dense):  # type: ignore[misc]
    """sentence-transformers' class of that name with a compressed table."""

    def __init__(self, static: StaticModel) -> None:
        super(_Dense, self).__init__()  # its own makes a dense table
        self.embedding = Bag(static)
        self.num_embeddings, self.embedding_dim = self.embedding.num_embeddings, self.embedding.embedding_dim
        self.tokenizer = static.tokenizer
        self.tokenizer.no_padding()
        self.base_model = None

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        **_: Any,
    ) -> StaticEmbedding:
        """From a folder, or from the hub, as the other modules.

        Raises:
            KflatsError: a file is missing; as ``load_static``.
        """
        places = []
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            place = cls.load_file_path(
                model_name_or_path, name, subfolder, token, cache_folder, revision, local_files_only=local_files_only
            )
            if place is None:
                raise KflatsError(f"{model_name_or_path} has no {name}", cause="a folder that is not whole")
            places.append(place)
        return cls(load_static(Path(places[0]).parent))

    def save(self, output_path: str, *args: Any, **settings: Any) -> None:
        """As kflats saves a static model.

        Raises:
            KflatsError: its table is dense again.
        """
        if not any(True for _ in factored_layers(self)):
            raise KflatsError(
                "a compressed static model cannot be saved with a dense table",
                hint="kflats export --dense of its folder",
            )
        save_model(self.embedding.static, output_path)


kflats = StaticEmbedding
"""Up to 5.2, sentence-transformers saves the name of a class's module, and looks in that module for its last part."""
