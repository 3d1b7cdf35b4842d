"""The frontier: what is measured is what a model says with the decoded table, and an interrupted run goes on."""

from __future__ import annotations

import copy
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kflats.cli.app import app
from kflats.errors import KflatsError
from kflats.evaluate.comparing import fidelity, load_tokenizer
from kflats.files import load_model
from kflats.frontier.entries import COUNTED, METHODS, UNCOUNTED, UNWEIGHED, entries
from kflats.frontier.judge import Judge
from kflats.frontier.records import FRONTIER_FILE, Frontier, Point, Refused
from kflats.frontier.rivals.rounding import Absmax, Half, Rotated
from kflats.frontier.sweep import frontier
from kflats.importance import TokenCounts
from kflats.importance.measured import Measured
from kflats.measure.counting import count_tokens, zipf_prior
from kflats.tasks.scoring import score
from kflats.trim.trimming import trim

pytest.importorskip("transformers")

COUNTS = [f"the word{i} of word{i * 7 % 283} a b" for i in range(60)]
JUDGED = [f"the word{i * 3 % 283} word{i} c" for i in range(40)]
QUICK = ["fp16", "absmax", "rotation", "svd+counts"]
TABLE = "embeddings.word_embeddings"


@pytest.fixture(scope="module")
def made(tiny_folder: Path) -> Frontier:
    return frontier(tiny_folder, texts=COUNTS, judge=JUDGED, sizes=[4.0, 8.0, 16.0], methods=QUICK, quiet=True)


