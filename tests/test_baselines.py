"""What kflats is compared with, held to the laws of its papers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("baselines", reason="experiments/ is not here")

from baselines import dictionary, sparse
from baselines.l1_bit_flipping import greedy_bit_flipping
from baselines.l1_fixed_point import fixed_point
from baselines.magnitude import magnitude_mask
from baselines.random_mask import random_mask
from baselines.robust_pca import principal_component_pursuit
from baselines.synflow import encoder_flow, flow_model, synflow_masks, synflow_scores

from kflats.numerics.svd import truncated_svd


def drawn(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- L1-PCA ---


def nuclear_optimum(a: Tensor, rank: int) -> float:
    """max over all bits of ||A'B||_*: the exact answer, by enumeration."""
    bits = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=a.shape[0] * rank)), dtype=a.dtype)
    products = torch.einsum("nd,bnr->bdr", a, bits.view(-1, a.shape[0], rank))
    return float(torch.linalg.svdvals(products).sum(-1).max())


@pytest.mark.parametrize("together", [False, True])
def test_the_fixed_point_rises_above_the_svd_and_below_the_optimum(together: bool) -> None:
    for seed in range(6):
        a = drawn(7, 4, seed)
        svd = float((a @ truncated_svd(a, 2).basis.T).abs().sum())
        found = fixed_point(a, 2, together=together)
        assert found.converged
        assert found.objective <= nuclear_optimum(a, 2) * (1 + 1e-9)
        if together:  # greedy directions promise it for the first alone
            assert found.objective >= svd * (1 - 1e-9)
        first = float((a @ truncated_svd(a, 1).basis.T).abs().sum())
        assert float((a @ fixed_point(a, 1).basis.T).abs().sum()) >= first * (1 - 1e-9)


def test_flips_go_on_where_the_fixed_point_stops() -> None:
    above = 0
    for seed in range(20):
        a = drawn(40, 10, seed)
        fixed, flipped = fixed_point(a, 1), greedy_bit_flipping(a, 1)
        assert flipped.converged
        assert flipped.objective >= fixed.objective * (1 - 1e-12)
        again = a.T @ torch.where(a @ flipped.basis[0] < 0, -1.0, 1.0).to(a.dtype)  # an end of flips is a fixed point
        torch.testing.assert_close(again / torch.linalg.vector_norm(again), flipped.basis[0])
        above += flipped.objective > fixed.objective * (1 + 1e-9)
    assert above > 0


@pytest.mark.parametrize("find", [fixed_point, greedy_bit_flipping])
def test_greedy_bases_are_nested_and_orthonormal(find: object) -> None:
    a = drawn(50, 8)
    four = find(a, 4).basis  # type: ignore[operator]
    torch.testing.assert_close(four @ four.T, torch.eye(4, dtype=a.dtype))
    torch.testing.assert_close(find(a, 2).basis, four[:2])  # type: ignore[operator]


@pytest.mark.parametrize("find", [fixed_point, greedy_bit_flipping])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_bases_beyond_the_rank_are_completed(find: object, dtype: torch.dtype) -> None:
    for a in (torch.ones(20, 6), torch.zeros(20, 6), drawn(20, 2) @ drawn(2, 6, 1)):
        found = find(a.to(dtype), 4)  # type: ignore[operator]
        torch.testing.assert_close(found.basis @ found.basis.T, torch.eye(4, dtype=dtype), atol=1e-5, rtol=0)
        torch.testing.assert_close(found.approximate(a.to(dtype)), a.to(dtype), atol=1e-4, rtol=0)


def test_l1_pca_resists_an_outlier_row() -> None:
    clean = drawn(300, 1) @ drawn(1, 10, 1) + 0.01 * drawn(300, 10, 2)
    spoilt = clean.clone()
    spoilt[7] = 40 * drawn(1, 10, 3)
    truth = truncated_svd(clean, 1).basis[0]
    apart = {
        name: 1 - abs(float(basis[0] @ truth))
        for name, basis in {
            "svd": truncated_svd(spoilt, 1).basis,
            "flips": greedy_bit_flipping(spoilt, 1).basis,
        }.items()
    }
    assert apart["flips"] < apart["svd"] / 10


