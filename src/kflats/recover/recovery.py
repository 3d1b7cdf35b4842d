"""The record of a recovery: its epochs, the epoch that was kept, and the gain."""

from __future__ import annotations

from dataclasses import dataclass

from kflats.common.formatting import plain, table


@dataclass(frozen=True)
class Epoch:
    """Mean training loss of one epoch, and the metric's value after it (None: no evaluation)."""

    epoch: int
    loss: float
    value: float | None


@dataclass(frozen=True)
class Recovery:
    """The record of a recovery; printing it gives a table.

    Args:
        metric: the task's main metric, or "loss".
        before, after: its value on ``eval_split`` before and after; None without an evaluation.
        best_epoch: the epoch whose parameters were kept; 0: no epoch was better than the start, which was restored.
        epochs: all epochs that ran. stopped: True if ``patience`` ended the training early.
        trained, parameters: number of parameters that were trained, and of all.
        resumed: number of epochs that an earlier, interrupted run trained.
    """

    task: str
    split: str
    eval_split: str
    metric: str
    before: float | None
    after: float | None
    best_epoch: int
    epochs: tuple[Epoch, ...]
    stopped: bool
    train: str
    trained: int
    parameters: int
    distilled: bool
    seed: int
    seconds: float
    resumed: int

    def __str__(self) -> str:
        rows = [["start", "", "-" if self.before is None else f"{self.before:.4f}"]]
        for e in self.epochs:
            kept = " (kept)" if e.epoch == self.best_epoch and self.before is not None else ""
            rows.append([f"epoch {e.epoch}{kept}", f"{e.loss:.4f}", "-" if e.value is None else f"{e.value:.4f}"])
        evaluated = f"{self.metric} on {self.eval_split}" if self.eval_split else "-"
        lines = [
            f"{self.task}: {self.train} trained, {self.trained:,} of {self.parameters:,} parameters"
            + (", towards the original" if self.distilled else ""),
            "",
            plain(table(["", f"loss on {self.split}", evaluated], rows)),
        ]
        if self.before is not None and self.best_epoch == 0:
            lines += ["", "no epoch was better than the start, which was restored"]
        elif self.stopped:
            lines += ["", f"stopped early: {self.metric} no longer improved"]
        return "\n".join(lines)


def kept_epoch(history: tuple[Epoch, ...], before: float | None, higher_is_better: bool) -> tuple[int, float | None]:
    """The epoch whose parameters are kept, and its value: the first of the best.

    0 where the start, of value ``before``, was better than all epochs; the last epoch and no value where no epoch was
    evaluated.

    >>> kept_epoch((Epoch(1, 0.5, 0.8), Epoch(2, 0.4, 0.9)), 0.7, True), kept_epoch((Epoch(1, 0.5, 0.6),), 0.7, True)
    ((2, 0.9), (0, 0.7))
    """
    sign = 1.0 if higher_is_better else -1.0
    values = [(sign * e.value, -e.epoch) for e in history if e.value is not None]
    if before is None or not values:
        return len(history), None
    best, epoch = max(values)
    return (0, before) if sign * before > best else (-epoch, sign * best)
