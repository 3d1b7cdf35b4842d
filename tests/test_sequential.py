"""Sequential calibration: targets behind coded layers, and layers that are coded again for them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import together
from torch import Tensor, nn

import kflats
from kflats import Integer, Recipe
from kflats.calibration.sequential import Blocks as BlocksOf
from kflats.calibration.sequential import Moments
from kflats.common.workers import Workers
from kflats.compress.fitting import CompressedWeight, Partial, swapped
from kflats.compress.sequential import _NOTE as NOTE
from kflats.compress.sequential import fitted
from kflats.importance import InputGram, KroneckerFisher
from kflats.methods import KeepDense
from kflats.model.weights import dense_weight, find_weights
from kflats.planning.calibration_data import gather
from kflats.planning.decide import Decided, decide
from kflats.recipe.budget import one_budget

COARSE = Recipe(KeepDense(), InputGram(), Integer(2), matrix_rows="out_features")
TABLE = Recipe(KeepDense(), codec=Integer(4))


class Block(nn.Module):
    """Two layers that read one tensor, and one that reads both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.left(x)) * self.right(x))


class Blocks(nn.Module):
    """A table and a chain of blocks."""

    def __init__(self, width: int = 48, count: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(60, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def blocks(**settings: int) -> Blocks:
    torch.manual_seed(0)
    return Blocks(**settings).eval()


def windows(count: int = 8, length: int = 12) -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(60, (8, length), generator=draws)} for _ in range(count)]


def decided_for(model: nn.Module) -> Decided:
    data = gather(None, None, windows(), None, None)
    return decide(model, {"linear": COARSE, "words": TABLE}, one_budget("30%", None), data)


def moments_of(x: Tensor, z: Tensor) -> Moments:
    return Moments.of([(x[:30], z[:30]), (x[30:], z[30:])])


def planted() -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(2)
    x = torch.randn(200, 6, generator=draws)
    turned = torch.linalg.qr(torch.randn(6, 6, generator=draws)).Q
    z = x @ turned + 0.1 * torch.randn(200, 6, generator=draws) + 0.5
    return x, z, torch.randn(6, 4, generator=draws)


def test_the_target_is_that_of_least_squares() -> None:
    x, z, matrix = planted()
    found = moments_of(x, z).targets([matrix.double()], part=1, damping=1e-12)[0]
    best = torch.linalg.lstsq(z.double(), x.double() @ matrix.double()).solution
    torch.testing.assert_close(found, best, rtol=1e-2, atol=1e-3)
    half = moments_of(x, z).targets([matrix.double()], part=0.5, damping=1e-12)[0]
    torch.testing.assert_close(half, (best + matrix) / 2, rtol=1e-2, atol=1e-3)


