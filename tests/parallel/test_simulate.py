"""Simulations at small sizes: errors of the size of rounding where the code is right, and large ones where it is not."""

import numpy as np
import pytest
from mindspore import ops

from kcp.parallel import simulate, summary
from kcp.parallel.halo import Halo
from kcp.parallel.simulate import core_errors, random_summaries, relative, slice_lengths, summary_errors
from kcp.parallel.simulate_layer import GATES, LayerSimulation, random_documents


def test_summaries_stay_within_rounding():
    rows = summary_errors(37, heads=1, width=8)
    assert [row[0] for row in rows] == [2, 4, 8, 16, 32, 37]
    assert all(0 < error < 2e-6 for row in rows for error in row[1:])


def test_summaries_that_are_composed_in_the_wrong_order_are_seen(monkeypatch):
    right = summary.compose
    monkeypatch.setattr(summary, "compose", lambda later, earlier: right(earlier, later))
    *_, tree = summary_errors(8, heads=1, width=8)[-1]
    assert tree > 0.1


@pytest.mark.parametrize(("width", "decay"), [(1, 0.0), (1, 32.0), (4, 8.0)])
def test_random_summaries_are_products_of_the_tokens_they_are_said_to_be(width, decay):
    """log |det M| of 16 tokens: the mean of log |1 - beta| over beta in [0, 2] is -1, that of each channel's decays is -decay / 2."""
    m = random_summaries(1024, 4, width, decay, 0)[..., width:]
    assert m.shape == (1024, 1, 4, width, width)
    assert np.linalg.slogdet(m)[1].mean() == pytest.approx(-16 - width * decay / 2, abs=0.4)
    assert np.linalg.norm(m, 2, (-2, -1)).max() <= 1 + 1e-6


def test_random_summaries_write_values_of_size_one():
    """K = 1 without decay: each token leaves (1 - beta)^2 of E^2, a third in the mean, and adds beta^2, four thirds."""
    summaries = random_summaries(1024, 4, 1, 0.0, 0)
    assert (summaries[..., :1] ** 2).mean() == pytest.approx(2, rel=0.1)
    assert np.array_equal(summaries, summaries.astype(np.float32))
    assert not np.array_equal(summaries, random_summaries(1024, 4, 1, 0.0, 1))


@pytest.mark.parametrize("decay", [0.01, 5.0])
def test_decays_of_simulated_tokens_fill_their_range(decay):
    """The gate is -5 sigmoid(exp(a_log) g + dt_bias): of the core's inputs, and of the layer's bias with nothing added to it."""
    core = simulate._inputs(64, 4, 8, decay, 1, 0)
    layer = LayerSimulation(2, 4, heads=64, width=8, decay=decay)
    bias = next(value for name, value in layer.weights.items() if name.endswith("dt_bias"))
    assert not core["dt_bias"].any()
    for gate in (core["gate"], bias):
        decays = 5.0 / (1.0 + np.exp(-gate.astype(np.float64)))
        assert 0 < decays.min() < 0.05 * decay and 0.95 * decay < decays.max() < decay
        assert decays.mean() == pytest.approx(decay / 2, rel=0.1)


def test_weights_of_a_simulated_layer_keep_what_they_project():
    weights = LayerSimulation(2, 4, heads=16, width=8).weights
    for name, value in weights.items():
        if name.endswith("proj.weight"):
            assert (value**2).sum(1).mean() == pytest.approx(1, rel=0.3), name
        elif name == "o_norm.weight":
            assert value.mean() == pytest.approx(1, abs=0.2) and 0 < value.std() < 0.3
        else:
            assert value.any(), name


def test_distances_by_hand():
    one, two = np.array([3.0, 4.0]), np.array([3.0, 4.5])
    assert relative(two, one) == pytest.approx(0.1)
    assert relative(two / 100, one / 100) == pytest.approx(0.1)
    assert relative(one, 0 * one) == 5.0
    assert relative(0 * one, 0 * one) == 0.0


@pytest.mark.parametrize(
    ("strategy", "ranks", "tokens", "documents"),
    [("state_scan", 5, 43, (20, 0, 1, 22)), ("ptp_chain", 3, 40, None), ("ulysses", 2, 21, (21,)), ("auto", 1, 9, None)],
)
def test_core_and_halo(strategy, ranks, tokens, documents):
    errors = core_errors(strategy, ranks, tokens, heads=2, width=8, documents=documents)
    assert errors["halo"] == 0
    assert max(errors.values()) < 1e-5
    names = {"out", "final_state", "query", "key", "value", "gate", "beta", "dt_bias", "initial_state", "halo", "halo_grad"}
    assert set(errors) == names