@pytest.fixture(scope="module")
def sts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sts")
    lines = ["sentence1\tsentence2\tlabel"]
    lines += [f"the word{i}\tof word{i * 5 % 283} word{i}\t{i % 6}" for i in range(30)]
    with gzip.open(folder / "dev.tsv.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return folder


def point(name: str = "x", **given: object) -> Point:
    made = Point(name, name, False, 4.0, 100, 0.1, 0.2, 0.9, 0.8, None, None, None, 0.1)
    return replace(made, **given)  # type: ignore[arg-type]


def frontier_of(*points: Point, **given: object) -> Frontier:
    made = Frontier("m", "w", (10, 4), "Uniform()", 0, 3, "", "", None, points, (), 0, "0")
    return replace(made, **given)  # type: ignore[arg-type]


def test_points_are_what_the_model_says(made: Frontier, tiny_folder: Path) -> None:
    """Each figure again, from the table alone and the public functions."""
    model, tokenizer = load_model(tiny_folder), load_tokenizer(tiny_folder)
    table = model.get_input_embeddings().weight.detach().clone()
    counts = count_tokens(COUNTS, tokenizer, len(table))
    weights = TokenCounts().weigh(Measured(len(table), counts, zipf_prior(tokenizer, len(table)))).left
    for rival in (Absmax(4), Half(), Rotated(4)):
        coded = rival.code(table)
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.get_input_embeddings().weight.copy_(coded.table)
        near = fidelity(model, other, tokenizer, JUDGED, counted=COUNTS)
        (found,) = [p for p in made.points if p.name == rival.name]
        assert (found.nbytes, found.bits) == (coded.nbytes, coded.bits)
        assert found.error == pytest.approx(coded.error(table))
        assert found.weighted_error == pytest.approx(coded.error(table, weights))
        assert found.mean_cosine == pytest.approx(near.mean_cosine, abs=1e-5)
        assert found.p5_cosine == pytest.approx(near.p5_cosine, abs=1e-5)
        assert found.rare_cosine == pytest.approx(near.rare_mean_cosine, abs=1e-5)
        assert found.neighbours == pytest.approx(near.neighbour_overlap, abs=0.02)


def test_order_and_families(made: Frontier) -> None:
    bits = [p.bits for p in made.points]
    assert bits == sorted(bits, reverse=True)
    assert made.shape == (300, 16)
    assert made.weight == TABLE
    assert {p.name for p in made.points} >= {"fp16", "int8, a scale a row", "rotation, 8 bits"}
    assert "SVD, token counts" in made.families
    assert made.best(16.0) == max(made.points, key=lambda p: p.mean_cosine)
    assert made.best(0.01) is None
    best = made.best(6.0)
    assert best is not None
    assert best.bits <= 6.0


def test_ours_is_among_them_and_within_its_size(tiny_folder: Path) -> None:
    pytest.importorskip("constriction")
    made = frontier(
        tiny_folder, texts=COUNTS, judge=JUDGED, sizes=[6.0, 8.0], methods=["transform+counts", "flats"], quiet=True
    )
    assert {p.family: p.ours for p in made.points} == {"kflats Transform, token counts": True, "kflats Flats": True}
    for p in made.points:
        assert p.bits <= 8.0 if "8 bits" in p.name else p.bits <= 6.0
    assert made.best(8.0, ours=False) is None


def test_sizes_that_cannot_be_are_told(tiny_folder: Path) -> None:
    made = frontier(tiny_folder, judge=JUDGED, sizes=[0.2, 6.0], methods=["svd"], quiet=True)
    assert [r.name for r in made.refused] == ["SVD, 0.2 bits"]
    assert "cannot hold" in made.refused[0].reason
    assert len(made.points) == 1
    assert "not possible: SVD, 0.2 bits" in str(made)
    assert "not possible: SVD, 0.2 bits" in made.markdown()


def test_trimmed_vocabularies_are_read_with_their_own_tokenizer(tiny_folder: Path) -> None:
    made = frontier(tiny_folder, texts=COUNTS, judge=JUDGED, sizes=[0.1, 4.0], methods=["trim"], quiet=True)
    (found,) = [p for p in made.points if p.family == "trimmed vocabulary"]
    kept = 300 * 4 // 16
    assert (found.nbytes, found.bits) == (kept * 16 * 2, 4.0)
    assert (found.error, found.weighted_error) == (None, None)
    assert found.mean_cosine < 0.999
    assert [r.name for r in made.refused] == ["trimmed vocabulary, 0.1 bits"]
    model, tokenizer = load_model(tiny_folder), load_tokenizer(tiny_folder)
    small = trim(model, tokenizer, keep=kept, texts=COUNTS)
    near = fidelity(model, small.model, tokenizer, JUDGED, counted=COUNTS, compressed_tokenizer=small.tokenizer)
    assert found.mean_cosine == pytest.approx(near.mean_cosine, abs=1e-3)  # float32 rows there, float16 here
    assert "-" in str(made)


def test_the_folder_is_whole_and_loads(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    given = {"texts": COUNTS, "judge": JUDGED, "sizes": [4.0, 16.0], "methods": QUICK, "quiet": True}
    made = frontier(tiny_folder, out=tmp_path / "f", **given)
    assert Frontier.load(tmp_path / "f") == made
    assert sorted(p.name for p in (tmp_path / "f").iterdir()) == [
        "frontier.html", "frontier.json", "frontier.md", "kflats_manifest.json", "mean-cosine.png", "tail.png",
        "weighted-error.png",
    ]  # fmt: skip  # (no rare words in so small a vocabulary)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]  # nothing is left beside it
    page = (tmp_path / "f" / "frontier.html").read_text(encoding="utf-8")
    assert all(p.name in page for p in made.points)
    assert "<script" not in page
    with pytest.raises(KflatsError, match="exists already"):
        frontier(tiny_folder, out=tmp_path / "f", **given)
    again = frontier(tiny_folder, out=tmp_path / "f", force=True, **given)
    assert [p.error for p in again.points] == [p.error for p in made.points]


def test_an_interrupted_run_goes_on(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    asked = {"texts": COUNTS, "judge": JUDGED, "methods": ["fp16", "absmax", "svd"]}
    asked |= {"quiet": True, "out": tmp_path / "f", "sizes": [0.1, 4.0, 8.0, 16.0]}
    coded: list[str] = []
    for kind in (Half, Absmax):
        real = kind.code

        def watched(self, *args, _real=real, **kwargs):  # type: ignore[no-untyped-def]
            coded.append(self.name)
            if self.name.startswith("int4") and coded.count(self.name) == 1 and "stop" not in coded:
                coded.append("stop")
                raise KeyboardInterrupt
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(kind, "code", watched)
    with pytest.raises(KeyboardInterrupt):
        frontier(tiny_folder, **asked)
    assert not (tmp_path / "f").exists()
    made = frontier(tiny_folder, **asked)
    assert coded.count("fp16") == 1
    assert coded.count("int8, a scale a row") == 1
    assert coded.count("int4, a scale a row") == 2
    assert {p.name for p in made.points} >= {"fp16", "int8, a scale a row", "int4, a scale a row"}
    assert [r.name for r in made.refused][-1] == "SVD, 0.1 bits"
    monkeypatch.undo()
    fresh = frontier(tiny_folder, **{**asked, "out": None})
    assert [(p.name, p.error, p.mean_cosine) for p in fresh.points] == [
        (p.name, p.error, p.mean_cosine) for p in made.points
    ]


def test_other_input_is_not_taken_for_finished(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    asked = {"judge": JUDGED, "sizes": [4.0], "methods": ["rotation", "absmax"], "quiet": True}
    real = Absmax.code

    def stopped(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        raise KeyboardInterrupt

    monkeypatch.setattr(Absmax, "code", stopped)
    with pytest.raises(KeyboardInterrupt):
        frontier(tiny_folder, out=tmp_path / "f", seed=0, **asked)
    monkeypatch.setattr(Absmax, "code", real)
    made = frontier(tiny_folder, out=tmp_path / "f", seed=1, **asked)
    plain = frontier(tiny_folder, seed=1, **asked)
    assert [p.error for p in made.points] == [p.error for p in plain.points]


def test_the_judge_is_the_public_functions(tiny_folder: Path, sts: Path) -> None:
    pytest.importorskip("scipy")
    model, tokenizer = load_model(tiny_folder), load_tokenizer(tiny_folder)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1 + 0.3 * torch.rand(300, 1))
    twice = [*JUDGED, JUDGED[0]]
    judge = Judge(model, tokenizer, twice, COUNTS, task="sts", data=sts)
    found = judge(other)
    near = fidelity(model, other, tokenizer, twice, counted=COUNTS)
    assert found.fidelity.sentences == 41
    assert found.fidelity.mean_cosine == pytest.approx(near.mean_cosine, abs=1e-5)
    assert found.fidelity.rare_mean_cosine == pytest.approx(near.rare_mean_cosine, abs=1e-5)
    assert found.score == pytest.approx(score(other, tokenizer, "sts", data=sts, costs=False).value, abs=0.01)
    assert judge.original.score == pytest.approx(score(model, tokenizer, "sts", data=sts, costs=False).value, abs=0.01)
    assert judge.original.fidelity.mean_cosine == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(KflatsError, match="cola"):
        Judge(model, tokenizer, JUDGED, task="cola", data=sts)


def test_a_task_is_scored_and_drawn(tiny_folder: Path, sts: Path, tmp_path: Path) -> None:
    for package in ("scipy", "matplotlib", "jinja2"):
        pytest.importorskip(package)
    made = frontier(
        tiny_folder, judge=JUDGED, sizes=[4.0, 16.0], methods=["fp16", "absmax"], task="sts", data=sts, quiet=True,
        out=tmp_path / "f",
    )  # fmt: skip
    assert made.metric == "spearman"
    assert made.score is not None
    assert all(p.score is not None for p in made.points)
    assert (tmp_path / "f" / "score.png").stat().st_size > 5000
    assert "spearman" in str(made)


def test_records_come_back_from_json_and_refuse_others() -> None:
    made = frontier_of(point("a|b"), point("c", ours=True, rare_cosine=0.5), refused=(Refused("d", "too | small"),))
    assert Frontier.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert "a\\|b" in made.markdown()
    assert "* c" in str(made)
    for data, message in (
        ({}, "not a kflats frontier"),
        ({**made.to_json(), "version": 9}, "version 9"),
        ({**made.to_json(), "frontier": {"model": 3}}, "lacks|unknown"),
    ):
        with pytest.raises(KflatsError, match=message):
            Frontier.from_json(data)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KflatsError, match="no frontier at"):
        Frontier.load(tmp_path)
    (tmp_path / FRONTIER_FILE).write_text("{", encoding="utf-8")
    with pytest.raises(KflatsError, match="not JSON"):
        Frontier.load(tmp_path)


def test_nothing_in_a_name_can_act_on_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    from kflats.frontier.page import draw

    nasty = "$x^2$<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x1b"
    made = frontier_of(point(nasty), model=nasty, weight=nasty, refused=(Refused(nasty, nasty),))
    page = draw(made, tmp_path).read_text(encoding="utf-8")
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "\x1b" not in page


def test_what_is_asked_by_default_is_known() -> None:
    shape = (30522, 384)
    for methods, counted in ((COUNTED, True), (UNCOUNTED, False)):
        found, _ = entries(shape, [1.0, 4.0, 16.0], methods, counted=counted)
        assert len({entry.name for entry in found}) == len(found)
        assert {entry.ours for entry in found} == {True, False}
    assert {m.partition("+")[0] for m in COUNTED} == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(5000, 32), (30522, 384)])
def test_every_size_that_is_asked_is_an_entry_or_told(method: str, shape: tuple[int, int]) -> None:
    """Of each way alone: the sizes without a point at or next below them are those that are refused."""
    sizes = [0.02, 0.5, 1.0, 3.0, 4.0, 7.5, 8.0, 11.0, 12.0, 16.0, 40.0]
    everywhere, refused = entries(shape, sizes, [method], counted=False)
    told = [float(size) for r in refused for size in sizes_of(r)]
    assert len(set(told)) == len(told)
    for size in sizes:
        if size in told:
            with pytest.raises(KflatsError, match="nothing that was asked is possible"):
                entries(shape, [size], [method], counted=False)
        else:
            alone, none = entries(shape, [size], [method], counted=False)
            assert none == []
            assert alone
            assert set(alone) <= set(everywhere)


def sizes_of(refused: Refused) -> list[str]:
    return refused.name.partition(", ")[2].partition(" bits")[0].split(", ")


def test_roundings_are_those_at_and_next_below() -> None:
    found, refused = entries((300, 64), [3.0, 5.0, 9.0], ["rotation", "absmax", "fp16"], counted=False)
    assert [entry.name for entry in found] == [
        "rotation, 3 bits", "rotation, 5 bits", "rotation, 8 bits",
        "int8, a scale a row", "int4, a scale a row", "int4, a scale for 32",
    ]  # fmt: skip
    assert {r.name: r.reason for r in refused} == {
        "absmax, 3 bits": "the smallest takes 4 bits",
        "fp16, 3, 5, 9 bits": "the smallest takes 16 bits",
    }


def test_nothing_possible_is_an_error_and_leaves_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    for sizes, methods, message in (
        ([40.0], ["transform"], "Transform, 40 bits: its finest steps"),
        ([0.1], ["svd"], "SVD, 0.1 bits: .*cannot hold"),  # known only once it is tried
    ):
        with pytest.raises(KflatsError, match=f"nothing that was asked is possible.*{message}"):
            frontier(tiny_folder, judge=JUDGED, sizes=sizes, methods=methods, out=tmp_path / "f", quiet=True)
        assert list(tmp_path.iterdir()) == []


def test_rows_that_tokens_do_not_enter_all_count_the_same(tiny_folder: Path) -> None:
    asked = {"texts": COUNTS, "judge": JUDGED, "weight": "embeddings.position_embeddings", "quiet": True}
    made = frontier(tiny_folder, sizes=[8.0], methods=["absmax", "svd"], **asked)  # type: ignore[arg-type]
    assert (made.weight, made.shape) == (asked["weight"], (32, 16))
    assert (made.importance, made.counted) == ("Uniform()", 0)
    assert "tokens do not enter it, so that every row counts the same" in str(made)
    assert all(p.weighted_error == pytest.approx(p.error) for p in made.points)
    for method in ("svd+counts", "transform+zipf", "trim"):
        with pytest.raises(KflatsError, match="tokens do not enter this table"):
            frontier(tiny_folder, sizes=[8.0], methods=[method], **asked)  # type: ignore[arg-type]


def test_a_table_of_positions_has_defaults_of_its_own() -> None:
    found, _ = entries((512, 64), [4.0, 16.0], UNWEIGHED, counted=True, tokens=False)
    assert {entry.importance for entry in found} == {""}
    assert {entry.ours for entry in found} == {True, False}


@pytest.mark.parametrize(
    ("methods", "sizes", "counted", "message"),
    [
        (["gzip"], [4.0], False, "no way to store a table is called 'gzip'"),
        (["svd+nothing"], [4.0], False, "no way to store a table"),
        (["svd+counts"], [4.0], False, "nothing to count"),
        (["absmax+zipf"], [4.0], False, "cannot weigh rows"),
        (["svd"], [0.0], False, "sizes of"),
        (["svd"], [float("nan")], False, "sizes of"),
        (["svd"], [], False, "sizes of"),
        ([], [4.0], False, "no methods"),
        (
            ["transform", "fp16"],
            [15.0],
            False,
            "nothing that was asked is possible.*kflats Transform, 15 bits.*fp16, 15",
        ),
    ],
)
def test_bad_wishes_are_refused(methods: list[str], sizes: list[float], counted: bool, message: str) -> None:
    with pytest.raises(KflatsError, match=message):
        entries((300, 16), sizes, methods, counted=counted)


def test_a_missing_package_is_named_before_anything_is_measured(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kflats.frontier import entries as frontier_entries

    monkeypatch.setattr(frontier_entries, "find_spec", lambda name: None if name == "faiss" else object())
    with pytest.raises(KflatsError, match=r"needs faiss.*kflats\[rivals\]"):
        frontier(tiny_folder, judge=JUDGED, sizes=[4.0], methods=["fp16", "pq"], quiet=True)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_the_command(tiny_folder: Path, sts: Path, tmp_path: Path) -> None:
    for package in ("scipy", "matplotlib", "jinja2"):
        pytest.importorskip(package)
    for name, lines in (("texts", COUNTS), ("one", JUDGED[:20]), ("two", JUDGED[20:])):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    given = ["--texts", tmp_path / "texts", "--judge", tmp_path / "one", "--judge", tmp_path / "two"]
    given += ["--sizes", ".5,4,16", "--methods", "fp16,absmax,svd+counts", "--task", "sts", "--data", sts]
    code, said = run("frontier", tiny_folder, *given, "--out", tmp_path / "f")
    assert code == 0
    assert "int4, a scale a row" in said
    assert "40 sentences judged" in said
    assert (tmp_path / "f" / "frontier.html").is_file()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--sizes", "4,many"], "are no numbers"),
        (["--methods", "gzip"], "no way to store a table"),
        (["--data", "."], "--data is of a --task"),
        (["--weight", "nothing"], "nothing"),
        (["--judge", "absent.txt"], "cannot be read"),
    ],
)
def test_the_command_says_no(tiny_folder: Path, tmp_path: Path, extra: list[str], message: str) -> None:
    code, said = run("frontier", tiny_folder, "--out", tmp_path / "f", *extra)
    assert code == 2
    assert message in " ".join(said.split())
    assert not (tmp_path / "f").exists()
