"""What the logs and tables of results say of one claim of a paper, in the words of docs/reproduction.md.

Each function reads ``results``, the folder of logs and tables, and says "not run" where it holds nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from _runs import Log, Run
from _tables import NOT_RUN, Paired, Results, Value, best_of, drop, paired, tuned_drop
from messi_epochs import after, by_epochs
from messi_tasks import CHOSEN, best_k, by_trained_model, method_name, with_chosen

KS = [1, 2, 3, 5, 10]
USUAL = ("MiniLM", "LeNet-300-100", "VGG-19, width 16")
"""The models of the experiments without ``--source``."""
IN_FLOAT32 = ("messi_tasks", "fwsvd_groups_MiniLM-shared")
"""The pages of task models that were not trained in bfloat16."""
Said = Callable[[Path], str]
"""What a folder of results says of a claim."""


def runs_of(results: Path, name: str, models: Sequence[str] = USUAL) -> list[Run]:
    """The newest runs of some models in a log, of those that were trained in the type of its page."""
    path = results / f"{name}.jsonl"

    def shown(run: Run) -> bool:
        page = name if run.model in USUAL else f"{name}_{run.model}"
        precision = "float32" if page in IN_FLOAT32 else "bfloat16"
        usual = run.training.get("precision", precision) == precision and "texts" not in run.recipe
        return run.model in models and usual

    return _log(path, path.stat().st_mtime_ns if path.is_file() else 0).newest(shown)


@lru_cache(32)
def _log(path: Path, written: int) -> Log:
    """Read once for all claims, as long as the file was ``written`` last at the same time."""
    return Log(path)


def verdict_of(gap: Paired) -> str:
    """Of the claim that a difference is above 0."""
    return "open" if not gap.decides else "**holds**" if gap.mean > 0 else "**refuted**"


def compared(
    name: str,
    better: str,
    worse: str,
    value: Value,
    sizes: Sequence[str],
    tasks: Sequence[str],
    models: Sequence[str] = USUAL,
    *,
    beside: str = "",
    changed: Callable[[Run], Run] = lambda run: run,
) -> Said:
    """Whether ``better`` loses less than ``worse``: a line for each task and size that has run, and for the mean of all
    tasks where these have run; a count of the rest.

    Args:
        name: of the log. sizes: what is kept, as logged. beside: the log of an experiment that has runs of ``worse``.
        changed: what gives runs the names that are compared, where the log has others.
    """

    def ours(results: Path) -> str:
        runs = runs_of(results, name, models) + (runs_of(results, beside, models) if beside else [])
        runs = [changed(run) for run in (with_chosen(runs, KS) if CHOSEN in (better, worse) else runs)]
        found = Results(runs, value)
        told, missing = [], 0
        means = [(f"mean of {len(tasks)}", tasks)] if len(tasks) > 1 else []
        for name_of, of in [*((task, (task,)) for task in tasks), *means]:
            for size in sizes:
                both = found.by_seed((better, worse), size, of)
                gap = paired(both[1], both[0])
                if gap is None:
                    missing += len(of) == 1
                    continue
                lost = [fmean(one.values()) for one in both]
                told.append(f"{name_of}, {size}: {lost[0]:.2f} and {lost[1]:.2f}, {gap}: {verdict_of(gap)}")
        if missing:
            told.append(f"{NOT_RUN} for {missing} of {len(tasks) * len(sizes)} pairs" if told else NOT_RUN)
        return "<br>".join(told)

    return ours


def halved(
    name: str, ours: str, theirs: Sequence[str], sizes: Sequence[str], tasks: Sequence[str], *, trained: bool = True
) -> Said:
    """Whether ``ours`` loses at most half of what the best of ``theirs`` loses before fine-tuning, and is not behind
    the best of them after it (``best_of``).

    Args:
        name: of the log. trained: whether it has runs with fine-tuning.
    """

    def ours_of(results: Path) -> str:
        runs = runs_of(results, name)
        before, after = Results(runs, drop), Results(runs, tuned_drop)
        told, half, level = [], Counter[str](), Counter[str]()
        for task, size in product(tasks, sizes):
            first = best_of(before, ours, theirs, size, task)
            if first is None or first.half is None:
                continue
            nothing = fmean(first.lost.values()) <= 0 and not first.half.decides
            verdict = "it loses nothing" if nothing else verdict_of(first.half)
            half[verdict.strip("*")] += 1
            short = f" ({'; '.join(first.missing)} not run for all seeds)" if first.missing else ""
            line = f"{task}, {size}{short}: half of {first.name}'s drop less ours is {first.half}: {verdict}"
            second = best_of(after, ours, theirs, size, task) if trained else None
            ahead = None if second is None else paired(second.lost, second.ours)
            if second is not None and ahead is not None:
                place = "level" if not ahead.decides else "ahead" if ahead.mean > 0 else "**behind**"
                level[place.strip("*")] += 1
                line += f"; after fine-tuning {ahead} against {second.name}: {place}"
            told.append(line)
        if not told:
            return NOT_RUN
        counts = ["before fine-tuning: " + ", ".join(f"{count} {what}" for what, count in half.most_common())]
        counts += ["after: " + ", ".join(f"{count} {what}" for what, count in level.most_common())] if level else []
        return "<br>".join([f"**of {len(told)}, {'; '.join(counts)}**", *told])

    return ours_of


def gains(
    name: str, methods: Sequence[str], value: Value, sizes: Sequence[str], tasks: Sequence[str], *, whole: bool = True
) -> Said:
    """Whether compressed models score above their originals: counts, and each place where the interval says so.

    Args:
        name: of the log. whole: with these places; else the counts alone.
    """

    def ours(results: Path) -> str:
        found = Results(runs_of(results, name), value)
        counts, told, positive = Counter[str](), [], 0
        for task, size, method in product(tasks, sizes, methods):
            lost = found.by_seed([method], size, [task])[0]
            gain = paired(dict.fromkeys(lost, 0.0), lost)
            if gain is None:
                continue
            counts["open" if not gain.decides else "above" if gain.mean > 0 else "below"] += 1
            positive += gain.mean > 0
            if gain.decides and gain.mean > 0:
                told.append(f"{task}, {size}, {method}: {gain}: **holds**")
        if not counts:
            return NOT_RUN
        about = (
            f"**of {counts.total()} places (method, task, size) {counts['above']} above the original, "
            f"{counts['below']} below it, {counts['open']} open**; the mean is above in {positive}"
        )
        return "<br>".join([about, *(told if whole else ())])

    return ours


def as_size(method: str, size: str) -> Callable[[Run], Run]:
    """Gives the runs of ``method`` another size, so that they stand beside others."""
    return lambda run: replace(run, size=size) if run.method == method else run


def by_group(groups: Sequence[str]) -> Callable[[Run], Run]:
    """Makes methods of groups of singular values, all of one size: "SVD, group 10"."""
    return lambda run: (
        replace(run, method=f"{run.method}, {run.size}", size="one left out") if run.size in groups else run
    )


def error(run: Run) -> float | None:
    """Relative squared error of the weights, in %."""
    return None if run.error is None else 100 * run.error


def fluctuation(name: str, methods: Sequence[str], sizes: Sequence[str], tasks: Sequence[str]) -> Said:
    """How often a larger size scores lower without fine-tuning.

    Args:
        sizes: from small to large.
    """

    def ours(results: Path) -> str:
        found = Results(runs_of(results, name), drop)
        told = []
        for method in methods:
            steps = [
                paired(found.by_seed([method], large, [task])[0], found.by_seed([method], small, [task])[0])
                for task in tasks
                for small, large in pairwise(sizes)
            ]
            known = [step for step in steps if step is not None]
            if known:
                lower, sure = sum(s.mean > 0 for s in known), sum(s.mean > 0 and s.decides for s in known)
                told.append(
                    f"{method}: {lower} of {len(known)} steps to a larger ratio lower the mean score, "
                    f"{sure} of them beyond the interval"
                )
        return "<br>".join(told) or NOT_RUN

    return ours


def _models(runs: Iterable[Run], task: str, size: str) -> list[list[Run]]:
    """The runs of each trained model at one place."""
    return [of for (t, z, _), of in by_trained_model(runs).items() if (t, z) == (task, size)]


def chosen_ks(name: str, sizes: Sequence[str], tasks: Sequence[str]) -> Said:
    """Which k scores best on held-out examples, by task, size and trained model."""

    def ours(results: Path) -> str:
        runs = runs_of(results, name)
        told, one, seen = [], 0, 0
        for task, size in product(tasks, sizes):
            ks = [k for of in _models(runs, task, size) if (k := best_k(of, KS)) is not None]
            if ks:
                told.append(f"{task}, {size}: {', '.join(map(str, ks))}")
                one, seen = one + (len(set(ks)) == 1), seen + 1
        if not told:
            return NOT_RUN
        return "<br>".join([f"**the k of each model; one k for all models in {one} of {seen} places**", *told])

    return ours


def optimism(name: str, sizes: Sequence[str], tasks: Sequence[str]) -> Said:
    """What choosing k on the judged split adds to its own score: drops by the k of the best held-out score, less those
    of the k that scores best on the judged split."""

    def ours(results: Path) -> str:
        runs = runs_of(results, name)
        told, every = [], []
        for task, size in product(tasks, sizes):
            more = []
            for of in _models(runs, task, size):
                if (chosen := best_k(of, KS)) is not None:
                    at = {run.method: drop(run) or 0.0 for run in of}
                    lost = {k: at[method_name(k)] for k in KS}
                    more.append(lost[chosen] - min(lost.values()))
            if more:
                told.append(f"{task}, {size}: {fmean(more):.2f} ({len(more)} model{'s' * (len(more) > 1)})")
                every += more
        if not told:
            return NOT_RUN
        return "<br>".join([f"**{fmean(every):.2f} points on average, without fine-tuning**", *told])

    return ours


def by_task(name: str, better: str, worse: str, value: Value, sizes: Sequence[str], tasks: Sequence[str]) -> Said:
    """What ``better`` gains over ``worse`` in points, the mean over sizes, by task from the most to the least."""

    def ours(results: Path) -> str:
        found = Results(runs_of(results, name), value)
        gains = {}
        for task in tasks:
            both = [found.by_seed((better, worse), size, [task]) for size in sizes]
            gaps = [gap.mean for ours, theirs in both if (gap := paired(theirs, ours)) is not None]
            if gaps:
                gains[task] = fmean(gaps)
        ordered = sorted(gains.items(), key=lambda item: -item[1])
        return "; ".join(f"{task} {gain:+.1f}" for task, gain in ordered) or NOT_RUN

    return ours


def counted(name: str, better: str, worse: str, value: Value, sizes: Sequence[str], tasks: Sequence[str]) -> Said:
    """At how many places ``better`` loses less than ``worse``."""

    def ours(results: Path) -> str:
        found, counts = Results(runs_of(results, name), value), Counter[str]()
        for task, size in product(tasks, sizes):
            both = found.by_seed((better, worse), size, [task])
            if (gap := paired(both[1], both[0])) is not None:
                counts["open" if not gap.decides else "less" if gap.mean > 0 else "more"] += 1
        if not counts:
            return NOT_RUN
        places = ", ".join(f"{what} at {counts[what]}" for what in ("less", "more", "open"))
        return f"of {counts.total()} places it loses {places}"

    return ours


def gain_of_same_size(results: Path) -> str:
    """Gains of the flats over the table itself."""
    runs = [run for run in runs_of(results, "messi_same_size") if run.method.startswith("MESSI")]
    told = []
    for task, size, method in dict.fromkeys((run.task, run.size, run.method) for run in runs):
        lost = Results(runs, drop).by_seed([method], size, [task])[0]
        gain = paired(dict.fromkeys(lost, 0.0), lost)
        if gain is not None:
            told.append(f"{task}: {gain}: {verdict_of(gain)}")
    return "<br>".join(told) or NOT_RUN


# Tables of one run


def fewer_epochs(name: str, flats: str, svd: str, size: str, tasks: Sequence[str]) -> Said:
    """Whether ``flats`` after one epoch lose less than ``svd`` after two, where that needs its second one."""

    def ours(results: Path) -> str:
        found = Results([by_epochs(run) for run in runs_of(results, name)], tuned_drop)
        names = after(flats, 1), after(svd, 1), after(svd, 2)
        told = []
        for task in tasks:
            first, one, two = found.by_seed(names, size, [task])
            needed, ahead = paired(one, two), paired(two, first)
            if needed is None or ahead is None:
                told.append(f"{task}: {NOT_RUN}")
                continue
            verdict = verdict_of(ahead) if needed.decides and needed.mean > 0 else "open: SVD is not shown to need it"
            told.append(
                f"{task}, {size}: the second epoch takes {needed} off SVD's drop; flats after one epoch are ahead of "
                f"SVD after two by {ahead}: {verdict}"
            )
        return "<br>".join(told) if any(NOT_RUN not in line for line in told) else NOT_RUN

    return ours


def original_scores(name: str, task: str) -> Said:
    """The scores of a task's trained models, by seed."""

    def ours(results: Path) -> str:
        scores = {run.seed: 100 * run.original for run in runs_of(results, name) if run.task == task}
        told = ", ".join(f"{score:.1f}" for _, score in sorted(scores.items()))
        return f"{task}: the trained models score {told}" if told else NOT_RUN

    return ours


