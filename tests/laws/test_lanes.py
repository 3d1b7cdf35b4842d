"""Laws of entropy coding in lanes: what is decoded is what was encoded, of every row alone and of all together."""

from __future__ import annotations

import numpy as np
import pytest

from kflats.common.errors import KflatsError
from kflats.numerics.coding.lanes import MOST_SYMBOLS, LaneCode, decode, encode, whole_frequencies

CLASSES, WIDE = 3, 1


def drawn_code(columns: int, rows: int, main: int, seed: int) -> LaneCode:
    """Three classes whose columns follow distributions of all widths, and a wide one."""
    g = np.random.default_rng(seed)
    kinds = [(whole_frequencies(np.array([5.0, 3.0, 0.0, 0.01])), 0)]
    for spread, shift in ((0.01, 0), (0.3, 0), (3.0, 0), (30.0, 0), (9.0, 3)):
        size = np.arange(min(MOST_SYMBOLS, int(8 * spread) + 2))
        kinds.append((whole_frequencies(np.exp(-size / (2 * spread))), shift))
    kinds.append((np.full(MOST_SYMBOLS, 16), 8))
    frequencies = np.stack([np.pad(of, (0, MOST_SYMBOLS - len(of))) for of, _ in kinds])
    contexts = g.integers(1, len(kinds) - 1, (CLASSES + WIDE, columns))
    contexts[CLASSES:] = len(kinds) - 1
    shifts = np.array([shift for _, shift in kinds])
    return LaneCode(frequencies, np.zeros(len(kinds), np.float32), shifts, contexts, rows, main, CLASSES)


def drawn_rows(code: LaneCode, lanes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(seed)
    labels = g.choice(CLASSES + WIDE, (lanes, code.rows), p=[0.5, 0.3, 0.15, 0.05]).astype(np.uint8)
    context = code.contexts[labels]
    symbols = (g.random(context.shape) ** 3 * (code.frequencies[context] > 0).sum(-1)).astype(np.int64)
    high, shift = symbols >> 1 ^ -(symbols & 1), code.shifts[context]
    values = (high << shift) + g.integers(0, 1 << shift)
    values[..., code.main :][labels < CLASSES] = 0
    return labels, values.astype(np.int32)


@pytest.mark.parametrize(("columns", "rows", "main"), [(9, 4, 6), (1, 8, 1), (5, 1, 0), (40, 2, 40)])
def test_decoding_inverts_encoding(columns: int, rows: int, main: int) -> None:
    """Many lanes, and so few that they are decoded one by one; lanes in any order, rows in any order."""
    code = drawn_code(columns, rows, main, 0)
    labels, values = drawn_rows(code, 150, 1)
    data, counts = encode(code, labels, values)
    ends = np.cumsum(counts)
    g = np.random.default_rng(2)
    for chosen in (np.arange(150), g.permutation(150)[:60], np.array([149, 3])):
        lanes = np.concatenate([np.arange(len(chosen)), g.integers(0, len(chosen), 100)])
        inside = g.integers(0, rows, len(lanes))
        got, numbers = decode(code, data, (ends - counts)[chosen], ends[chosen], lanes, inside)
        assert np.array_equal(got, labels[chosen[lanes], inside])
        assert np.array_equal(numbers, values[chosen[lanes], inside])


def test_damaged_bytes_decode_to_something() -> None:
    code = drawn_code(9, 4, 6, 0)
    data, counts = encode(code, *drawn_rows(code, 40, 1))
    ends = np.cumsum(counts)
    noise = np.random.default_rng(0).integers(0, 256, len(data)).astype(np.uint8)
    for some in (40, 3):
        lanes = np.arange(some)
        assert decode(code, noise, (ends - counts)[:some], ends[:some] + 99, lanes, lanes % 4)[1].shape == (some, 9)


def test_a_code_with_impossible_numbers_is_refused() -> None:
    code = drawn_code(3, 2, 2, 0)
    wrong = {"contexts": code.contexts + 90, "frequencies": code.frequencies + 1, "shifts": code.shifts + 9, "main": 4}
    wrong["rows"] = 2**40
    for name, value in wrong.items():
        with pytest.raises(KflatsError, match="impossible numbers"):
            LaneCode(**{**vars(code), name: value})
