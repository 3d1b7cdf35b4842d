"""The HTML report: one file that needs nothing else, and nothing in it that a file's names could do."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kflats.common.errors import KflatsError
from kflats.io.atomic import new_folder
from kflats.report.html import REPORT_PAGE, render, spectrum
from kflats.report.report import BandReport, NormError, Report, WeightReport

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

NASTY = "$x^2$<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x1b‮$x^2$"


def weight(name: str = "table", k: int = 3, nested: bool = True) -> WeightReport:
    ranks = (20, 8, 2) if nested else (8,)
    bands = [BandReport(None, 16, 10, 0.4, 0.0)]
    bands += [BandReport(flat, rank, 30, 0.02, 1 / rank) for flat in range(k) for rank in ranks]
    return WeightReport(
        name, (name, NASTY), (10 + 30 * k * len(ranks), 24), "float32",
        {"type": "Flats", "k": k, "loss": NASTY}, {"type": "Uniform"}, {"type": "Float", "dtype": "same"},
        30_000, 18_000, 4_400, 0.02, 0.3, 0.05, tuple(1 / 24 for _ in range(24)), tuple(bands),
        0.5, NASTY,
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    report = Report(NASTY, "60%", (weight(NASTY),), 100_000, 88_000, 0, "0.1.0")
    return render(report, tmp_path_factory.mktemp("report") / "a" / "b")


class Seen(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_needs_nothing_else(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tags = Seen(text).tags
    assert page.name == REPORT_PAGE
    assert not {"script", "link", "iframe", "object", "base", "form"} & {tag for tag, _ in tags}
    addresses = [v for _, a in tags for k, v in a.items() if k in ("src", "srcset", "href", "action", "data")]
    assert addresses
    assert all(v and v.startswith("data:image/png;base64,") for v in addresses)
    assert not re.search(r"url\(|@import|https?://", re.sub(r"data:image/png;base64,[\w+/=]+", "", text))


def test_every_picture_has_a_text(page: Path) -> None:
    tags = Seen(page.read_text(encoding="utf-8")).tags
    images = [a for tag, a in tags if tag == "img"]
    assert len(images) == 1
    assert all(len(a["alt"] or "") > 40 for a in images)


def test_names_are_text_and_no_more(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    tags = Seen(text).tags
    assert not any(name.startswith("on") for _, a in tags for name in a)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "‮" not in text
    assert "\x1b" not in text


def test_png_files_lie_beside_the_page_under_plain_names(page: Path) -> None:
    names = sorted(p.name for p in page.parent.glob("*.png"))
    assert len(names) == 1
    assert names[0].endswith("-spectrum.png")
    assert all(re.fullmatch(r"[\w.-]+", n) for n in names)
    assert all(p.read_bytes().startswith(b"\x89PNG\r\n") for p in page.parent.glob("*.png"))


def test_the_page_says_what_the_records_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for part in ("60.0 %", "88.0 %", "0.02", "0.05", "30.0 kB", "18.0 kB", "4,400 values", "All bands (10)"):
        assert part in text


def test_many_weights_are_listed_but_only_the_largest_are_drawn(tmp_path: Path) -> None:
    bare = replace(weight(), bands=(), spectrum=())
    many = tuple(replace(bare, name=f"layer{i}", bytes_before=30_001 + i) for i in range(8))
    text = render(Report("m", "60%", (weight("small", nested=False), *many), 9, 9, 0, "1"), tmp_path).read_text()
    assert text.count('<td class="name"><bdi>') == 9
    assert "1 smaller ones are in the table only" in text
    assert not list(tmp_path.glob("*.png"))  # "small" is not drawn, the others have no spectrum


def test_pictures_need_figures_and_say_them() -> None:
    assert spectrum(replace(weight(), spectrum=(0.0, -1e-9))) is None
    assert spectrum(replace(weight(), bands=()))
    picture = spectrum(weight())
    assert picture is not None
    assert "24 eigenvalues from 0.0417 down to 0.0417" in picture.alt
    assert weight(k=1).mean_rank == pytest.approx((10 * 16 + 30 * 30) / 100)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = Report("m", "60%", (), 10, 10, 0, "1")
    for module in ("jinja2", "matplotlib"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            patch.delitem(sys.modules, "matplotlib.figure", raising=False)
            with pytest.raises(KflatsError, match=r"pip install 'kflats\[report\]'"):
                render(report, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_more_than_a_report_stays(tmp_path: Path) -> None:
    """Such as a model that kflats wrote, whose manifest would allow it."""
    report, out = Report("m", "60%", (), 10, 10, 0, "1"), tmp_path / "model"
    with new_folder(out) as aside:
        (aside / "model.safetensors").write_text("weights")
    with pytest.raises(KflatsError, match=r"holds more than a report: model\.safetensors"):
        render(report, out)
    assert (out / "model.safetensors").read_text() == "weights"
    assert render(report, out / "report") == render(report, out / "report")  # which replaces the first


def test_the_folder_must_not_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(KflatsError, match="not a folder"):
        render(Report("m", "60%", (), 10, 10, 0, "1"), tmp_path / "file")


def layer(kind: str, number: int, rank: int | None) -> WeightReport:
    """One linear layer of a deep model; None: left dense."""
    made = replace(
        weight(f"encoder.{number}.{kind}", k=1, nested=False), shape=(24, 24),
        bands=() if rank is None else (BandReport(0, rank, 24, 1.0, 0.1),),
    )  # fmt: skip
    return made if rank else replace(made, stored="dense", spectrum=())


@pytest.mark.parametrize("kinds", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_layers_left_dense_are_listed(tmp_path: Path, kinds: int) -> None:
    names = [NASTY, *(f"kind{chr(97 + i)}" for i in range(kinds - 1))]
    layers = tuple(layer(kind, i, None if i == 1 else 4 + i) for i in range(4) for kind in names)
    report = Report("m", "50%", layers, 100_000, 88_000, 0, "0.1.0")
    page = render(report, tmp_path).read_text(encoding="utf-8")
    assert "<h2>Left dense</h2>" in page
    assert page.count(">dense</td>") == kinds
    assert "<script>" not in page


def test_the_method_s_own_norm_has_columns_where_there_is_one(tmp_path: Path) -> None:
    report = Report("tiny", "60%", (replace(weight(), own=NormError(NASTY, 0.345, 0.456)), weight("b")), 9, 8, 0, "0")
    text = render(report, tmp_path / "own").read_text(encoding="utf-8")
    assert """>0.345</td><td data-label="SVD's own">0.456</td>""" in text
    assert "SVD's own" in text
    assert text.count(">-</td>") == 3
    assert "<script" not in text
    rows = re.findall(r"<tr>(?:(?!</tr>).)*</tr>", text.split("</table>")[0], re.S)
    assert {len(re.findall(r"<t[dh]", row)) for row in rows} == {13}
    plain = render(replace(report, weights=(weight(),)), tmp_path / "plain").read_text(encoding="utf-8")
    assert "own error" not in plain
