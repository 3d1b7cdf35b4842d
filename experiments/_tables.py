"""Tables, orderings and figures of a log of runs; where a cell has no run, it says "not run".

Runs are paired between methods where they compressed the same model: one seed trains different models on two kinds of
CPU, which their scores before compression tell apart. All of them count in comparisons: the value of a seed is the mean
over its models. The cells of a column are of the models that all its methods compressed, where there are such. An
interval is that of the mean of paired differences (Student's t, 95 %, by SciPy). It covers the chance of training and
of starts, not that of the judged examples. An ordering is claimed only if its interval excludes 0; of twenty ties one
is expected to look like a difference.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from _results import markdown as markdown
from _runs import Asked, Run, libraries, model_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import ErrorbarContainer
    from matplotlib.figure import Figure

NOT_RUN = "not run"
Value = Callable[[Run], float | None]
"""What a table or a figure shows of a run; None if the run has no such value."""


def drop(run: Run) -> float | None:
    """Points (of 100) lost by compression, without training afterwards."""
    return None if run.compressed is None else 100 * (run.original - run.compressed)


def tuned_drop(run: Run) -> float | None:
    """Points (of 100) lost after compression and training."""
    return None if run.tuned is None else 100 * (run.original - run.tuned)


@dataclass(frozen=True)
class Paired:
    """The mean of paired differences and its 95 % interval; no interval where it cannot be estimated."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def decides(self) -> bool:
        """Whether 0 is outside the interval."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def judged(self) -> str:
        """The difference, and what it says of the claim that it is above 0; nothing where it decides nothing."""
        return f"{self}{(' **holds**' if self.mean > 0 else ' **REFUTED**') if self.decides else ''}"

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.mean:+.2f} ({self.pairs} seed{'s' * (self.pairs > 1)}, no interval)"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def paired(first: Mapping[object, float], second: Mapping[object, float]) -> Paired | None:
    """The mean of ``first - second`` over what both have, with its interval; None if they share nothing.

    Two pairs are the least for an interval, and differences that are all equal have none: scores of few examples are
    coarse, and equal differences of them by chance would make the narrowest claim of all.

    >>> str(paired({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.0, 1: 1.1, 2: 1.9}))
    '+1.00 [+0.75, +1.25]'
    """
    differences = [first[key] - second[key] for key in first if key in second]
    if not differences:
        return None
    mean = statistics.fmean(differences)
    if len(differences) < 2 or max(differences) - min(differences) < 1e-12:
        return Paired(mean, None, None, len(differences))
    half = _student(len(differences) - 1) * statistics.stdev(differences) / len(differences) ** 0.5
    return Paired(mean, mean - half, mean + half, len(differences))


@cache
def _student(freedom: int) -> float:
    """Between minus this and this Student's t lies with a chance of 95 %."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


