"""Claim: the form of the texts does not matter. One text (WikiText-2 train) as files of tokenised paragraphs, tokenised
sentences, plain sentences, a book and JSON lines compresses the same encoder to nearly the same outputs. Beside them:
the same encoder without texts.

"layers": the 36 linear layers of all-MiniLM-L6-v2 in 5,266,944 numbers, half of theirs. "8MB": the whole model.
Nothing is fine-tuned. Each line is the command line in a process of its own, on one core. Judged on CoLA dev sentences
and on paragraphs of WikiText-2 valid, both by the cosine to the original's vectors.

    python benchmarks/text_forms.py --write benchmarks/results/text_forms.md

``--commit`` compresses with the source tree of another commit of this repository: 513dfe5 is the last one before
texts were measured with drawn tokens beside them, d7ec548 the last one that measured the lines of a file as they were.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from _common import arguments, publish, table
from _sentences import data_folder, paragraphs, sentences
from safetensors.torch import load_file

from kflats.common.sentences import sentences as split
from kflats.common.sentences import undo_marks
from kflats.demo import packaged_model
from kflats.evaluation.outputs import fidelity_of

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = 5_266_944
PARAGRAPHS = 300
COMPRESS = "from kflats.cli.app import main; main()"
# Mean pooling as sentence-transformers does it; whatever the tree's own functions are called.
ENCODE = """
import sys, json, torch, kflats
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer
folder, texts, out = sys.argv[1:]
tokenizer, model, vectors = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval(), {}
for name, those in json.loads(open(texts).read()).items():
    rows = []
    for start in range(0, len(those), 32):
        batch = tokenizer(those[start : start + 32], padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            mask, hidden = batch["attention_mask"].unsqueeze(2), model(**batch).last_hidden_state
        rows.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
    vectors[name] = torch.cat(rows)
save_file(vectors, out)
"""


def write_forms(folder: Path, lines: Sequence[str]) -> dict[str, Path]:
    """Files of one text, by form."""
    plain = undo_marks(lines)[0]
    contents = {
        "paragraphs, tokenised": ("paragraphs.txt", "\n".join(lines)),
        "sentences, tokenised": (
            "tokenised.txt",
            "\n".join(part.strip() for line in lines for part in re.findall(r".+?(?: [.!?](?= |$)|$)", line)),
        ),
        "sentences": ("sentences.txt", "\n".join(part.strip() for text in plain for part in split(text))),
        "book": ("book.txt", "\n\n".join(textwrap.fill(text, 72) for text in plain)),
        "JSON lines": ("lines.jsonl", "\n".join(json.dumps({"id": str(i), "body": t}) for i, t in enumerate(plain))),
    }
    for name, text in contents.values():
        (folder / name).write_text(text, encoding="utf-8")
    return {form: folder / name for form, (name, _) in contents.items()}


def in_tree(tree: Path, code: str, *given: object) -> None:
    """Run Python code with the package of a source tree, on one core."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, given)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)


def main() -> None:
    options = arguments(__doc__, only="", what="layers and 8MB", commit="")
    source, data = packaged_model(), data_folder()
    if data is None:
        raise SystemExit("no folder of data sets: set KFLATS_DATA")
    lines: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as place:
        tree, judged, vectors = ROOT, Path(place) / "judged.json", Path(place) / "vectors"
        if options.commit:
            tree = Path(place) / "tree"
            archive = subprocess.run(["git", "-C", ROOT, "archive", options.commit], check=True, capture_output=True)
            tree.mkdir()
            subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
        proves = any("--no-proof" in path.read_text() for path in (tree / "src/kflats/cli").glob("*.py"))
        proof = ["--no-proof"] if proves else []
        judged.write_text(json.dumps({"sentences": sentences("cola"), "paragraphs": paragraphs("valid", PARAGRAPHS)}))
        in_tree(tree, ENCODE, source, judged, vectors)
        before = load_file(vectors)
        forms: dict[str, Path | None] = dict(write_forms(Path(place), sentences("wikitext2")))
        for form, file in {**forms, "no texts": None}.items():
            texts = [] if file is None else ["--texts", file]
            layers = ["--weights", "encoder.layer.*", "--method", "svd", "--keep", f"{NUMBERS} params"]
            layers += ["--importance", "uniform" if file is None else "kronecker"]
            kinds = {"layers": layers, "8MB": ["--weights", "all", "--method", "auto", "--size", "8MB"]}
            for what, asked in kinds.items():
                if options.only not in form or what not in options.what:
                    continue
                out = Path(place) / f"{form} {what}"
                in_tree(tree, COMPRESS, "compress", source, *asked, *texts, "--out", out, "--quiet", *proof)
                in_tree(tree, ENCODE, out, judged, vectors)
                line: dict[str, object] = {"what": what, "texts": form}
                for kind, those in load_file(vectors).items():
                    near = fidelity_of(before[kind], those)
                    line[f"{kind}: mean cosine"] = f"{near.mean_cosine:.4f}"
                    line[f"{kind}: 5th percentile"] = f"{near.p5_cosine:.4f}"
                lines.append(line)
                print(lines[-1], flush=True)
    lines.sort(key=lambda line: line["what"] != "layers")
    tree_name = f" (commit {options.commit})" if options.commit else ""
    publish(f"The same encoder from several forms of one text{tree_name}", table(lines), options)


if __name__ == "__main__":
    main()