# --- robust PCA ---


@pytest.mark.parametrize("share", [0.02, 0.08])
def test_pursuit_recovers_a_planted_low_rank_and_its_gross_errors(share: float) -> None:
    low = drawn(120, 4) @ drawn(4, 80, 1)
    places = torch.rand(120, 80, generator=torch.Generator().manual_seed(2)) < share
    gross = torch.where(places, 20 * drawn(120, 80, 3).sign(), 0.0)
    found = principal_component_pursuit(low + gross)
    assert found.converged
    assert found.rank == 4
    assert float((found.low_rank - low).norm() / low.norm()) < 1e-5
    assert bool(((found.sparse.abs() > 1) == places).all())


def test_pursuit_of_zeros_and_within_its_bound_of_iterations() -> None:
    assert principal_component_pursuit(torch.zeros(5, 4)).converged
    found = principal_component_pursuit(drawn(20, 10), max_iterations=3)
    assert (found.iterations, found.converged) == (3, False)


# --- pruning ---


def test_magnitude_pruning_has_the_least_error_of_all_masks() -> None:
    a = drawn(3, 4)
    best = magnitude_mask(a, 5)
    assert int(best.sum()) == 5
    for p in (0.5, 1.0, 2.0):
        others = (
            float(a.flatten()[torch.tensor(list(gone))].abs().pow(p).sum())
            for gone in itertools.combinations(range(12), 7)
        )
        assert float(a[~best].abs().pow(p).sum()) == pytest.approx(min(others))


def test_random_masks_follow_their_seed_alone() -> None:
    a = torch.zeros(20, 30)
    state = torch.random.get_rng_state()
    one, same, other = (random_mask(a, 200, seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert int(one.sum()) == int(other.sum()) == 200


def perceptron(widths: tuple[int, ...], seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for i, o in itertools.pairwise(widths):
            layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def named(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.ndim > 1]


def test_synflow_is_conserved_through_layers_and_batch_norms() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 4, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 7),
    )
    model[1].weight.data = torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0])
    model[1].running_mean.fill_(0.7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flow = flow_model(model)
    scores = synflow_scores(flow, named(model), (2, 8, 8))
    total = float(flow(torch.ones(1, 2, 8, 8, dtype=torch.float64)).detach().sum())
    assert [float(s.sum()) for s in scores.values()] == pytest.approx([total] * 3)
    assert all(bool((s >= 0).all()) for s in scores.values())
    first = scores["0.weight"]
    incoming, outgoing = first.sum((1, 2, 3)), scores["3.weight"].sum((0, 2, 3))
    torch.testing.assert_close(incoming, outgoing)  # conserved at every channel, too
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("entries", [12, 24, 60])
def test_synflow_keeps_the_network_connected_where_magnitudes_empty_a_layer(entries: int) -> None:
    model = perceptron((20, 30, 6, 40, 5))
    model[2].weight.data *= 1e-3  # magnitudes would cut this layer first
    masks = synflow_masks(model, named(model), (20,), lambda left: True, entries=entries)
    assert sum(int(mask.sum()) for mask in masks.values()) == entries
    assert all(bool(mask.any()) for mask in masks.values())
    flow = flow_model(model)
    with torch.no_grad():
        for name, mask in masks.items():
            dict(flow.named_parameters())[name].mul_(mask)
        assert float(flow(torch.ones(1, 20, dtype=torch.float64)).sum()) > 0
    everything = torch.cat([p.detach().abs().flatten() for p in model.parameters() if p.ndim > 1])
    smallest_kept = float(everything.topk(entries).values[-1])
    assert float(model[2].weight.detach().abs().max()) < smallest_kept


def test_one_round_of_synflow_collapses_where_a_hundred_do_not() -> None:
    model = perceptron((50, 200, 10, 200, 200, 5))
    entries = 40
    once = synflow_masks(model, named(model), (50,), lambda left: True, entries=entries, steps=1)
    slowly = synflow_masks(model, named(model), (50,), lambda left: True, entries=entries)
    assert min(int(mask.sum()) for mask in once.values()) == 0
    assert min(int(mask.sum()) for mask in slowly.values()) > 0


def test_synflow_goes_on_until_the_format_fits() -> None:
    model = perceptron((40, 30, 10))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.ndim > 1}

    def nbytes(left: dict[str, int]) -> int:
        return sum(sparse.csr(*shapes[name], entries) for name, entries in left.items())

    masks = synflow_masks(model, named(model), (40,), lambda left: nbytes(dict(left)) <= 2500, entries=700)
    left = {name: int(mask.sum()) for name, mask in masks.items()}
    assert 2400 < nbytes(left) <= 2500
    with pytest.raises(ValueError, match="not one entry"):
        synflow_masks(model, named(model), (40,), lambda left: False, entries=3)


