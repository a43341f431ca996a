"""Simulations at small sizes: errors of the size of rounding where the code is right, and large ones where it is not."""

import pytest
from mindspore import ops

from kcp.parallel import summary
from kcp.parallel.halo import Halo
from kcp.parallel.simulate import core_errors, slice_lengths, summary_errors
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
    assert set(errors) == set(GATES)
    assert all(errors[name] <= gate for name, gate in GATES.items())
    assert len(simulation.expected) == 2 + len(simulation.weights) == 2 + 19


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


def test_random_documents_end_with_a_slice_and_within():
    for tokens, ranks in ((2, 2), (26, 4), (1024, 64)):
        documents = random_documents(tokens, ranks, seed=3)
        assert sum(documents) == tokens and min(documents) == documents[0] == 1


def test_sizes_are_checked():
    assert slice_lengths(7, 3) == (3, 2, 2)
    with pytest.raises(ValueError, match="ranks is 2000; allowed: 2 to 1024"):
        summary_errors(2000)
    with pytest.raises(ValueError, match="have 5 tokens; allowed: tokens = 6"):
        core_errors("state_scan", 2, 6, documents=(2, 3))
    with pytest.raises(ValueError, match="num_heads is 1; allowed under ulysses"):
        core_errors("ulysses", 2, 6, heads=1)
    for sizes, line in (((65, 130), "ranks is 65; allowed: 2 to 64"), ((4, 3), "tokens is 3; allowed: at least 1 a rank, 4")):
        with pytest.raises(ValueError, match=line):
            LayerSimulation(*sizes)
    with pytest.raises(ValueError, match="decay is 0; allowed: above 0"):
        LayerSimulation(2, 8, decay=0)
    with pytest.raises(ValueError, match="have 5 tokens; allowed: tokens = 6"):
        LayerSimulation(2, 6, documents=(2, 3))