def test_centred_moments_are_those_of_centred_inputs() -> None:
    x, z, _ = planted()
    centred, apart = moments_of(x, z).centred_(), moments_of(x - x.mean(0), z - z.mean(0))
    torch.testing.assert_close(centred.gram, apart.gram, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(centred.cross, apart.cross, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("same", [True, False], ids=["the same inputs", "no inputs"])
def test_without_errors_before_it_the_target_is_the_layer_itself(same: bool) -> None:
    x, _, matrix = planted()
    x = x if same else 0 * x
    torch.testing.assert_close(moments_of(x, x).targets([matrix.double()], 1, 0.1)[0].float(), matrix)


def test_inputs_without_spread_are_noise_of_rounding() -> None:
    """Centred, they have a Gram matrix of rounding errors, which may not be definite."""
    draws = torch.Generator().manual_seed(5)
    for seed, n in enumerate([12] * 20 + [1200]):
        x = torch.randn(1, n, generator=draws).expand(40, n) * (1 + 1e-7 * seed)
        matrix = torch.randn(n, 3, generator=draws)
        found = moments_of(x, 1.01 * x).centred_().targets([matrix.double()], 1, 0.25)[0]
        torch.testing.assert_close(found.float(), matrix, rtol=0, atol=0.05)


def visited(model: nn.Module, batches: list[dict[str, Tensor]], **more: Any) -> list[tuple[list[str], Any]]:
    """The groups that are recoded, each as half of itself, and how far their inputs are from the original's."""
    seen = []

    def recode(weights: Any, moments: Moments | None) -> dict[str, tuple[Tensor, Tensor | None]]:
        seen.append(([weight.name for weight in weights], moments and float(moments.cross.abs().max())))
        return {weight.name: (original[weight.name] / 2, None) for weight in weights}

    layers = [weight for weight in find_weights(model) if weight.places[0].role in ("linear", "conv1d")]
    original = {weight.name: dense_weight(model, weight).clone() for weight in layers}
    chain = BlocksOf.of(model, layers, original, batches)
    assert chain is not None
    chain.recalibrate(more.pop("tables", ()), recode)
    return seen


def test_layers_are_visited_in_the_order_of_their_calls_behind_those_before() -> None:
    model = blocks(count=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = visited(model, windows())
    of_block = [["layers.{}.left", "layers.{}.right"], ["layers.{}.out"]]
    assert [names for names, _ in seen] == [[name.format(k) for name in names] for k in (0, 1) for names in of_block]
    assert seen[0][1] == 0
    assert all(apart > 0 for _, apart in seen[1:])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Crooked(Block):
    """A layer that is called twice, one that reads a part of what the one before reads, and one that reads few
    tokens."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.twice, self.part = nn.Linear(width, width), nn.Linear(width // 2, width)
        self.few = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """As they are called."""
        y = super().forward(self.twice(self.twice(x))) + self.part(x.chunk(2, -1)[0])
        return y + self.few(x[:, :1])


def test_layers_that_read_something_else_are_not_measured() -> None:
    model = blocks(count=2)
    model.layers = nn.ModuleList(Crooked(48) for _ in range(2))
    seen = visited(model, windows())
    measured = [[name.partition(".")[2] for name in names] for names, apart in seen if apart is not None]
    assert measured == [
        [f"{k}.{name}" for name in group] for k in (0, 1) for group in (["left", "right"], ["out"], ["part"])
    ]
    kept = {name for names, apart in seen if apart is None for name in names}
    assert kept == {f"layers.{k}.{name}" for k in (0, 1) for name in ("twice", "few")}


def test_batches_of_unequal_lengths_and_embeddings_by_keyword() -> None:
    class Named(Blocks):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(input_ids) + 0 * self.words(input=input_ids)

    torch.manual_seed(0)
    model = Named(count=2).eval()
    (table,) = (weight for weight in find_weights(model) if weight.name == "words")
    coarse = kflats.matrices.registry.DenseMatrix(torch.zeros(60, 48))
    assert visited(model, windows() + windows(1, length=5), tables=[(table, coarse)])[0][1] == 0


def test_the_model_is_as_it_was_after_an_error() -> None:
    model = blocks(count=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def recode(weights: Any, moments: Any) -> Any:
        if weights[0].name == "layers.1.out":
            raise KeyboardInterrupt
        return {weight.name: (torch.zeros(weight.shape), None) for weight in weights}

    layers = [weight for weight in find_weights(model) if weight.places[0].role == "linear"]
    chain = BlocksOf.of(model, layers, [layer.name for layer in layers], windows())
    assert chain is not None
    with pytest.raises(KeyboardInterrupt):
        chain.recalibrate((), recode)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_inputs_are_those_behind_coded_tables() -> None:
    model = blocks(count=2)
    (table,) = (weight for weight in find_weights(model) if weight.name == "words")
    coarse = kflats.matrices.registry.DenseMatrix(torch.zeros(60, 48))
    ((_, apart), *_) = visited(model, windows(), tables=[(table, coarse)])
    assert apart == 0  # z is zero, and so is z (x - z)'
    halved = kflats.matrices.registry.DenseMatrix(model.words.weight.detach() / 2)
    ((_, apart), *_) = visited(model, windows(), tables=[(table, halved)])
    assert apart > 0


def test_padding_counts_for_nothing() -> None:
    model = blocks(count=2)
    mask = torch.ones(8, 12, dtype=torch.int64)
    mask[:, 7:] = 0

    def padded(by: int) -> list[dict[str, Tensor]]:
        given = [torch.where(mask == 1, one["input_ids"], (one["input_ids"] + by) % 60) for one in windows(14)]
        return [{"input_ids": ids, "attention_mask": mask} for ids in given]

    found = [visited(model, padded(by)) for by in (0, 1)]
    assert found[0] == found[1]
    assert found[0] != visited(model, windows(14))


def test_few_tokens_are_no_measurement() -> None:
    model = blocks(count=2)
    layers = [weight for weight in find_weights(model) if weight.places[0].role == "linear"]
    names = [layer.name for layer in layers]
    assert BlocksOf.of(model, layers, names, windows(5)) is None  # fewer than 12 an input
    assert BlocksOf.of(model, layers, names, windows(6)) is not None


def fits(model: nn.Module, decided: Decided, **more: Any) -> dict[str, CompressedWeight]:
    return {one.decision.weight.name: one for one in fitted(model, decided, 0, True, more.pop("partial", None), **more)}


def outputs(model: nn.Module, decided: Decided, sequential: bool) -> Tensor:
    done = fitted(model, decided, 0, True, None, sequential=sequential)
    swapped(model, decided.plan, done, 0)
    with torch.no_grad():
        return torch.cat([model(**batch) for batch in windows()])


def test_outputs_come_nearer_in_no_more_bytes() -> None:
    with torch.no_grad():
        before = torch.cat([blocks()(**batch) for batch in windows()])
    decided = decided_for(blocks())
    lost = {way: float((outputs(blocks(), decided, way) - before).square().sum()) for way in (True, False)}
    assert lost[True] < 0.95 * lost[False]
    done = {way: fits(blocks(), decided, sequential=way) for way in (True, False)}
    whole = {way: sum(one.report.bytes_after for one in made.values()) for way, made in done.items()}
    assert whole[True] <= whole[False]


def test_layers_are_coded_again_only_if_told() -> None:
    model = blocks()
    decided = decided_for(model)
    told = [name for name, one in fits(model, decided, sequential=True).items() if NOTE in one.report.note]
    assert told
    assert "words" not in told
    assert not any(NOTE in one.report.note for one in fits(model, decided, sequential=False).values())
    assert [one.report for one in fits(model, decided).values() if NOTE in one.report.note]


def test_without_windows_or_a_chain_layers_keep_their_codes(capsys: pytest.CaptureFixture[str]) -> None:
    plain = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)).eval()
    batches = [{"input": torch.randn(8, 40)} for _ in range(4)]
    data = gather(None, None, batches, None, None)
    decided = decide(plain, {"linear": COARSE}, one_budget("30%", None), data)
    notes = [one.report.note for one in fitted(plain, decided, 0, True, None, sequential=True)]
    assert not any(NOTE in note for note in notes)
    assert not capsys.readouterr().err
    fitted(plain, decided, 0, False, None, sequential=True)
    assert "each linear layer is coded by itself: sequential calibration needs" in capsys.readouterr().err
    model = blocks()
    decided = decided_for(model)
    decided = replace(decided, data=replace(decided.data, calibration=None))
    assert not any(NOTE in one.report.note for one in fits(model, decided, sequential=True).values())
    fitted(model, decided, 0, False, None, sequential=True)
    assert "by itself" not in capsys.readouterr().err  # nothing was given that could be run


def test_an_interrupted_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks()
    decided = decided_for(model)
    whole = fits(model, decided)
    coded: list[str] = []
    encode = Recipe.encode_together

    def counted(self: Recipe, problems: Any, dtype: torch.dtype) -> Any:
        coded.append("")
        if len(coded) == 5:
            raise KeyboardInterrupt
        return encode(self, problems, dtype)

    monkeypatch.setattr(Recipe, "encode_together", counted)
    partial = Partial(tmp_path / "out", "a model")
    with pytest.raises(KeyboardInterrupt):
        fits(model, decided, partial=partial)
    resumed = fits(model, decided, partial=partial)
    assert len(coded) == 5 + len(whole) - 4
    for name, one in whole.items():
        for key, tensor in one.matrix.tensors().items() if one.matrix is not None else ():
            assert torch.equal(resumed[name].matrix.tensors()[key], tensor)


def test_workers_divide_the_windows_and_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kflats.calibration.sequential.BLOCK", 24)
    decided = decided_for(blocks())
    alone = fits(blocks(), decided, sequential=True)
    model = {rank: blocks() for rank in range(2)}

    def work(workers: Workers) -> dict[str, CompressedWeight]:
        partial = Partial(tmp_path / "out", "a model")
        return fits(model[workers.rank], decided, sequential=True, partial=partial, workers=workers)

    for made in together(2, 0, work):
        assert isinstance(made, dict)
        for name, one in alone.items():
            assert made[name].report.note == one.report.note
            for key, tensor in one.matrix.tensors().items() if one.matrix is not None else ():
                assert torch.equal(made[name].matrix.tensors()[key], tensor)


def test_a_target_that_does_not_fit_leaves_the_layer_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks()
    decided = decided_for(model)
    encode = Recipe.encode_together

    def refused(self: Recipe, problems: Any, dtype: torch.dtype) -> Any:
        every = torch.arange(48)
        for problem in problems:
            own = {weight.name: dense_weight(model, weight) for weight in find_weights(model) if weight.name != "words"}
            rows = problem.rows.take(every) if len(problem.rows.shape) and problem.rows.shape[0] == 48 else None
            if rows is not None and not any(torch.equal(rows, one.T) for one in own.values()):
                raise kflats.common.errors.DoesNotFitError("too few bytes", hint="more")
        return encode(self, problems, dtype)

    first = fits(model, decided, sequential=False)
    monkeypatch.setattr(Recipe, "encode_together", refused)
    for name, one in fits(model, decided).items():
        # The first block's inputs are those of the original but for the table.
        assert one.report.note == first[name].report.note
        assert one.report.bytes_after == first[name].report.bytes_after


class Widening(nn.Module):
    """Blocks of other widths, and a head of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 48)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(n, n + 8), nn.Tanh()) for n in (48, 56))
        self.head = nn.Linear(64, 48)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_blocks_of_other_widths() -> None:
    torch.manual_seed(0)
    model = Widening().eval()
    seen = visited(model, windows(12))
    assert [names for names, apart in seen if apart is not None] == [["layers.0.0"], ["layers.1.0"]]


