"""Goals: a coded lookup at most 3 x a factored one in fp32, an encoder at most 1.05 x, a stream of 11.7 M in 4 s.

The 30522 x 384 word embeddings of all-MiniLM-L6-v2, transform coded at several bits a weight, rows weighted by a Zipf
prior, in memory at their fixed rate. Timed beside a baseline in interleaved pairs:

- rows of 32 x 128 tokens drawn by Zipf's law, against ``FactoredEmbedding`` on a ``LowRankMatrix`` of the same rank in
  float32 (as many columns multiplied by as large a basis), and against the rank that has the same bytes;
- the whole encoder with its word embedding replaced, against the original.

Then, once each: the stream (bytes, seconds to encode and to decode into the fixed-rate form), and, of a fresh process
that loads the folder, reads every row and encodes a sentence, what it adds to resident memory, beside the original.

    python benchmarks/coded_lookup.py --write benchmarks/results/coded_lookup.md
"""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import EMBEDDING, arguments, embedding_table, markdown, median_pair, publish
from torch import Tensor

from kflats.codecs.streams import decode, encode
from kflats.codecs.transform import from_codes
from kflats.demo import packaged_model
from kflats.io import annotate_, load_model
from kflats.matrices.layers import FactoredEmbedding
from kflats.matrices.registry import CodedMatrix, LowRankMatrix
from kflats.model.swap import swap_
from kflats.model.weights import find_weight
from kflats.numerics.coding.encode import transform_code
from kflats.numerics.rows import TensorRows

RESIDENT = """
import ctypes, sys, torch
torch.set_num_threads(1)
import constriction, kflats.io.transformers_plugin, transformers.models.bert.modeling_bert
from kflats.io import load_model
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
before = resident()
model = load_model(sys.argv[1]).eval()
with torch.no_grad():
    for ids in torch.arange(model.config.vocab_size).split(256):  # pages of a file count once they are read
        model.get_input_embeddings()(ids)
    model(torch.tensor([[101, 2023, 2003, 102]]))
tensors = {id(t): t.nbytes for t in [*model.parameters(), *model.buffers()]}
print(sum(tensors.values()) / 1e6, (resident() - before) / 1e3)
if sys.platform == "linux":
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system; the allocator would keep it for later
print((resident() - before) / 1e3)
"""


def zipf(n: int) -> Tensor:
    return 1 / torch.arange(1, n + 1, dtype=torch.float64)


def tokens(n: int) -> Tensor:
    return torch.multinomial(zipf(n), 32 * 128, replacement=True, generator=torch.Generator().manual_seed(0)).view(
        32, 128
    )


def look_up(matrix: Any) -> Any:
    return FactoredEmbedding(matrix).requires_grad_(False)


def coded(table: Tensor, bits: float) -> CodedMatrix:
    weights = zipf(len(table)).sqrt() + 1e-3
    nbytes = int(bits * table.numel() / 8)
    return from_codes(
        transform_code(TensorRows(table), nbytes, lambda code: len(encode(from_codes(code))), weights=weights)
    )


def low_rank(n: int, d: int, rank: int) -> LowRankMatrix:
    return LowRankMatrix(torch.randn(n, rank), torch.randn(rank, d))


def lookups(matrix: CodedMatrix, ids: Tensor, rounds: int) -> list[str]:
    (n, d), rank = matrix.shape, matrix.geometry.rank
    ours, cells = look_up(matrix), []
    for other in (rank, max(1, matrix.nbytes // (4 * (n + d)))):
        theirs = look_up(low_rank(n, d, other))
        a, b, ratio = median_pair(lambda: ours(ids), lambda theirs=theirs: theirs(ids), rounds)
        cells += [f"{a * 1e3:.2f}", f"{b * 1e3:.2f} (rank {other})", f"**{ratio:.2f}**"]
    return [cells[0], *cells[1:3], *cells[4:]]


def streamed(matrix: CodedMatrix) -> list[str]:
    start = time.perf_counter()
    stream = encode(matrix)
    middle = time.perf_counter()
    found = decode(stream, matrix.geometry)
    end = time.perf_counter()
    assert torch.equal(found["codes"], matrix.get_buffer("codes"))
    return [f"{len(stream):,}", f"{middle - start:.2f}", f"**{end - middle:.2f}**"]


def resident(folder: Path) -> list[str]:
    """MB of tensors; resident MB that loading and one pass added to a fresh process; and without its free pages."""
    done = subprocess.run([sys.executable, "-c", RESIDENT, str(folder)], capture_output=True, text=True, check=True)
    return [f"{float(word):.1f}" for word in done.stdout.split()[-3:]]


def main() -> None:
    given = arguments(__doc__, rounds=40, encoders=12)
    torch.set_num_threads(1)
    table = embedding_table()
    ids, lines, whole = tokens(len(table)), [], []
    original = load_model(packaged_model()).eval().requires_grad_(False)
    before = resident(packaged_model())
    with torch.no_grad(), tempfile.TemporaryDirectory() as scratch:
        for bits in (4.0, 2.0, 1.0, 0.6):
            matrix = coded(table, bits)
            fixed = matrix.nbytes
            ints = sum(rows for rows, _ in matrix.geometry.classes) * matrix.geometry.rank
            lines.append([f"{bits}", f"{fixed:,}", *lookups(matrix, ids, given.rounds), f"{ints:,}", *streamed(matrix)])
            small = copy.deepcopy(original)
            swap_(small, find_weight(small, EMBEDDING), matrix)
            small.requires_grad_(False)
            a, b, ratio = median_pair(lambda small=small: small(ids), lambda: original(ids), given.encoders)
            annotate_(small)
            folder = Path(scratch) / str(bits)
            small.save_pretrained(folder)
            whole.append([f"{bits}", f"{a:.3f}", f"{b:.3f}", f"**{ratio:.3f}**", *resident(folder)])
    head = ["bits asked", "bytes in memory", "lookup, ms", "factored, ms", "ratio", "same bytes, ms", "ratio"]
    body = markdown([*head, "integers", "stream, bytes", "encode, s", "decode, s"], lines)
    body += "\n\n" + markdown(
        ["bits asked", "encoder, s", "original, s", "ratio", "tensors, MB", "resident, MB", "free pages returned, MB"],
        [*whole, ["original", "", "", "", *before]],
    )
    publish("Coded lookups and streams", body, given)


if __name__ == "__main__":
    main()