class Results:
    """Runs by method, size, task and model (``model_of``).

    Args:
        runs: of one experiment. value: what is looked at.
    """

    def __init__(self, runs: Sequence[Run], value: Value) -> None:
        self.at: dict[tuple[str, str, str, tuple[int, float]], float] = {}
        for run in runs:
            found = value(run)
            if found is not None:
                self.at[run.method, run.size, run.task, model_of(run)] = found

    def by_model(self, method: str, size: str, task: str) -> dict[tuple[int, float], float]:
        """The values of one cell."""
        return {model: v for (m, z, t, model), v in self.at.items() if (m, z, t) == (method, size, task)}

    def by_seed(self, methods: Sequence[str], size: str, tasks: Sequence[str]) -> list[dict[int, float]]:
        """For each method the mean over ``tasks``, for each seed that has all of them.

        One seed that was trained on two kinds of CPU is no two draws: its value is the mean over its models, over those
        that all ``methods`` compressed.
        """
        of = [[self.by_model(method, size, task) for method in methods] for task in tasks]
        shared = [[model for model in each[0] if all(model in one for one in each)] for each in of]
        seeds = sorted(set.intersection(*({seed for seed, _ in models} for models in shared)) if shared else set())

        def value(place: int, seed: int) -> float:
            """Of the method at this place."""
            return statistics.fmean(
                statistics.fmean(each[place][model] for model in models if model[0] == seed)
                for each, models in zip(of, shared, strict=True)
            )

        return [{seed: value(place, seed) for seed in seeds} for place in range(len(methods))]

    def whole(self, methods: Sequence[str], size: str, task: str) -> Results:
        """Those of one size and task of the models that every method compressed which has runs of all seeds, where each
        seed has such a model; else all. The cells of a column are then of the same models."""
        each = [self.by_model(method, size, task) for method in methods]
        seeds = {seed for one in each for seed, _ in one}
        full = [one.keys() for one in each if {seed for seed, _ in one} == seeds]
        models = set.intersection(*map(set, full)) if full else set()
        if {seed for seed, _ in models} != seeds:
            return self
        kept = Results((), drop)
        for method, one in zip(methods, each, strict=True):
            own = models & one.keys() or one.keys()
            kept.at |= {(method, size, task, model): one[model] for model in own}
        return kept

    def cells(self, methods: Sequence[str], size: str, tasks: Sequence[str], seeds: int) -> list[str]:
        """For each method mean and standard deviation over seeds; how many seeds, where not all have run."""
        kept = Results((), drop)
        for task in tasks:
            for place, value in self.whole(methods, size, task).at.items():
                if place[1:3] == (size, task):
                    kept.at[place] = value
        return [spread(list(kept.by_seed([method], size, tasks)[0].values()), seeds) for method in methods]

    def cell(self, method: str, size: str, tasks: Sequence[str], seeds: int) -> str:
        """The same for one method alone."""
        return self.cells([method], size, tasks, seeds)[0]


@dataclass(frozen=True)
class Best:
    """The method of the least mean drop among some, beside another method.

    Args:
        name: the method. lost: its drops by seed. ours: those of the other method, of the same seeds.
        missing: methods that have no runs of all these seeds, so that they were not compared.
    """

    name: str
    lost: Mapping[int, float]
    ours: Mapping[int, float]
    missing: tuple[str, ...]

    @property
    def half(self) -> Paired | None:
        """Half of what it loses, less ours: above 0 where ours is at most half."""
        return paired({seed: value / 2 for seed, value in self.lost.items()}, self.ours)


def best_of(results: Results, ours: str, theirs: Sequence[str], size: str, task: str) -> Best | None:
    """The best of ``theirs`` among those that have runs of all seeds of ``ours``; None if there is none."""
    seeds = results.by_seed([ours], size, [task])[0].keys()
    each = {other: results.by_seed((ours, other), size, [task]) for other in theirs}
    whole = {other: both for other, both in each.items() if seeds and both[1].keys() == seeds}
    if not whole:
        return None
    name = min(whole, key=lambda other: statistics.fmean(whole[other][1].values()))
    own, lost = whole[name]
    return Best(name, lost, own, tuple(other for other in theirs if other not in whole))


def spread(values: Sequence[float], wanted: int) -> str:
    """Mean and standard deviation; "not run" without values.

    >>> spread([1.0, 2.0], 3), spread([], 3)
    ('1.50 ± 0.71 (2 of 3)', 'not run')
    """
    if not values:
        return NOT_RUN
    mean = f"{statistics.fmean(values):.2f}"
    about = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return mean + about + (f" ({len(values)} of {wanted})" if len(values) < wanted else "")


def by_task(results: Results, methods: Sequence[str], size: tuple[str, str], tasks: Sequence[str], seeds: int) -> str:
    """Methods down, tasks across, of one size; the last column is the mean over all tasks.

    Args:
        size: as logged, and its name. seeds: how many each cell should have.
    """
    over = _over(tasks)
    columns = [results.cells(methods, size[0], of, seeds) for _, of in over]
    rows = [[method, *(column[place] for column in columns)] for place, method in enumerate(methods)]
    return markdown([size[1], *(name for name, _ in over)], rows)


