"""A static model of 250,000 tokens x 768 numbers, as multilingual ones have them: bytes, time, memory, error, speed.

No such model is at hand, so its table is put together from real rows. It has no meaning, but the spectrum, the norms
and the clusters of real tables:

- a token is a pair of tokens of all-MiniLM-L6-v2: 384 numbers are its row of the word table, and 384 are the row of
  another token, drawn among the ten that are nearest by the vectors of the distilled static model (``static.py``);
- each pair is repeated eight or nine times, as a word is in several languages. A repetition adds noise: the difference
  of the rows of two other pairs, drawn, times a third, which has two ninths of a row's energy;
- a random rotation of all 768 axes hides where the halves are;
- the order is that of the pairs' first tokens, the repetitions of one side by side, so that ids are ranks by frequency.

The vocabulary is 250,000 made-up words, for the Zipf prior alone. ``kflats compress --size "1.2 bits"`` runs in a fresh
process: seconds of the CPU, and its largest memory beyond its imports. Another one opens the folder, and one the
original: milliseconds to open (the tokenizer included) and to the first vector, and the memory that both took; then
rows a second in batches of 32 x 30 tokens drawn by Zipf's law: a thousand batches while blocks are decoded, and again.

    python benchmarks/static_large.py --cache DIR --write benchmarks/results/static_large.md
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch
from _common import arguments, embedding_table, markdown, publish
from static import distilled, opened
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F

from kflats.common.formatting import size
from kflats.demo import packaged_model
from kflats.evaluation.outputs import load_tokenizer, weight_file_bytes
from kflats.io.saving import load_model

ROWS, HALF = 250_000, 384
NEAR = 10
NOISE = 1 / 3
TURNS = 1
BITS = ("1.2",)
COMPRESS = """
import resource, sys, time, torch
torch.set_num_threads(1)
from kflats.compress.pipeline import compress_folder
from kflats.evaluation.proof import peak_memory
import transformers, constriction, sentence_transformers
before, cpu = peak_memory(), time.process_time()
compress_folder(sys.argv[1], sys.argv[2], size=sys.argv[3] + " bits", quiet=True)
print(time.process_time() - cpu, peak_memory() - before)
"""
WATCH = """
import json, sys, time, torch
torch.set_num_threads(1)
import kflats, kflats.io.static, constriction, sentence_transformers.kflats
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
before, times = resident(), [time.perf_counter()]
model = SentenceTransformer(sys.argv[1], device="cpu", local_files_only=True)
times.append(time.perf_counter())
model.encode(["word17 word230 word5 word91 word1204 word8 word33 word40000 word7 word612"])
times.append(time.perf_counter())
grown = resident() - before
draws = torch.Generator().manual_seed(0)
prior = 1 / (torch.arange(250_000) + 2.7)
batches = [torch.multinomial(prior, 960, replacement=True, generator=draws) for _ in range(1000)]
offsets = torch.arange(0, 960, 30)
with torch.inference_mode():
    for _ in range(2):
        for ids in batches:
            model[0].embedding(ids, offsets)
        times.append(time.perf_counter())