def together(*parts: Said) -> Said:
    """One after the other; "not run" once where nothing of them has run."""

    def ours(results: Path) -> str:
        return "<br>".join(dict.fromkeys(part(results) for part in parts))

    return ours


def link(name: str) -> str:
    """To a table of results."""
    return f"([{name}.md](../experiments/results/{name}.md))"


def numbers_of(results: Path, name: str) -> dict[str, Any] | None:
    """The numbers of a table of one run; None without it."""
    path = results / f"{name}.json"
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def cells_of(path: Path) -> list[list[str]]:
    """The lines of the tables of a page, by cells; nothing without the page."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]


def benchmark(results: Path, name: str) -> Path:
    """The page of a benchmark, which lies beside the experiments."""
    return results.parents[1] / "benchmarks" / "results" / f"{name}.md"


def element_weights(results: Path) -> str:
    """Weights for elements beside weights for rows and columns: cosines of the same encoder."""
    found = numbers_of(results, "element_fisher")
    if found is None:
        return NOT_RUN
    told = "; ".join(f"{row['weighted by']} {row['mean']:.4f} / {row['p5']:.4f}" for row in found["rows"])
    _, both, each = (row["mean"] for row in found["rows"])
    verdict = "above" if each > both else "not above"
    about = f"cosines of an encoder at a third of its ranks, mean / 5th percentile: {told}"
    return f"{about}: in the mean {verdict} weights for rows and columns {link('element_fisher')}"


def time_of_distances(results: Path) -> str:
    """How much longer whole fits under distances take than under their squares, in the table of the benchmark."""
    told = [cells[-1] for cells in cells_of(benchmark(results, "robust_em")) if "a whole fit" in cells[0]]
    if not told:
        return NOT_RUN
    return (
        f"**does not hold** for reweighted least squares inside EM: {' and '.join(told)} times the time of squares for "
        "a whole fit ([robust_em.md](../benchmarks/results/robust_em.md))"
    )


def starts(results: Path) -> str:
    """Errors of fits from a random partition, as published, and from kflats' own seeds."""
    rows = {cells[0]: cells for cells in cells_of(benchmark(results, "seeding"))}
    if not {"auto", "random"} <= set(rows):
        return NOT_RUN
    told = [f"{rows[name][1]} ({rows[name][5]} planted flats found)" for name in ("random", "auto")]
    verdict = "not the least" if float(rows["random"][1]) > float(rows["auto"][1]) else "the least"
    return (
        f"mean relative error from a random partition {told[0]}, from seeds of kflats {told[1]}: one random start ends "
        f"in a minimum that is {verdict} ([seeding.md](../benchmarks/results/seeding.md)); `MESSI(k)` has ten starts"
    )