def by_size(
    results: Results, methods: Sequence[str], sizes: Sequence[tuple[str, str]], tasks: Sequence[str], seeds: int
) -> str:
    """Tasks and methods down, sizes across; the last rows are means over all tasks.

    Args:
        sizes: (size as logged, its name in the head). seeds: how many each cell should have.
    """
    rows = []
    for name, of in _over(tasks):
        columns = [results.cells(methods, size, of, seeds) for size, _ in sizes]
        rows += [[name, method, *(column[place] for column in columns)] for place, method in enumerate(methods)]
    return _with_tasks(["task", "method", *(shown for _, shown in sizes)], rows, tasks)


def orderings(
    results: Results,
    pairs: Sequence[tuple[str, str]],
    sizes: Sequence[tuple[str, str]],
    tasks: Sequence[str],
    *,
    lower_is_better: bool = True,
) -> str:
    """For each claim "the first is better than the second": the paired differences by size, and where it holds."""
    rows = []
    for (better, worse), (name, of) in itertools.product(pairs, _over(tasks)):
        cells = []
        for size, _ in sizes:
            first, second = results.by_seed((better, worse), size, of)
            found = paired(second, first) if lower_is_better else paired(first, second)
            cells.append(NOT_RUN if found is None else found.judged)
        if any(cell != NOT_RUN for cell in cells):
            rows.append([name, f"{better} better than {worse}", *cells])
    if not rows:
        return f"No two methods have runs of the same seeds: {NOT_RUN}."
    about = "Over paired seeds, in points, with 95 % intervals. Where no word stands behind it, nothing is claimed."
    return f"{about}\n\n{_with_tasks(['task', 'claim', *(shown for _, shown in sizes)], rows, tasks)}"


