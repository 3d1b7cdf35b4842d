"""Writes docs/reproduction.md: what the three papers claim, and what the logs of runs say of it.

    python experiments/reproduction.py

Nothing is run. Numbers come from experiments/results/*.jsonl; what has no run says "not run". A test compares the page
with what this script writes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from _runs import ROOT, Log, Run
from _tables import NOT_RUN, Paired, Results, Value, drop, markdown, paired, tuned_drop
from messi_tasks import CHOSEN, with_chosen

PAGE = ROOT / "docs" / "reproduction.md"
RESULTS = ROOT / "experiments" / "results"
GLUE = ("cola", "mrpc", "rte", "stsb")
SIX = (*GLUE, "sst2", "conll2003")
KS = [1, 2, 3, 5, 10]
USUAL = ("MiniLM", "LeNet-300-100", "VGG-19, width 16")
"""The models of the experiments without ``--source``."""
IN_FLOAT32 = ("messi_tasks",)
"""The logs of task models that were not trained in bfloat16."""


@dataclass(frozen=True)
class Claim:
    """One table, figure, theorem or limitation.

    Args:
        where: in the paper. says: the claim. theirs: the paper's numbers.
        ours: what came out here, and whether it holds. command: what gives our numbers.
        why: what is known of why it does not hold, or holds on some tasks only.
    """

    where: str
    says: str
    theirs: str
    ours: Callable[[Path], str] | str
    command: str
    why: str = "-"


def runs_of(results: Path, name: str, models: Sequence[str] = USUAL) -> list[Run]:
    """The newest runs of some models in a log, of those that were trained in the type of its page."""
    precision = "float32" if name in IN_FLOAT32 else "bfloat16"
    return Log(results / f"{name}.jsonl").newest(
        lambda run: run.model in models and run.training.get("precision", precision) == precision
    )


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
) -> Callable[[Path], str]:
    """Whether ``better`` loses less than ``worse``: a line for each task and size that has run, and for the mean of all
    tasks where these have run; a count of the rest.

    Args:
        name: of the log. sizes: what is kept, as logged. beside: the log of an experiment that has runs of ``worse``.
    """

    def ours(results: Path) -> str:
        runs = runs_of(results, name, models) + (runs_of(results, beside, models) if beside else [])
        found = Results(with_chosen(runs, KS) if CHOSEN in (better, worse) else runs, value)
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
                told.append(f"{name_of}, {size}: {lost[0]:.2f} and {lost[1]:.2f}, {gap}: {_verdict(gap)}")
        if missing:
            told.append(f"{NOT_RUN} for {missing} of {len(tasks) * len(sizes)} pairs" if told else NOT_RUN)
        return "<br>".join(told)

    return ours


def _verdict(gap: Paired) -> str:
    return "open" if not gap.decides else "**holds**" if gap.mean > 0 else "**refuted**"


def halves(
    name: str, ours: str, theirs: Sequence[str], sizes: Sequence[str], tasks: Sequence[str], *, trained: bool = True
) -> Callable[[Path], str]:
    """Whether ``ours`` loses at most half of what the best of ``theirs`` loses before fine-tuning, and is not behind
    the best of them after it. The best is that of the least mean drop, among those with runs of all seeds of ``ours``.

    Args:
        name: of the log. trained: whether it has runs with fine-tuning.
    """

    def best(found: Results, size: str, task: str) -> tuple[str, list[dict[int, float]]] | None:
        seeds = found.by_seed([ours], size, [task])[0].keys()
        each = {other: found.by_seed((ours, other), size, [task]) for other in theirs}
        whole = {other: both for other, both in each.items() if seeds and both[1].keys() == seeds}
        return min(whole.items(), key=lambda one: fmean(one[1][1].values()), default=None)

    def ours_of(results: Path) -> str:
        runs = runs_of(results, name)
        before, after = Results(runs, drop), Results(runs, tuned_drop)
        told, halved, level = [], Counter[str](), Counter[str]()
        for task in tasks:
            for size in sizes:
                if (first := best(before, size, task)) is None:
                    continue
                other, (own, lost) = first
                gap = paired({seed: value / 2 for seed, value in lost.items()}, own)
                if gap is None:
                    continue
                verdict = _verdict(gap) if fmean(lost.values()) > 0 else "it loses nothing"
                halved[verdict.strip("*")] += 1
                short = [m for m in theirs if before.by_seed((ours, m), size, [task])[1].keys() != own.keys()]
                place_of = f"{task}, {size}" + (f" ({'; '.join(short)} not run for all seeds)" if short else "")
                line = f"{place_of}: half of {other}'s drop less ours is {gap}: {verdict}"
                if trained and (second := best(after, size, task)) is not None:
                    ahead = paired(second[1][1], second[1][0])
                    if ahead is not None:
                        place = "level" if not ahead.decides else "ahead" if ahead.mean > 0 else "**behind**"
                        level[place.strip("*")] += 1
                        line += f"; after fine-tuning {ahead} against {second[0]}: {place}"
                told.append(line)
        if not told:
            return NOT_RUN
        counts = ["before fine-tuning: " + ", ".join(f"{count} {what}" for what, count in halved.most_common())]
        counts += ["after: " + ", ".join(f"{count} {what}" for what, count in level.most_common())] if level else []
        return "<br>".join([f"**of {len(told)}, {'; '.join(counts)}**", *told])

    return ours_of


def one_run(results: Path, name: str) -> dict[str, Any]:
    """The numbers of a table of one run."""
    found: dict[str, Any] = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    return found


def task_scores(results: Path) -> str:
    """Averages of ``task_scores.py`` over the tasks that were learned, and where FWSVD is below SVD."""
    if not (results / "task_scores.json").is_file():
        return NOT_RUN
    found = one_run(results, "task_scores")
    learned = [task for task in found["tasks"] if task != "wnli"]
    at = {(row["method"], row["task"]): row["score"] for row in found["rows"]}
    shown = {"SVD": "SVD", "FWSVD": "RowFisher", "kflats, default": "KroneckerFisher, allocated"}
    told = [f"{fmean(found['tasks'][t]['before'] for t in learned):.3f} before"]
    told += [f"{name} {fmean(at[method, t] for t in learned):.3f}" for name, method in shown.items()]
    below = [t for t in learned if at["RowFisher", t] < at["SVD", t]]
    return f"{', '.join(told)}; one seed, no interval: FWSVD below SVD on {', '.join(below)} {_link('task_scores')}"


def element_weights(results: Path) -> str:
    """Weights for elements beside weights for rows and columns, in the same table."""
    if not (results / "task_scores.json").is_file():
        return NOT_RUN
    found = one_run(results, "task_scores")
    learned = [task for task in found["tasks"] if task != "wnli"]
    means = {}
    for method in ("ElementFisher", "TwoSided", "KroneckerFisher"):
        of = {row["task"]: row["score"] for row in found["rows"] if row["method"] == method}
        means[method] = fmean(of[task] for task in learned)
    told = ", ".join(f"{method} {mean:.3f}" for method, mean in means.items())
    verdict = "above" if means["ElementFisher"] > means["TwoSided"] else "not above"
    return f"average scores, one seed: {told}: {verdict} weights for rows and columns {_link('task_scores')}"


def distances(results: Path) -> str:
    """How much longer whole fits under distances take than under their squares, in the table of the benchmark."""
    page = results.parents[1] / "benchmarks" / "results" / "robust_em.md"
    lines = page.read_text(encoding="utf-8").splitlines() if page.is_file() else []
    told = [line.split("|")[-2].strip(" *") for line in lines if "a whole fit" in line]
    if not told:
        return NOT_RUN
    return (
        f"**does not hold** for reweighted least squares inside EM: {' and '.join(told)} times the time of squares for "
        "a whole fit ([robust_em.md](../benchmarks/results/robust_em.md))"
    )


def sketches(results: Path) -> str:
    """The distortions that a search meets in ellipsoids of sketches, and in that of A'A."""
    if not (results / "sketched_ellipsoids.json").is_file():
        return NOT_RUN
    met = {row["way"]: row["distortion"] for row in one_run(results, "sketched_ellipsoids")["rows"]}
    far, near = [met["Sketch, Cauchy"], met["Sketch, exponential"]], met["A'A itself"]
    verdict = "farther off than A'A" if min(far) > near else "not farther off than A'A"
    told = " and ".join(f"{one:.0f}" for one in far)
    return f"end {verdict}: distortions of {told} against {near:.1f} {_link('sketched_ellipsoids')}"