def spoilt_entries(results: Path) -> str:
    """How well flats under three distances find planted labels in a table with spoilt entries."""
    found = numbers_of(results, "entry_flats")
    if found is None:
        return NOT_RUN
    means = {name: fmean(row[name] for row in found["rows"]) for name in ("entries", "distances", "squares")}
    verdict = "**holds**" if means["entries"] > max(means["distances"], means["squares"]) else "**does not hold**"
    return (
        f"{verdict} for planted flats with spoilt entries: adjusted Rand index of the labels {means['entries']:.2f} by "
        f"entries, {means['distances']:.2f} by distances, {means['squares']:.2f} by squares, "
        f"{len(found['rows'])} seeds {link('entry_flats')}"
    )


def planted(results: Path, methods: Iterable[str]) -> dict[tuple[str, str], float]:
    """Distances to the planted signal in ``robust_planted``, those of SVD being 1, by case and method."""
    found = numbers_of(results, "robust_planted")
    rows: dict[tuple[str, str], list[float]] = {}
    for row in found["rows"] if found else ():
        rows.setdefault((row["case"], row["method"]), []).append(row["clean"])
    of = {place: median(values) for place, values in rows.items()}
    return {(c, m): value / of[c, "SVD"] for (c, m), value in of.items() if m in methods}