def _over(tasks: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each task, and after several of them their mean."""
    return [(task, [task]) for task in tasks] + ([("mean", list(tasks))] if len(tasks) > 1 else [])


def _with_tasks(head: Sequence[str], rows: Sequence[Sequence[str]], tasks: Sequence[str]) -> str:
    """A Markdown table whose first column is the task; without that column where there is one task."""
    first = 0 if len(tasks) > 1 else 1
    return markdown(head[first:], [row[first:] for row in rows])


def figure(
    path: Path,
    results: Results,
    methods: Sequence[str],
    sizes: Sequence[tuple[str, float]],
    tasks: Sequence[str],
    axes: tuple[str, str],
) -> bool:
    """One panel a task: the mean over seeds by size, with its standard deviation. False if there is nothing to draw.

    Args:
        sizes: (size as logged, where it stands on the x-axis). axes: the names of x and y.
    """
    import matplotlib.pyplot as plt

    drawn = [task for task in tasks if any(results.by_model(m, s, task) for m in methods for s, _ in sizes)]
    if not drawn:
        return False
    fig, panels = plt.subplots(1, len(drawn), figsize=(3.4 * len(drawn) + 1.6, 3.2), squeeze=False)
    for panel, task in zip(panels[0], drawn, strict=True):
        for method in methods:
            cells = [(x, results.by_seed([method], size, [task])[0]) for size, x in sorted(sizes, key=_place)]
            points = [(x, list(values.values())) for x, values in cells]
            points = [(x, values) for x, values in points if values]
            if points:
                _spread_bars(panel, points, method, "o-", 3, 2)
        panel.set_title(task, fontsize=9)
        panel.set_xlabel(axes[0], fontsize=8)
        panel.tick_params(labelsize=7)
        panel.axhline(0.0, color="0.8", linewidth=0.8, zorder=0)
    panels[0][0].set_ylabel(axes[1], fontsize=8)
    fig.legend(*panels[0][0].get_legend_handles_labels(), loc="center right", fontsize=7, frameon=False)
    fig.tight_layout(rect=(0, 0, 1 - 1.4 / (3.4 * len(drawn) + 1.6), 1))
    _save(fig, path)
    return True


def figure_by_task(
    path: Path, results: Results, methods: Sequence[str], size: str, tasks: Sequence[str], name: str
) -> bool:
    """Tasks from left to right, methods beside each other: the mean over seeds, its standard deviation and each seed.

    Args:
        size: as logged. name: of the y-axis.

    Returns:
        False if there is nothing to draw.
    """
    import matplotlib.pyplot as plt

    drawn = [task for task in tasks if any(results.by_model(method, size, task) for method in methods)]
    if not drawn:
        return False
    fig, panel = plt.subplots(figsize=(1.4 * len(drawn) + 3.4, 3.2))
    for place, method in enumerate(methods):
        shift = 0.25 * (place - (len(methods) - 1) / 2)
        cells = [list(results.by_seed([method], size, [task])[0].values()) for task in drawn]
        known = [(x + shift, values) for x, values in enumerate(cells) if values]
        bars = _spread_bars(panel, known, method, "o", 4, 3)
        for x, values in known:
            panel.plot([x + 0.06] * len(values), values, ".", color=bars[0].get_color(), markersize=3, alpha=0.6)
    panel.axhline(0.0, color="0.8", linewidth=0.8, zorder=0)
    panel.set_xticks(range(len(drawn)), drawn, fontsize=8)
    panel.set_xlim(-0.6, len(drawn) - 0.4)
    panel.set_ylabel(name, fontsize=8)
    panel.tick_params(axis="y", labelsize=7)
    fig.legend(loc="center right", fontsize=7, frameon=False)
    fig.tight_layout(rect=(0, 0, 1 - 1.8 / (1.4 * len(drawn) + 3.4), 1))
    _save(fig, path)
    return True


def _spread_bars(
    panel: Axes, points: Sequence[tuple[float, Sequence[float]]], label: str, look: str, size: int, cap: int
) -> ErrorbarContainer:
    """The mean of the values at each place, and their standard deviation."""
    means = [statistics.fmean(values) for _, values in points]
    spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for _, values in points]
    places = [x for x, _ in points]
    return panel.errorbar(places, means, spreads, fmt=look, markersize=size, capsize=cap, linewidth=1, label=label)


def _save(fig: Figure, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(fig)


def _place(size: tuple[str, float]) -> float:
    return size[1]


def told(runs: Sequence[Run]) -> str:
    """How the originals were trained and scored, and with what the runs were made."""
    lines = []
    for task in dict.fromkeys(run.task for run in runs):
        of = [run for run in runs if run.task == task]
        models = {model_of(run) for run in of}
        scores = {
            seed: statistics.fmean(100 * original for other, original in models if other == seed)
            for seed in sorted({seed for seed, _ in models})
        }
        training = "; ".join(dict.fromkeys(", ".join(f"{k} {v}" for k, v in run.training.items()) for run in of))
        several = len(models) > len(scores)
        lines.append(
            f"- {task}: {of[0].metric} {spread(list(scores.values()), len(scores))} before, "
            f"{len(scores)} seed{'s' * (len(scores) > 1)}; {training}"
            + f"; {len(models)} models: cells are of those that all methods of a column compressed, comparisons of "
            "all, and a seed's value is the mean over its models" * several
        )
    made = sorted({", ".join(f"{name} {number}" for name, number in run.libraries.items()) for run in runs})
    hours = sum(run.seconds for run in runs) / 3600
    lines.append(f"- {len(runs)} runs, {hours:.1f} hours, {'; '.join(made) or libraries()}.")
    return "\n".join(lines)


def publish(name: str, title: str, parts: Sequence[str], asked: Asked, log: str | None = None) -> Path:
    """Write the page of an experiment beside its log (of the same name, if it has no other), and print it."""
    body = "\n\n".join(part for part in parts if part)
    page, log = asked.results / f"{name}.md", log or name
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"# {title}\n\n    {asked.command}\n\nMade from [{log}.jsonl]({log}.jsonl).\n\n{body}\n", "utf-8")
    print(body, flush=True)
    return page