# --- what is stored ---


@pytest.mark.parametrize(("n", "d", "entries"), [(50, 200, 900), (300, 300, 70_000), (7, 70_000, 5000), (9, 4, 0)])
def test_csr_bytes_are_those_of_scipys_arrays(n: int, d: int, entries: int) -> None:
    scipy_sparse = pytest.importorskip("scipy.sparse")
    mask = random_mask(torch.zeros(n, d), entries)
    held = scipy_sparse.csr_array(torch.where(mask, drawn(n, d).float(), 0.0).numpy())
    held.eliminate_zeros()

    def narrow(indices: np.ndarray, largest: int) -> np.ndarray:
        return indices.astype(np.min_scalar_type(largest))

    columns, pointers = narrow(held.indices, d - 1), narrow(held.indptr, entries)
    assert np.array_equal(columns, held.indices)  # the narrow types lose nothing
    assert np.array_equal(pointers, held.indptr)
    assert held.data.itemsize == 4
    assert sparse.csr(n, d, entries) == held.data.nbytes + columns.nbytes + pointers.nbytes
    bits = np.packbits(mask.numpy())
    assert sparse.bitmap(n, d, entries) == held.data.nbytes + bits.nbytes


@pytest.mark.parametrize("form", ["csr", "bitmap", "values"])
@pytest.mark.parametrize("nbytes", [0, 3, 900, 20_000, 10**7])
def test_the_most_entries_that_fit(form: str, nbytes: int) -> None:
    entries = sparse.entries_that_fit(form, 60, 300, nbytes)
    assert 0 <= entries <= 18_000
    size = sparse.FORMATS[form]
    assert size(60, 300, entries) <= nbytes or entries == 0
    assert entries == 18_000 or size(60, 300, entries + 1) > nbytes


# --- dictionaries ---


def test_a_planted_dictionary_is_used_sparsely_and_better_than_one_flat() -> None:
    pytest.importorskip("sklearn")
    generator = torch.Generator().manual_seed(0)
    atoms = torch.nn.functional.normalize(torch.randn(24, 16, generator=generator), dim=1)
    codes = torch.zeros(600, 24).scatter_(
        1, torch.rand(600, 24, generator=generator).argsort(1)[:, :3], torch.randn(600, 3, generator=generator)
    )
    a = codes @ atoms
    learnt = dictionary.learn(a, 24, 3, passes=20, batch=100)
    used = dictionary.encode(a, learnt, 3)
    assert int((used != 0).sum(1).max()) <= 3
    error = float((a - used @ learnt).square().sum())
    assert error < 0.5 * truncated_svd(a, 3).error
    frame = torch.linalg.qr(torch.randn(16, 16, generator=generator)).Q  # orthonormal atoms: pursuit is exact
    exact = codes[:, :16] @ frame
    torch.testing.assert_close(dictionary.encode(exact, frame, 3) @ frame, exact, atol=1e-5, rtol=1e-4)