def outliers(results: Path) -> str:
    """Whether the lp low rank is nearer to a planted signal than SVD, where rows or entries are outliers."""
    names = {"ellipsoid 1": "the lp low rank at p = 1", "entrywise 1": "the least entrywise l1 error"}
    far = planted(results, names)
    told = []
    for case in dict.fromkeys(case for case, _ in far):
        of = ", ".join(f"{far[case, method]:.2f} by {shown}" for method, shown in names.items())
        told.append(f"{case} spoilt: {of}")
    if not told:
        return NOT_RUN
    closer = all(far[case, "ellipsoid 1"] < 1 for case, _ in far)
    verdict = "**holds**, for outlying rows" if closer else "**does not hold**"
    return "<br>".join([f"{verdict}; distances to the signal as shares of SVD's {link('robust_planted')}", *told])


def thresholds(results: Path) -> str:
    """Whether a threshold of distances keeps one subspace from outlying rows."""
    name = "subspace truncated 3 median"
    far = {case: value for (case, _), value in planted(results, [name]).items()}
    if not far:
        return NOT_RUN
    told = ", ".join(f"{value:.2f} with {case} spoilt" for case, value in far.items())
    verdict = "**holds** for outlying rows" if far.get("5 % of rows", 1.0) < 0.5 else "**does not hold**"
    return f"{verdict}, for one subspace: of SVD's distance to the signal {told} {link('robust_planted')}"