def test_a_transition_that_is_not_transposed_is_seen(monkeypatch):
    monkeypatch.setattr(summary, "apply", lambda s, x: ops.matmul(ops.swapaxes(summary.split(s)[1], -1, -2), x) + summary.split(s)[0])
    assert core_errors("state_scan", 4, 64, heads=1, width=8)["out"] > 1e-2


def test_a_whole_layer_keeps_its_gates():
    simulation = LayerSimulation(3, 14, heads=2, width=4, documents=(1, 0, 6, 7))
    errors = simulation.errors("ptp_chain")
    assert GATES == {"output": 1e-5, **dict.fromkeys(("input", "projections", "convolution", "decay", "norm"), 5e-5)}
    assert set(errors) == set(GATES)
    assert all(errors[name] <= gate for name, gate in GATES.items())
    assert len(simulation.expected) == 2 + len(simulation.weights) == 2 + 19


def test_a_layer_under_the_hybrid_exchanges_heads_among_about_the_square_root_of_the_ranks():
    for ranks, heads, degree in ((16, 4, 4), (16, 6, 2), (8, 8, 2), (6, 4, 2), (4, 3, 1), (9, 3, 3), (2, 2, 1)):
        assert LayerSimulation(ranks, ranks, heads=heads, width=4)._hybrid_degree() == degree
    errors = LayerSimulation(4, 11, heads=2, width=4, documents=(5, 6)).errors("hybrid")
    assert all(errors[name] <= gate for name, gate in GATES.items())


def test_what_a_layer_loses_between_ranks_is_seen(monkeypatch):
    """A halo's gradient that is dropped reaches the input and the projections before the convolution, and nothing else."""
    monkeypatch.setattr(Halo, "backward", lambda self, x, d_halo: ops.zeros_like(x))
    errors = LayerSimulation(3, 14, heads=2, width=4).errors("state_scan")
    assert {name for name, gate in GATES.items() if errors[name] > gate} == {"input", "projections"}
    assert errors["input"] > 1e-2 and errors["projections"] > 1e-2


def test_what_is_not_a_number_is_not_within_a_gate(monkeypatch):
    right = Halo.forward
    monkeypatch.setattr(Halo, "forward", lambda self, x: right(self, x) * float("nan"))
    errors = LayerSimulation(2, 8, heads=2, width=4).errors("state_scan")
    assert not any(errors[name] <= gate for name, gate in GATES.items())


@pytest.mark.parametrize(("tokens", "ranks"), [(2, 2), (26, 4), (100, 3), (1024, 64)])
def test_random_documents_end_with_a_slice_and_within(tokens, ranks):
    documents = random_documents(tokens, ranks, seed=3)
    assert sum(documents) == tokens and min(documents) == documents[0] == 1
    assert len(documents) <= ranks // 2 + 3
    ends, borders = np.cumsum(documents)[:-1].tolist(), np.cumsum(slice_lengths(tokens, ranks))[:-1].tolist()
    assert ranks == 2 or set(borders) & set(ends)
    assert ranks < 64 or len(set(ends) - set(borders)) > ranks // 4


def test_sizes_are_checked():
    assert slice_lengths(7, 3) == (3, 2, 2)
    assert slice_lengths(9, 3) == (3, 3, 3) and slice_lengths(2, 3) == (1, 1, 0)
    for ranks in (1, 1025):
        with pytest.raises(ValueError, match=f"ranks is {ranks}; allowed: 2 to 1024"):
            summary_errors(ranks)
    for ranks in (0, 65):
        with pytest.raises(ValueError, match=f"ranks is {ranks}; allowed: 1 to 64"):
            core_errors("state_scan", ranks, 130)
    for ranks in (2, 64):  # as many as are allowed
        with pytest.raises(ValueError, match="have 5 tokens; allowed: tokens = 6"):
            core_errors("state_scan", ranks, 6, documents=(2, 3))
    with pytest.raises(ValueError, match="num_heads is 1; allowed under ulysses"):
        core_errors("ulysses", 2, 6, heads=1)
    ranks = "allowed: 2 to 64"
    for sizes, line in (
        ((65, 130), f"ranks is 65; {ranks}"),
        ((1, 8), f"ranks is 1; {ranks}"),
        ((64, 63), "tokens is 63;"),
        ((4, 3), "tokens is 3; allowed: at least 1 a rank, 4"),
    ):
        with pytest.raises(ValueError, match=line):
            LayerSimulation(*sizes)
    for decay in (0, 5.1):
        with pytest.raises(ValueError, match=f"decay is {decay}; allowed: above 0, at most 5"):
            LayerSimulation(2, 8, decay=decay)
    with pytest.raises(ValueError, match="have 5 tokens; allowed: tokens = 6"):
        LayerSimulation(2, 6, documents=(2, 3))
