"""L1-PCA by bit flipping (Markopoulos, Karystinos & Pados, IEEE Trans. Signal Processing 62, 2014; Markopoulos, Kundu,
Chamadia & Pados, ibid. 65, 2017, L1-BF).

    max over Q (d, r), Q'Q = 1 of || A Q ||_1   =   max over B in {-1, 1}^(n x r) of || A'B ||_*   (2014, theorem 1)

Q is the orthonormal factor of A'B. The best B is among 2^(nr). L1-BF starts at one B and flips the bit that raises the
nuclear norm most, until no bit does. Here one direction is found after the other (r = 1 each time). Flips end at a
fixed point; not every fixed point is an end of flips.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baselines.l1_fixed_point import L1Basis, deflated, fixed_point, signs


def greedy_bit_flipping(matrix: Tensor, rank: int, *, max_flips: int = 10_000) -> L1Basis:
    """One direction after the other, each flipped from its fixed point: O(n d) a flip. Nested, as ``fixed_point``.

    >>> a = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    >>> greedy_bit_flipping(a, 3).basis.shape
    torch.Size([3, 8])
    """

    def one(rest: Tensor, place: int) -> L1Basis:
        return _flip_one(rest, signs(rest @ fixed_point(rest, 1).basis[0]), max_flips)

    return deflated(matrix, rank, one)


def _flip_one(a: Tensor, bits: Tensor, max_flips: int) -> L1Basis:
    """r = 1: ||A'b||^2 changes by 4 ||a_n||^2 - 4 b_n a_n'A'b."""
    squares = a.square().sum(1)
    m = a.T @ bits
    inner = a @ m
    flips, converged = 0, False
    while flips < max_flips:
        gains = squares - bits * inner
        row = int(gains.argmax())
        if float(gains[row]) <= 1e-6 * float(squares[row]):
            converged = True
            break
        m = m - 2 * bits[row] * a[row]
        inner = inner - 2 * bits[row] * (a @ a[row])
        bits[row] *= -1
        flips += 1
    length = torch.linalg.vector_norm(m)
    return L1Basis((m / length)[None], float(length), flips, converged)