class Asking(Blocks):
    """A model whose batches are for its objective, and one that reads the type of a layer."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.words(input_ids).to(self.layers[0].left.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("way", ["batches of an objective", "types that are read"])
def test_what_cannot_be_run_alone_is_coded_by_itself(way: str) -> None:
    torch.manual_seed(0)
    if way == "types that are read":
        model, given = Asking().eval().half(), windows()
    else:
        model, given = blocks(), [{"target": one["input_ids"]} for one in windows()]
    layers = [weight for weight in find_weights(model) if weight.places[0].role == "linear"]
    assert BlocksOf.of(model, layers, [layer.name for layer in layers], given) is None


def test_many_batches_keep_no_file_open() -> None:
    given = [{"input_ids": one["input_ids"][row : row + 1]} for one in windows(20) for row in range(8)]
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    most = 0

    def recode(weights: Any, moments: Any) -> Any:
        nonlocal most
        if Path("/proc/self/fd").exists():
            most = max(most, len(list(Path("/proc/self/fd").iterdir())) - before)
        return {weight.name: (dense_weight(model, weight).clone(), None) for weight in weights}

    model = blocks()
    layers = [weight for weight in find_weights(model) if weight.places[0].role == "linear"]
    chain = BlocksOf.of(model, layers, [layer.name for layer in layers], given)
    assert chain is not None
    chain.recalibrate((), recode)
    assert most < 20


def test_layers_that_choose_tokens_are_not_compared() -> None:
    class Choosing(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.chosen = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            most = y.norm(dim=2).topk(6).indices
            return y + self.chosen(y.take_along_dim(most.unsqueeze(2), 1)).mean(1, keepdim=True)

    class Given(Blocks):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model = Given(count=2).eval()
    model.layers = nn.ModuleList(Choosing(48) for _ in range(2))
    seen = visited(model, [{"x": torch.randn(8, 12, 48)} for _ in range(8)])
    assert {name for names, apart in seen if apart is None for name in names} == {
        "layers.0.chosen",
        "layers.1.chosen",
    }


def test_a_change_of_way_uses_nothing_of_an_interrupted_run(tmp_path: Path) -> None:
    model = blocks()
    decided = decided_for(model)
    partial = Partial(tmp_path / "out", "a model")
    fresh, _ = fits(model, decided), fits(model, decided, sequential=False, partial=partial)
    for name, one in fits(model, decided, partial=partial).items():
        assert one.report.bytes_after == fresh[name].report.bytes_after
        for key, tensor in one.matrix.tensors().items() if one.matrix is not None else ():
            assert torch.equal(fresh[name].matrix.tensors()[key], tensor)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "dtype"),
    [(kflats.Feedback(), torch.float16), (Integer(3), torch.float32)],
    ids=["half precision", "integers of one width"],
)
def test_a_file_is_filled(codec: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also where the table takes what integers of one width leave, and where half precision is wide for a while."""
    model = small("bert", vocab_size=2400).to(dtype)
    model.save_pretrained(tmp_path / "model")
    share = 0.25 if dtype == torch.float32 else 0.4
    limit = int(share * sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")))
    data = {"calibration": windows(), "quiet": True}
    recipes = {
        "linear": Recipe(KeepDense(), KroneckerFisher(), kflats.Feedback(), matrix_rows="out_features"),
        "embeddings.word_embeddings": Recipe(KeepDense(), KroneckerFisher(), kflats.Feedback()),
    }
    planned = kflats.plan(model, recipes, size=f"{limit}B", allocation="loss", **data)
    # Layers have more bytes than integers of one width take.
    layers = {
        one.weight.name: 2 * math.prod(one.weight.shape) // 3
        for one in planned.decisions
        if "layer." in one.weight.name
    }
    spent = sum(layers[one.weight.name] - one.budget_bytes for one in planned.decisions if one.weight.name in layers)
    made = [
        replace(one, recipe=replace(one.recipe, codec=codec), budget_bytes=layers[one.weight.name])
        if one.weight.name in layers
        else replace(one, budget_bytes=one.budget_bytes - spent * ("word" in one.weight.name))
        for one in planned.decisions
    ]
    if codec == Integer(3):
        planned = replace(planned, decisions=tuple(made))
    report = kflats.compress_folder(tmp_path / "model", tmp_path / "small", plan=planned, **data)
    assert any(NOTE in one.note for one in report.weights)
    nbytes = sum(path.stat().st_size for path in (tmp_path / "small").glob("*.safetensors"))
    assert 0.97 * limit <= nbytes <= limit


def small(kind: str, vocab_size: int = 60) -> Any:
    from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

    torch.manual_seed(0)
    if kind == "bert":
        sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        return BertModel(BertConfig(vocab_size=vocab_size, **sizes)).eval()
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2Model(GPT2Config(vocab_size=vocab_size, n_positions=16, n_embd=48, n_layer=2, n_head=2, **ends)).eval()


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_layers_of_transformers_are_coded_again(kind: str, dtype: torch.dtype) -> None:
    """Linear layers with and without the bias of torch, Conv1D, half precision."""
    model = small(kind).to(dtype)
    report = kflats.compress_(model, {"linear": COARSE}, keep="40%", calibration=windows(), sequential=True, quiet=True)
    inside = [one for one in report.weights if "pooler" not in one.name]
    assert len(inside) == {"bert": 12, "gpt2": 8}[kind]
    again = [one.name for one in inside if NOTE in one.note]
    assert len(again) >= 4  # integers of one width may not fit into the bytes of the first ones
    assert all(one.bytes_after <= 0.4 * one.bytes_before for one in report.weights)
    with torch.no_grad():
        assert bool(model(**windows()[0])[0].isfinite().all())


def test_a_folder_holds_what_was_coded_again(tmp_path: Path) -> None:
    from transformers import AutoModel

    small("bert").save_pretrained(tmp_path / "model")
    told = {"keep": "40%", "calibration": windows(), "sequential": True, "quiet": True}
    kflats.compress_folder(tmp_path / "model", tmp_path / "small", method=COARSE, weights=("linear",), **told)
    kflats.compress_(model := small("bert"), {"linear": COARSE}, **told)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    with torch.no_grad():
        loaded = AutoModel.from_pretrained(tmp_path / "small")(**windows()[0])[0]
        assert torch.equal(loaded, model(**windows()[0])[0])