def dictionaries(results: Path) -> str:
    """The error of flats at equal bytes, as a share of that of the best dictionary and of SVD."""
    found = numbers_of(results, "dictionaries")
    told = []
    by_rate: dict[float, dict[str, float]] = {}
    for row in found["rows"] if found else ():
        if "frobenius" in row:
            by_rate.setdefault(row["rate"], {})[row["method"]] = row["frobenius"] ** 2
    for rate, errors in by_rate.items():
        best = min((name for name in errors if name.startswith("dictionary")), key=errors.__getitem__)
        flats, svd = errors["flats"] / errors[best], errors["flats"] / errors["SVD"]
        told.append(f"{rate:.0%} saved: {flats:.2f} of the error of {best}, {svd:.2f} of SVD's")
    return "<br>".join([f"flats of kflats {link('dictionaries')}", *told]) if told else NOT_RUN


def sketches(results: Path) -> str:
    """The distortions that a search meets in ellipsoids of sketches, what theorem 6 allows, and that of A'A."""
    found, page = numbers_of(results, "sketched_ellipsoids"), results / "sketched_ellipsoids.md"
    shape = re.search(r"([\d,]+) x ([\d,]+)\.", page.read_text(encoding="utf-8")) if page.is_file() else None
    if found is None or shape is None or "times" not in found:
        return NOT_RUN
    n, d = (int(size.replace(",", "")) for size in shape.groups())
    allowed = d * (d**3 + d**2 * log(n)) ** 0.5  # d (d^3 + d^2 log n)^|1/p - 1/2| at p = 1
    met = {row["way"]: row["distortion"] for row in found["rows"]}
    far, near = [met["Sketch, Cauchy"], met["Sketch, exponential"]], met["A'A itself"]
    verdict = "**holds**" if max(far) <= allowed else "**does not hold**"
    further = "farther off than A'A" if min(far) > near else "not farther off than A'A"
    told = " and ".join(f"{one:.0f}" for one in far)
    seconds = {row["way"]: f"{row['seconds']:.1f}" for row in found["rows"]}
    taken = {(of["rows"], of["columns"]): of["sketch"] for of in found["times"]}
    n, d = (Counter(sizes).most_common(1)[0][0] for sizes in zip(*taken, strict=True))
    by_rows, by_columns = (sorted(of for of in taken if of[place] == usual) for place, usual in ((1, d), (0, n)))
    grown = [taken[of[-1]] / taken[of[0]] for of in (by_rows, by_columns)]
    (few, _), (many, _) = by_rows[0], by_rows[-1]
    wanted = many * log(many) / (few * log(few))
    wider = by_columns[-1][1] // by_columns[0][1]
    return (
        f"{verdict} for the distortion, of one table and one draw: {told} were met, {allowed:.1e} are allowed; they "
        f"end {further}, {near:.1f}. A sketch and its QR take {grown[0]:.1f} times as long for {many // few} times the "
        f"rows (n log n: {wanted:.1f}), and {grown[1]:.0f} times as long for {wider} times the columns (n d log n: "
        f"{wider}), because the QR takes d^3. With a certificate they take {seconds['Sketch, Cauchy']} and "
        f"{seconds['Sketch, exponential']} s, Lewis weights {seconds['Lewis']} s {link('sketched_ellipsoids')}"
    )


