"""L1-PCA by a fixed point: one direction at a time (Kwak, IEEE TPAMI 2008), or all at once (Nie, Huang, Ding, Luo &
Wang, IJCAI 2011).

    maximise over Q (d, r) with Q'Q = 1:   || A Q ||_1,   the sum of |coordinates|

    B = sign(A Q),  Q = the orthonormal factor of A'B   until B stays

Every step raises the sum; it ends at a B that no step changes, not always at the best one. What L1-PCA maximises, the
spread that is kept, is not what an l1 approximation minimises, the error: for squares the two are one, for |.| not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class L1Basis:
    """``basis`` (r, d), orthonormal rows; ``objective`` = ||A Q||_1; ``steps``: fixed-point steps or bit flips."""

    basis: Tensor
    objective: float
    steps: int
    converged: bool

    def approximate(self, matrix: Tensor) -> Tensor:
        """Every row projected onto the basis."""
        return (matrix @ self.basis.T) @ self.basis


def fixed_point(matrix: Tensor, rank: int, *, together: bool = False, max_iterations: int = 500) -> L1Basis:
    """From the directions of the SVD: ``rank`` of them greedily (Kwak), or ``together`` (Nie et al.).

    Beyond the matrix's rank greedy directions are any that complete the basis.

    Greedy bases are nested: the first q directions are the basis of rank q.

    >>> found = fixed_point(torch.tensor([[3.0, 0.0], [2.0, 0.0], [0.0, 4.0]]), 1)
    >>> round(found.objective, 4)
    6.4031
    """
    if not together:
        return deflated(matrix, rank, lambda rest, _: _climb(rest, leading(rest, 1), max_iterations))
    return _climb(matrix, leading(matrix, rank), max_iterations)


def leading(matrix: Tensor, rank: int) -> Tensor:
    """(rank, d) leading right singular vectors."""
    gram = matrix.to(torch.float64)
    return torch.linalg.eigh(gram.T @ gram).eigenvectors.flip(1)[:, :rank].T.to(matrix.dtype)


def polar(m: Tensor) -> Tensor:
    """The orthonormal (d, r) factor of m (d, r): the Q that maximises tr(Q'm)."""
    u, _, v = torch.linalg.svd(m, full_matrices=False)
    return u @ v


def signs(x: Tensor) -> Tensor:
    """-1 or 1; of zero, 1 (Kwak disturbs the direction instead: step 4a)."""
    return torch.where(x < 0, -1.0, 1.0).to(x.dtype)


def deflated(matrix: Tensor, rank: int, one: Callable[[Tensor, int], L1Basis]) -> L1Basis:
    """Directions one after the other, each of what the ones before leave over."""
    rest = matrix.clone()
    basis = matrix.new_zeros(rank, matrix.shape[1])
    least = 100 * torch.finfo(matrix.dtype).eps * float(torch.linalg.vector_norm(matrix))
    steps, converged = 0, True
    for place in range(rank):
        if not float(torch.linalg.vector_norm(rest)) > least:  # rounding has directions too
            basis[place:] = completion(basis[:place], rank - place)
            break
        found = one(rest, place)
        direction = found.basis[0] - basis[:place].T @ (basis[:place] @ found.basis[0])
        basis[place] = direction / torch.linalg.vector_norm(direction)
        rest -= torch.outer(rest @ basis[place], basis[place])
        steps, converged = steps + found.steps, converged and found.converged
    return L1Basis(basis, float((matrix @ basis.T).abs().sum(dtype=torch.float64)), steps, converged)


def completion(basis: Tensor, count: int) -> Tensor:
    """(count, d) orthonormal rows, orthogonal to those of ``basis`` (r, d)."""
    vectors = torch.linalg.svd(basis, full_matrices=True).Vh if len(basis) else torch.eye(basis.shape[1]).to(basis)
    return vectors[len(basis) : len(basis) + count]


def _climb(matrix: Tensor, basis: Tensor, max_iterations: int) -> L1Basis:
    coordinates = matrix @ basis.T
    bits, steps, converged = signs(coordinates), 0, False
    while not converged and steps < max_iterations:
        steps += 1
        basis = polar(matrix.T @ bits).T
        coordinates = matrix @ basis.T
        new = signs(coordinates)
        converged, bits = bool(torch.equal(new, bits)), new
    return L1Basis(basis, float(coordinates.abs().sum(dtype=torch.float64)), steps, converged)