def _link(name: str) -> str:
    return f"([{name}.md](../experiments/results/{name}.md))"


def same_size(results: Path) -> str:
    """Gains of the flats over the table itself."""
    runs = [run for run in runs_of(results, "messi_same_size") if run.method.startswith("MESSI")]
    told = []
    for task in dict.fromkeys(run.task for run in runs):
        of = {run.seed: run for run in runs if run.task == task and run.compressed is not None}
        gain = paired({s: -(drop(run) or 0.0) for s, run in of.items()}, dict.fromkeys(of, 0.0))
        if gain is not None:
            verdict = "open" if not gain.decides else "**holds**" if gain.mean > 0 else "**refuted**"
            told.append(f"{task}: {gain}: {verdict}")
    return "<br>".join(told) or NOT_RUN


TASKS = "python experiments/messi_tasks.py --resume"
VARIANTS = "python experiments/messi_variants.py --precision bfloat16 --resume"
LENET = "python experiments/messi_lenet.py --resume"
VGG = "python experiments/messi_vgg.py --resume"
FWSVD = (
    "python experiments/fwsvd_tasks.py --precision bfloat16 --resume; "
    "python experiments/fwsvd_tasks.py --tasks conll2003,sst2 --precision bfloat16 --resume"
)
GROUPS = "python experiments/fwsvd_groups.py --precision bfloat16 --resume"
ROBUST = "python experiments/robust_scores.py --precision bfloat16 --resume"
RATIOS = tuple(f"{ratio}% ranks" for ratio in (10, 20, 33, 45, 60))
FEW_SEEDS = "three seeds: the intervals are wider than the differences"
CHANCE = (
    "MRPC, RTE: these models are little above the commonest answer; below it nothing of the task is left, and which "
    "method scores higher is chance"
)
SIZES = ("80%", "60%", "40%")
MESSI = [
    Claim(
        "figures 5, 6; section 3.2",
        "After 2 epochs of fine-tuning k flats lose less than SVD in all experiments",
        "DistilBERT, 40 % saved: 0.5 on average, SVD 2.8; RoBERTa, 43 %: 0.8, SVD 3 (at 40 %)",
        compared("messi_tasks", "MESSI, k = 5", "SVD", tuned_drop, SIZES, GLUE),
        TASKS,
        FEW_SEEDS,
    ),
    Claim(
        "figure 8",
        "The same without fine-tuning",
        "a figure (RoBERTa)",
        compared("messi_tasks", "MESSI, k = 5", "SVD", drop, SIZES, GLUE),
        TASKS,
    ),
    Claim(
        "table 1",
        "The best k of each task and size loses little",
        "DistilBERT 0.17 / 0.5 / 1.8 at 20 / 40 / 50 %; the best k was chosen on the judged split",
        compared("messi_tasks", CHOSEN, "SVD", tuned_drop, SIZES, GLUE),
        f"{TASKS} (k chosen on held-out training examples)",
    ),
    Claim(
        "table 2",
        "ALBERT with k = 7, j = 125 in its own size scores higher",
        "+0.3, +0.8, -0.2, +0.2, 0, +0.7, +1.4, 0 points on eight tasks",
        same_size,
        "python experiments/messi_same_size.py --precision bfloat16 --resume",
    ),
    Claim(
        "figure 9",
        "LeNet-300-100 beyond 90 %: k flats lose less than SVD",
        "a figure",
        compared("messi_lenet", "MESSI, k = 5", "SVD", tuned_drop, ("10%", "8%", "6%", "4%"), ["mnist"]),
        f"{LENET} (after 2 epochs)",
    ),
    Claim(
        "figure 9",
        "The same before fine-tuning (the paper does not say which it shows)",
        "a figure",
        compared("messi_lenet", "MESSI, k = 5", "SVD", drop, ("10%", "8%", "6%", "4%"), ["mnist"]),
        LENET,
    ),
    Claim(
        "figure 10",
        "VGG-19: k flats lose less than SVD at high rates",
        "a figure",
        compared("messi_vgg", "MESSI, k = 5", "SVD", tuned_drop, ("40%", "20%", "10%", "4%", "2%"), ["cifar10"]),
        f"{VGG} (a quarter of the width; after 2 epochs of the linear layers)",
    ),
    Claim(
        "figure 10",
        "The same before fine-tuning",
        "a figure",
        compared("messi_vgg", "MESSI, k = 5", "SVD", drop, ("40%", "20%", "10%", "4%", "2%"), ["cifar10"]),
        VGG,
    ),
    Claim(
        "appendix D, figure 11",
        "The best of the numbers of flats that a search tries loses less than SVD",
        "a figure (DistilBERT)",
        compared("messi_search", "MESSI, k searched", "SVD", tuned_drop, SIZES, ("cola", "mrpc"), beside="messi_tasks"),
        "python experiments/messi_search.py --precision bfloat16 --resume (chosen on held-out examples)",
    ),
    Claim(
        "figure 16",
        "LeNet-300-100: projective clustering loses less than k-means with SVDs",
        "a figure",
        compared("messi_lenet", "MESSI, k = 5", "k-means, k = 5", tuned_drop, ("10%", "8%", "6%", "4%"), ["mnist"]),
        f"{LENET} (after 2 epochs)",
    ),
    Claim(
        "figures 12 to 15",
        "The same for embedding tables on RTE and MRPC; on DistilBERT a tie",
        "figures",
        compared("messi_variants", "MESSI, k = 5", "k-means, k = 5", tuned_drop, SIZES, ("mrpc", "rte")),
        VARIANTS,
        FEW_SEEDS,
    ),
    Claim(
        "figures 13, 15",
        "The same before fine-tuning",
        "figures",
        compared("messi_variants", "MESSI, k = 5", "k-means, k = 5", drop, SIZES, ("mrpc", "rte")),
        VARIANTS,
        FEW_SEEDS,
    ),
    Claim(
        "table 3",
        "Distances instead of their squares: mostly better before fine-tuning",
        "MRPC 3.1 against 3.9, RTE 5 against 3.2 at j = 517",
        compared("messi_variants", "MESSI l1, k = 5", "MESSI, k = 5", drop, SIZES, ("mrpc", "rte")),
        VARIANTS,
        FEW_SEEDS,
    ),
    Claim(
        "table 3",
        "... and level after",
        "-",
        compared("messi_variants", "MESSI l1, k = 5", "MESSI, k = 5", tuned_drop, SIZES, ("mrpc", "rte")),
        VARIANTS,
        FEW_SEEDS,
    ),
    Claim(
        "appendix E.2",
        "Distances instead of their squares take days instead of minutes",
        "O(n d^4) for each subspace",
        distances,
        "python benchmarks/robust_em.py",
    ),
    Claim(
        "section 2.1",
        "A dimension for each subspace would be better (not tried there)",
        "-",
        compared("messi_tasks", "kflats", "MESSI, k = 5", tuned_drop, SIZES, GLUE),
        f"{TASKS} (with token counts and rows kept exactly)",
    ),
]
HSU = [
    Claim(
        "tables 1, 3",
        "FWSVD far above SVD without fine-tuning, on every task",
        "BERT, average of 8: SVD 39.0, FWSVD 58.2 of 85.4; MiniLM on CoNLL: 12.5 and 70.1",
        compared("fwsvd_tasks", "FWSVD", "SVD", drop, ["33% ranks"], SIX),
        FWSVD,
        CHANCE,
    ),
    Claim(
        "tables 1, 3",
        "The same, seven tasks, an older command and one seed",
        "as above",
        task_scores,
        "python experiments/task_scores.py --cache FOLDER (its page has the whole command)",
        f"{CHANCE}; so for CoLA here",
    ),
    Claim(
        "tables 1 to 3",
        "After fine-tuning FWSVD is better than or level with SVD",
        "BERT 81.6 and 83.6; MiniLM on CoNLL 88.0 and 88.6 of 88.5",
        compared("fwsvd_tasks", "FWSVD", "SVD", tuned_drop, ["33% ranks"], SIX),
        FWSVD,
    ),
    Claim(
        "table 3, section 5.4",
        "With parameters that blocks share (ALBERT; here one block of MiniLM used six times, which learns little) "
        "FWSVD loses far less than SVD",
        "ALBERT-large, 14 % fewer parameters: SVD 77.1, FWSVD 84.3 of 84.7",
        compared("fwsvd_tasks", "FWSVD", "SVD", tuned_drop, ["33% ranks"], ("cola", "stsb"), ["MiniLM-shared"]),
        "python experiments/fwsvd_tasks.py --source shared --paths task --tasks cola,stsb "
        "--precision bfloat16 --resume",
        "the shared block has hardly learned the tasks, so this says little of ALBERT",
    ),
    Claim(
        "figure 5",
        "At each rank ratio FWSVD is far above SVD",
        "a figure (CoLA, STS-B and others)",
        compared("fwsvd_tasks", "FWSVD", "SVD", drop, RATIOS, ("cola", "stsb")),
        FWSVD,
    ),
    Claim(
        "figures 1, 6 to 9, table 4",
        "Without the smallest tenth of singular values SVD loses much, FWSVD little",
        "STS-B: SVD 4.9 %, FWSVD 0.2 %",
        compared("fwsvd_groups", "FWSVD", "SVD", drop, ["group 10"], ("stsb", "cola")),
        GROUPS,
    ),
    Claim(
        "section 6, limitation 1",
        "It needs a task and its labels",
        "-",
        compared("fwsvd_tasks", "kflats, generic first", "SVD, generic first", tuned_drop, ["33% ranks"], SIX),
        f"{FWSVD} (without labels, by projections of the outputs)",
    ),
    Claim(
        "section 6, limitation 2",
        "A weight for every element may be better",
        "future work",
        element_weights,
        "python experiments/task_scores.py --cache FOLDER (its page has the whole command)",
        "what is missing is not finer weights, but correlations between inputs",
    ),
]
TUKAN = [
    Claim(
        "figure 3, tables 2, 3",
        "The lp low rank at p = 1 loses less than SVD",
        "RoBERTa on MRPC at 15 / 28 / 41 % saved: 0.49 / 0.98 / 2.69, SVD 5.70 / 6.25 / 9.51",
        compared("robust_scores", "ellipsoid 1", "SVD", drop, ("85%", "72%", "59%"), SIX),
        ROBUST,
    ),
    Claim(
        "table 3",
        "... and less than pruning by magnitude",
        "RoBERTa on MRPC: 1.90 / 2.17 / 2.98",
        compared("robust_scores", "ellipsoid 1", "magnitude bitmap", drop, ("85%", "72%", "59%"), SIX),
        ROBUST,
    ),
    Claim(
        "table 3",
        "... than random pruning",
        "RoBERTa on MRPC: 1.36 / 3.06 / 4.38",
        compared("robust_scores", "ellipsoid 1", "random csr", drop, ("85%", "72%", "59%"), SIX),
        ROBUST,
    ),
    Claim(
        "table 3",
        "... than pruning by SynFlow",
        "RoBERTa on MRPC: 0.81 / 1.60 / 2.75",
        compared("robust_scores", "ellipsoid 1", "synflow bitmap", drop, ("85%", "72%", "59%"), SIX),
        ROBUST,
    ),
    Claim(
        "table 3",
        "... than L1-PCA (by its fixed point: minutes a table, so that MRPC alone was run)",
        "RoBERTa on MRPC: 3.04 / 4.94 / 18.48",
        compared("robust_scores", "ellipsoid 1", "l1-pca fixed point", drop, ("85%", "72%", "59%"), ["mrpc"]),
        ROBUST,
    ),
    Claim(
        "definition 1, lemma 4",
        "The distortion is at most d^(p/2)",
        "d^(p/2)",
        "**holds, and d^abs(1-p/2) is reached** by Lewis weights ([robust-svd.md](robust-svd.md))",
        "python experiments/distortion.py",
    ),
    Claim(
        "theorem 5",
        "d sigma_d^p is a lower bound of the error",
        "-",
        "**false**: diag(3, 2, 1) at rank 2 and p = 2 has error 1, the bound says 3 ([robust-svd.md]"
        "(robust-svd.md#algorithm-a1-and-what-had-to-be-decided), run as a test)",
        "python -m pytest tests/docs",
    ),
    Claim(
        "algorithm A1, line 14",
        "The contraction by 1/d proves the ellipsoid",
        "-",
        "**does not fit theorem 2**, which needs 1/sqrt(d); one-sided cuts cannot reach it "
        "([robust-svd.md](robust-svd.md#algorithm-a1-and-what-had-to-be-decided))",
        "python experiments/loewner.py",
    ),
    Claim(
        "theorems 6, 7",
        "Sketches give the ellipsoid in O(n d log n)",
        "-",
        sketches,
        "python experiments/sketched_ellipsoids.py",
    ),
]
SUM = [
    Claim(
        "MESSI",
        "At every rate kflats loses at most half of what MESSI's best loses before fine-tuning, and is not behind "
        "after",
        "expected, to be shown or refuted",
        halves("messi_tasks", "kflats", ("SVD", *(f"MESSI, k = {k}" for k in KS[1:])), SIZES, GLUE),
        TASKS,
    ),
    Claim(
        "FWSVD",
        "The same for linear layers, by the default of kflats",
        "expected",
        halves("fwsvd_tasks", "kflats, default", ("SVD", "FWSVD"), RATIOS, SIX),
        FWSVD,
    ),
    Claim(
        "FWSVD",
        "The same by the gradients of the logits, which were chosen by the dev scores of seed 0 of these tasks",
        "expected",
        halves("fwsvd_tasks", "kflats", ("SVD", "FWSVD"), RATIOS, SIX),
        FWSVD,
    ),
    Claim(
        "Robust SVD",
        "The same for tables without fine-tuning, by flats that know the vocabulary alone",
        "expected",
        halves("robust_scores", "flats + zipf", ("SVD", "ellipsoid 1"), ("85%", "72%", "59%"), SIX, trained=False),
        ROBUST,
    ),
    Claim(
        "MESSI",
        "LeNet-300-100, hidden layers: the same",
        "expected",
        halves(
            *("messi_lenet", "kflats", ("SVD", "MESSI, k = 2", "MESSI, k = 5")),
            *(("20%", "10%", "8%", "6%", "4%"), ["mnist"]),
        ),
        LENET,
    ),
]
HEAD = """# What the papers claim, and what came out here

    python experiments/reproduction.py

writes this page from the logs and tables in [experiments/results](../experiments/results); it runs nothing. Models are
the packaged all-MiniLM-L6-v2 trained on each task, LeNet-300-100 and a narrow VGG-19, not the papers' task models.
Numbers are drops of the task's metric in points (less is better), of the first and of the second method, and the mean
paired difference over seeds with its 95 % interval. **holds** and **refuted** mean that the interval excludes 0, "open"
that it does not, or that there is none: one seed, or differences that are all equal. Of twenty ties one is expected to
look like a difference. Sizes are what is kept. The interval covers the chance of training, not that of the judged
examples. What each command needs and takes: [experiments](../experiments/README.md). MiniLM is a compact model already,
so compressing it after training is the third path of FWSVD's paper; `--source bert-base-uncased` is its second."""


def page(results: Path = RESULTS) -> str:
    """The whole page."""
    parts = [HEAD]
    for title, claims in (
        ("MESSI (Maalouf et al., ICLR 2021)", MESSI),
        ("FWSVD (Hsu et al., ICLR 2022)", HSU),
        ("Robust SVD (Tukan et al., Sensors 2021)", TUKAN),
        ("The sum", SUM),
    ):
        rows = [
            [c.where, c.says, c.theirs, c.ours if isinstance(c.ours, str) else c.ours(results), c.why, f"`{c.command}`"]
            for c in claims
        ]
        parts += [f"## {title}", markdown(["where", "claim", "their number", "ours", "why not", "command"], rows)]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
