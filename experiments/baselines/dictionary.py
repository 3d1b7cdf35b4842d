"""Dictionary learning: each row is a combination of at most s atoms of a shared dictionary (MESSI's appendix E.1),
by scikit-learn: online learning (Mairal, Bach, Ponce & Sapiro, ICML 2009), then orthogonal matching pursuit.

    minimise over D (K, d) and codes C (n, K) with at most s nonzeros a row:   || A - C D ||_F^2

k flats of rank j are such a dictionary, of kj atoms, whose rows may use only j together, from one group: they need no
index of every coefficient, only one label a row.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from baselines.sparse import unsigned_bytes


def dictionary_bytes(n: int, d: int, atoms: int, nonzeros: int, itemsize: int = 4) -> int:
    """The atoms, and for each row its coefficients and their indices in the smallest unsigned type.

    >>> dictionary_bytes(1000, 64, 256, 8)
    105536
    """
    return atoms * d * itemsize + n * nonzeros * (itemsize + unsigned_bytes(atoms - 1))


def nonzeros_that_fit(n: int, d: int, atoms: int, nbytes: int, itemsize: int = 4) -> int:
    """The largest s; 0 where not even one coefficient a row fits."""
    spare = nbytes - atoms * d * itemsize
    return max(min(spare // (n * (itemsize + unsigned_bytes(atoms - 1))), d), 0)


def learn(matrix: Tensor, atoms: int, nonzeros: int, *, passes: int = 3, batch: int = 512, seed: int = 0) -> Tensor:
    """(atoms, d) unit atoms, learnt from the rows of ``matrix``."""
    from sklearn.decomposition import MiniBatchDictionaryLearning

    learner = MiniBatchDictionaryLearning(
        n_components=atoms,
        max_iter=passes,
        batch_size=batch,
        random_state=seed,
        fit_algorithm="cd",
        transform_algorithm="omp",
        transform_n_nonzero_coefs=nonzeros,
    )
    return torch.from_numpy(learner.fit(matrix.double().numpy()).components_).to(matrix.dtype)


def encode(matrix: Tensor, dictionary: Tensor, nonzeros: int) -> Tensor:
    """(n, K) codes with at most ``nonzeros`` nonzeros a row, by orthogonal matching pursuit."""
    from sklearn.decomposition import sparse_encode

    with warnings.catch_warnings():  # a row that fewer atoms reach exactly ends early, and that is no fault
        warnings.filterwarnings("ignore", "Orthogonal matching pursuit ended prematurely", RuntimeWarning)
        codes = sparse_encode(
            matrix.double().numpy(), dictionary.double().numpy(), algorithm="omp", n_nonzero_coefs=nonzeros
        )
    return torch.from_numpy(codes).to(matrix.dtype)
