"""Simulations at small sizes: errors of the size of rounding where the code is right, and large ones where it is not."""

import pytest
from mindspore import ops

from kcp.parallel import summary
from kcp.parallel.simulate import core_errors, slice_lengths, summary_errors


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


def test_sizes_are_checked():
    assert slice_lengths(7, 3) == (3, 2, 2)
    with pytest.raises(ValueError, match="ranks is 2000; allowed: 2 to 1024"):
        summary_errors(2000)
    with pytest.raises(ValueError, match="have 5 tokens; allowed: tokens = 6"):
        core_errors("state_scan", 2, 6, documents=(2, 3))
    with pytest.raises(ValueError, match="num_heads is 1; allowed under ulysses"):
        core_errors("ulysses", 2, 6, heads=1)