def definition(least: float, most: float) -> Said:
    """Whether definition 1 held on random matrices with the constant r^|1-p/2|, for p in a range."""

    def ours(results: Path) -> str:
        rows = [cells for cells in cells_of(results / "distortion.md") if cells[-1] in ("yes", "no", "NO")]
        rows = [cells for cells in rows if least <= float(cells[0]) <= most]
        if not rows:
            return NOT_RUN
        verdict = "**holds**" if all(cells[-1] == "yes" for cells in rows) else "**does not hold**"
        told = "; ".join(f"p = {float(p):g}, {count} matrices: {least}, {share}" for p, count, least, share, _ in rows)
        return (
            f"{verdict} for Lewis weights, whose constant is d^abs(1-p/2) ([proof](robust-svd.md)): the least ratio "
            f"met, to be 1 or more, and the greatest as a share of the constant, to be 1 at most: {told} "
            f"{link('distortion')}"
        )

    return ours


def steps_of_a1(results: Path) -> str:
    """How long algorithm A1 takes beside Lewis weights."""
    found = numbers_of(results, "loewner")
    if found is None:
        return NOT_RUN
    told = [
        f"{way}: {steps:,} steps, {times.strip('*')} times Lewis weights" for way, steps, _, times, *_ in found["rows"]
    ]
    return f"{'; '.join(told[1:])}, of a table of 8 columns {link('loewner')}"


# Times


ON_GPU = "2.11.0"
"""The version of torch of those committed runs that were made on a GPU."""


def time_on_gpu(results: Path, name: str) -> str:
    """The least and the greatest median of seconds a run on a GPU, by method and epochs."""
    path, seconds = results / f"{name}.jsonl", dict[tuple[str, int], list[float]]()
    for run in Log(path).runs:
        if run.libraries["torch"] == ON_GPU:
            seconds.setdefault((run.method, run.epochs), []).append(run.seconds)
    medians = [round(median(values)) for values in seconds.values() if len(values) > 2]
    return f"{min(medians)} to {max(medians)} s a run" if medians else "not measured"