opened, first, *rates = (b - a for a, b in zip(times, times[1:]))
rates = [960_000 / seconds for seconds in rates]
print(json.dumps([1000 * opened, 1000 * first, grown / 1000, *rates, (resident() - before) / 1000]))
"""


def built(static: Path) -> Tensor:
    """The (250,000, 768) table of the docstring, float32."""
    draws = torch.Generator().manual_seed(0)
    words, tokenizer = embedding_table(), load_tokenizer(packaged_model())
    model = opened(static)
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(token) for token in model.tokens])
    vectors = F.normalize(torch.from_numpy(model.embedding).float(), dim=1)
    pairs = []
    for part in torch.arange(len(ids)).split(1024):
        near = (vectors[part] @ vectors.T).topk(NEAR + 1).indices[:, 1:]
        chosen = near.gather(1, torch.randint(NEAR, (len(part), 1), generator=draws)).squeeze(1)
        pairs.append(torch.cat([words[ids[part]], words[ids[chosen]]], 1))
    base = torch.cat(pairs)
    base = base @ torch.linalg.qr(torch.randn(2 * HALF, 2 * HALF, generator=draws)).Q
    table = base[torch.arange(ROWS) * len(base) // ROWS]
    for part in torch.arange(ROWS).split(10_000):
        a, b = torch.randint(len(base), (2, len(part)), generator=draws)
        table[part] += NOISE * (base[a] - base[b])
    return table


def original(cache: Path) -> Path:
    """The folder of the static model with that table."""
    folder = cache / "large"
    if not folder.is_dir():
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import StaticEmbedding

        vocabulary = Tokenizer(models.WordLevel({f"word{i}": i for i in range(ROWS)}, unk_token="word0"))
        vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
        static = StaticEmbedding(vocabulary, embedding_weights=built(distilled(cache / "distilled")))
        SentenceTransformer(modules=[static], device="cpu").save_pretrained(str(folder))
    return folder


def run(program: str, *values: str) -> str:
    """The last line that a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", program, *values], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def errors(source: Path, small: Path) -> tuple[float, float]:
    """Relative squared error, rows weighted by Zipf's law and alike."""
    before, matrix = load_model(source).embedding.weight.detach(), load_model(small).embedding.matrix
    prior = 1 / (torch.arange(ROWS, dtype=torch.float64) + 2.7)
    lost, energy = torch.empty(ROWS, dtype=torch.float64), torch.empty(ROWS, dtype=torch.float64)
    for part in torch.arange(ROWS).split(8192):
        rows = matrix.rows(part).detach()
        lost[part], energy[part] = ((x.double().square().sum(1)) for x in (rows - before[part], before[part]))
    return float((lost @ prior) / (energy @ prior)), float(lost.sum() / energy.sum())


def spectrum(source: Path) -> str:
    """What stands below the tables: how much of the energy the leading axes have, and the norms."""
    table = load_model(source).embedding.weight.detach()
    gram = sum((part.T @ part).double() for part in table.split(8192))
    values = torch.linalg.eigvalsh(gram).flip(0)  # type: ignore[arg-type, unused-ignore]
    shares = (values.cumsum(0) / values.sum())[[31, 127, 383]].tolist()
    norms = table.norm(dim=1).quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    return (
        "The first 32, 128 and 384 axes have {:.3f}, {:.3f} and {:.3f} of the energy; "
        "norms of rows are {:.2f}, {:.2f} and {:.2f} (5th percentile, median, 95th)."
    ).format(*shares, *norms)


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = arguments(__doc__, cache="")
    if not options.cache:
        raise SystemExit("--cache DIR: a folder for the models")
    cache = Path(options.cache)
    source, rows = original(cache), []
    folders = {"original, float32": source}
    for bits in BITS:
        folders[f"kflats, {bits} bits"] = small = cache / f"large {bits}"
        note = small.with_suffix(small.suffix + ".json")
        if not note.is_file():
            note.write_text(json.dumps(run(COMPRESS, str(source), str(small), bits)), encoding="utf-8")
        cpu, peak = map(float, json.loads(note.read_text(encoding="utf-8")).split())
        weighted, alike = errors(source, small)
        nbytes = weight_file_bytes(small)
        rows.append(
            [
                f"{nbytes:,}",
                f"{8 * nbytes / (ROWS * 2 * HALF):.3f}",
                f"{cpu:.0f} s of CPU",
                size(int(peak)),
                f"{weighted:.4f}",
                f"{alike:.4f}",
            ]
        )
    head = ["bytes", "bits a number", "time to compress", "peak memory", "error, by Zipf's law", "rows alike"]
    first = markdown(["version", *head], [[name, *row] for name, row in zip(list(folders)[1:], rows, strict=True)])
    found = {name: list[list[float]]() for name in folders}
    for turn in range(TURNS):
        for name in list(folders)[:: 1 if turn % 2 else -1]:
            found[name].append(json.loads(run(WATCH, str(folders[name]))))
    second = []
    for name, turns in found.items():
        opened, vector, memory, early, late, after = (median(column) for column in zip(*turns, strict=True))
        ratio = median(own[4] / other[4] for own, other in zip(turns, found["original, float32"], strict=True))
        second.append(
            [name, f"{opened:.0f}", f"{vector:.0f}", f"{memory:.0f} MB", f"{early:,.0f}", f"{late:,.0f} ({ratio:.3f})"]
        )
        second[-1].append(f"{after:.0f} MB")
    columns = ["opened", "open, ms", "first vector, ms", "memory", "rows a second at first", "then", "memory then"]
    body = f"{first}\n\n{markdown(columns, second)}\n\n{spectrum(source)}"
    publish("A table of 250,000 x 768: built of real rows, measured in full", body, options)