def test_dictionary_bytes_and_what_fits() -> None:
    n, d, atoms = 1000, 64, 300
    s = dictionary.nonzeros_that_fit(n, d, atoms, 128_000)
    assert dictionary.dictionary_bytes(n, d, atoms, s) <= 128_000 < dictionary.dictionary_bytes(n, d, atoms, s + 1)
    codes = torch.randn(n, s).half().float()
    indices = np.zeros((n, s), np.min_scalar_type(atoms - 1))
    real = atoms * d * 4 + codes.numel() * 4 + indices.nbytes
    assert dictionary.dictionary_bytes(n, d, atoms, s) == real
    assert dictionary.nonzeros_that_fit(n, d, atoms, 10) == 0


# --- methods by name, as experiments use them ---


@pytest.mark.parametrize("shape", [(60, 24), (24, 60)])
@pytest.mark.parametrize("rate", [0.15, 0.41])
def test_every_method_fits_its_bytes_and_none_has_less_squared_error_than_svd(
    shape: tuple[int, int], rate: float
) -> None:
    from _robust import FAMILIES, L1_PCA, PRUNED, Known, approximations, errors

    a = (drawn(*shape) * drawn(1, shape[1], 1).exp()).float()
    known = Known(row_weights={"zipf": torch.arange(1.0, shape[0] + 1)})
    svd = errors([(a, next(approximations("SVD", a, [rate], known)).matrix)])["frobenius"]
    for name in [*FAMILIES, *L1_PCA, "robust pca", *PRUNED, "SVD + zipf" if shape[0] > shape[1] else "SVD"]:
        (found,) = approximations(name, a, [rate], known)
        assert found.matrix.shape == a.shape
        assert 0 < found.nbytes <= (1 - rate) * 4 * a.numel(), name
        if name not in PRUNED:
            assert errors([(a, found.matrix)])["frobenius"] >= svd * (1 - 1e-6), name


@pytest.mark.parametrize("family", ["ellipsoid", "entrywise", "subspace"])
def test_at_p_2_every_family_is_the_svd(family: str) -> None:
    from _robust import low_rank

    a = drawn(40, 12).float()
    found = truncated_svd(a, 5)
    torch.testing.assert_close(
        next(low_rank(f"{family} 2", a, [5]))[0], found.coordinates @ found.basis, atol=1e-4, rtol=1e-4
    )


def test_errors_are_relative_to_those_of_zeros() -> None:
    from _robust import errors

    a = torch.tensor([[3.0, 4.0], [0.0, 5.0]])
    b = torch.tensor([[0.0, 0.0], [0.0, 5.0]])
    assert errors([(a, b)]) == pytest.approx({"l1": 7 / 12, "l21": 0.5, "frobenius": 0.5**0.5})
    assert errors([(a, b), (a, a)]) == pytest.approx({"l1": 7 / 24, "l21": 0.25, "frobenius": 0.5})


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
ENCODERS = {
    "bert": {**SMALL, "hidden_size": 16},
    "albert": {**SMALL, "hidden_size": 16, "embedding_size": 8},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
}


@pytest.mark.parametrize("kind", ENCODERS)
def test_the_flow_of_an_encoder_is_linear_and_knows_no_shifts(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, vocab_size=40, **ENCODERS[kind]))
    flow = encoder_flow(model)
    assert flow.shape == (model.get_input_embeddings().weight.shape[1],)
    assert bool((flow > 0).all())
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
                module.bias.normal_()
        signs = {name: torch.randn_like(p).sign() for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.mul_(signs[name])
    assert torch.allclose(encoder_flow(model), flow, rtol=1e-9)
    if kind == "bert":
        width = flow.shape[0]
        y = torch.eye(width, dtype=torch.float64) * model.embeddings.LayerNorm.weight.double().abs()

        def through(layer: nn.Module, rows: Tensor) -> Tensor:
            return rows @ layer.weight.double().abs().T if isinstance(layer, nn.Linear) else rows * layer.weight.abs()

        for layer in model.encoder.layer:
            inner = layer.attention
            y = through(inner.output.LayerNorm, y + through(inner.output.dense, through(inner.self.value, y)))
            y = through(layer.output.LayerNorm, y + through(layer.output.dense, through(layer.intermediate.dense, y)))
        assert torch.allclose(y.sum(1), flow, rtol=1e-9)
