"""L1-PCA by bit flipping (Markopoulos, Karystinos & Pados, IEEE Trans. Signal Processing 62, 2014; Markopoulos, Kundu,
Chamadia & Pados, ibid. 65, 2017, L1-BF).

    max over Q (d, r), Q'Q = 1 of || A Q ||_1   =   max over B in {-1, 1}^(n x r) of || A'B ||_*   (2014, theorem 1)

Q is the orthonormal factor of A'B. The best B is among 2^(nr); L1-BF starts at one and flips the bit that raises the
nuclear norm most, until none does. For one direction, whatever flipping ends at is a fixed point too, and not the other
way round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baselines.l1_fixed_point import L1Basis, deflated, fixed_point, leading, polar, signs

LARGEST = 2e7
"""Numbers of n r candidates of r x r: more do not fit comfortably; ``greedy`` needs n."""


def bit_flipping(matrix: Tensor, rank: int, *, starts: int = 1, seed: int = 0, max_flips: int = 100_000) -> L1Basis:
    """All r directions together: the best of ``starts`` runs, from the signs of the SVD's coordinates and then from
    random ones. One flip costs O(n d r + n r^4): for small matrices.

    Raises:
        ValueError: a matrix too large for it; take ``greedy_bit_flipping``.

    >>> found = bit_flipping(torch.tensor([[3.0, 0.0], [2.0, 0.0], [0.0, 4.0]]), 1)
    >>> round(found.objective, 4)
    6.4031
    """
    a = matrix.to(torch.float64)
    if a.shape[0] * rank**3 > LARGEST:
        raise ValueError(f"{a.shape[0]} rows at rank {rank} are too many to flip together: greedy_bit_flipping")
    generator = torch.Generator().manual_seed(seed)
    best: L1Basis | None = None
    for run in range(starts):
        drawn = torch.randn(a.shape[0], rank, generator=generator, dtype=a.dtype)
        found = _flip(a, signs(drawn if run else a @ leading(a, rank).T), max_flips)
        best = found if best is None or found.objective > best.objective else best
    assert best is not None
    return L1Basis(best.basis.to(matrix.dtype), best.objective, best.steps, best.converged)


def greedy_bit_flipping(matrix: Tensor, rank: int, *, max_flips: int = 10_000) -> L1Basis:
    """One direction after the other, each flipped from its fixed point: O(n d) a flip. Nested, as ``fixed_point``.

    >>> a = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    >>> greedy_bit_flipping(a, 3).basis.shape
    torch.Size([3, 8])
    """

    def one(rest: Tensor, place: int) -> L1Basis:
        return _flip_one(rest, signs(rest @ fixed_point(rest, 1).basis[0]), max_flips)

    return deflated(matrix, rank, one)


def _flip(a: Tensor, bits: Tensor, max_flips: int) -> L1Basis:
    rank = bits.shape[1]
    squares = a.square().sum(1)
    unit = torch.eye(rank, dtype=a.dtype)
    corner = torch.einsum("ki,kj->kij", unit, unit)
    m = a.T @ bits
    value = float(torch.linalg.svdvals(m).sum())
    flips, converged = 0, False
    while flips < max_flips:
        inner = a @ m  # (n, r): x_n' A'B
        crossed = torch.einsum("ki,nj->nkij", unit, inner)
        moved = -2 * bits[:, :, None, None] * (crossed + crossed.transpose(2, 3))
        grams = m.T @ m + moved + 4 * squares[:, None, None, None] * corner
        norms = torch.linalg.eigvalsh(grams).clamp_min(0).sqrt().sum(-1)  # (n, r): the nuclear norm after each flip
        row, column = divmod(int(norms.argmax()), rank)
        new = m.clone()
        new[:, column] -= 2 * bits[row, column] * a[row]
        raised = float(torch.linalg.svdvals(new).sum())
        if raised <= value * (1 + 1e-12):
            converged = True
            break
        bits[row, column] *= -1
        m, value, flips = new, raised, flips + 1
    return L1Basis(polar(m).T, value, flips, converged)


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
