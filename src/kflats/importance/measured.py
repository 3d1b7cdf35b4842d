"""The statistics of one weight, which measuring fills and importances read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Measured:
    """The statistics of one (n, d) weight; None for those that were not measured.

    Args:
        rows: n.
        counts: (n,) how often each row was read in the texts.
        prior: (n,) a guess of the same from the vocabulary alone (``counting.zipf_prior``), summing to 1.
        head: whether the matrix is an output head too, which uses every row for every token.
        row_fisher: (n,) I_i = sum_j mean_s (dL_s / dM_ij)^2, L_s the loss of sample s alone (FWSVD, eq. 3 and 5).
        column_fisher: (d,) the same summed over rows.
        input_gram: (n, n) mean over positions of x x', x what enters the layer; or (n,), its diagonal, where
            inputs are one-hot (embeddings).
        input_mean: (n,) mean over positions of x.
        fisher_gram: as input_gram, each position counting by the square of its output's gradient:
            sum_t ||g_t||^2 x_t x_t' / sum_t ||g_t||^2.
        fisher_mean: (n,) the mean of x with the same shares.
        output_gram: (d, d) mean over samples of sum_t g_t g_t', g_t the gradient of L_s at position t's output.
        samples, positions: numbers of both.
        columns: d.
    """

    rows: int
    counts: Tensor | None = None
    prior: Tensor | None = None
    head: bool = False
    row_fisher: Tensor | None = None
    column_fisher: Tensor | None = None
    input_gram: Tensor | None = None
    input_mean: Tensor | None = None
    fisher_gram: Tensor | None = None
    fisher_mean: Tensor | None = None
    output_gram: Tensor | None = None
    samples: int = 0
    positions: int = 0
    columns: int = 0
