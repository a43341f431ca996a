"""Counted bytes equal the formulas of docs/context-parallelism.md, whatever the number of tokens."""

import mindspore as ms
import numpy as np
import pytest
from core_cases import CoreProblem, run_explicit
from mindspore import Tensor, ops

from kcp.parallel import Halo, Traffic, lockstep
from kcp.parallel.gather import GatherSequence

B, HK, HV, K, V = 2, 4, 4, 12, 10
STATES = B * HV * K * V * 4
SUMMARIES = B * HV * K * (K + V) * 4


def _counts(strategy, ranks, tokens=18, point_to_point=True, **options):
    problem = CoreProblem(
        lengths=(tokens,) * ranks, strategy=strategy, batch=B, num_heads=HK, num_v_heads=HV, head_dim=K, v_head_dim=V, options=options
    )

    def body(group):
        run_explicit(problem, group)
        return group.traffic

    return lockstep.run(ranks, body, problem.lengths, point_to_point)


@pytest.mark.parametrize("tokens", [6, 24])
@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_state_scan(ranks, tokens):
    for traffic in _counts("state_scan", ranks, tokens):
        assert traffic.logical("state") == (ranks - 1) * SUMMARIES + (ranks - 1) * STATES
        assert traffic.logical("final_state") == 2 * STATES
        assert traffic.logical("dh0") == STATES
        assert traffic.logical("heads") == traffic.logical("parameter") == traffic.logical("halo") == 0
        assert traffic.read()["state"].exchanges == 2
        assert traffic.physical() == traffic.logical()


def test_state_scan_without_kept_transitions_exchanges_summaries_both_ways():
    for traffic in _counts("state_scan", 3, keep_transitions=False):
        assert traffic.logical("state") == 2 * 2 * SUMMARIES


def test_parameters_are_counted_where_kcp_sums_them():
    for traffic in _counts("state_scan", 2, reduce_replicated_grads="kcp"):
        assert traffic.logical("parameter") == (HV + HV * K) * 4


@pytest.mark.parametrize("tokens", [6, 24])
@pytest.mark.parametrize("ranks", [3, 8])
def test_chain_passes_one_state_a_hop(ranks, tokens):
    for rank, traffic in enumerate(_counts("ptp_chain", ranks, tokens)):
        received = (rank > 0) + (rank < ranks - 1)  # a state from before, a gradient from after
        assert traffic.logical("state") == received * STATES


def test_rounds_move_more_than_their_payload():
    ranks, groups = 3, 2
    for rank, traffic in enumerate(_counts("ptp_chain", ranks, point_to_point=False, ptp_head_groups=groups)):
        assert traffic.logical("state") == ((rank > 0) + (rank < ranks - 1)) * STATES
        assert traffic.physical("state") == 2 * (groups * B + ranks - 2) * (ranks - 1) * STATES // (groups * B)


@pytest.mark.parametrize("tokens", [6, 24])
@pytest.mark.parametrize("ranks", [5, 16])
def test_tree_doubles_its_distance(ranks, tokens):
    """At distance d the rank receives a state if the source reaches back to the end, a summary otherwise."""
    for rank, traffic in enumerate(_counts("ptp_tree", ranks, tokens)):
        expected = 0
        for position in (rank, ranks - 1 - rank):
            sources = [(position - d, d) for d in (1, 2, 4, 8) if position - d >= 0]
            expected += sum(STATES if source < d else SUMMARIES for source, d in sources)
        assert traffic.logical("state") == expected


@pytest.mark.parametrize("tokens", [6, 24])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ulysses_grows_with_the_slice(ranks, tokens):
    moved = B * tokens * (ranks - 1) * 4 // ranks
    inputs, outputs = moved * (2 * HK * K + HV * (V + K + 1)), moved * HV * V
    for traffic in _counts("ulysses", ranks, tokens):
        assert traffic.logical("heads") == 2 * (inputs + outputs)
        assert traffic.logical("state") == 0
        assert traffic.logical("final_state") == (ranks - 1) * STATES // ranks + STATES
        assert traffic.logical("dh0") == (ranks - 1) * STATES // ranks


@pytest.mark.parametrize("tokens", [6, 24])
@pytest.mark.parametrize(("ranks", "degree"), [(4, 2), (8, 4), (8, 2)])
def test_hybrid_exchanges_heads_inside_and_states_of_its_heads_across(ranks, degree, tokens):
    moved = B * tokens * (degree - 1) * 4 // degree
    for traffic in _counts("hybrid", ranks, tokens, hybrid_ulysses_degree=degree):
        assert traffic.logical("heads") == 2 * moved * (2 * HK * K + HV * (V + K + 1) + HV * V)
        assert traffic.logical("state") == (ranks // degree - 1) * (SUMMARIES + STATES) // degree


@pytest.mark.parametrize("tokens", [1, 4, 24])
def test_halo_moves_every_tail(tokens):
    """(W - 1) B (kernel - 1) (2 Hk K + Hv V) 4 each way, for q, k and v together, whatever the slice holds."""
    halo, ranks, width = 3, 3, 2 * HK * K + HV * V

    def body(group):
        cell, x = Halo(group, halo), Tensor(np.ones((B, tokens, width), np.float32))
        out = cell.construct(x)
        forward = group.traffic.logical("halo")
        cell.bprop(x, out, out)
        return forward, group.traffic.logical("halo")

    one_way = (ranks - 1) * B * halo * width * 4
    assert lockstep.run(ranks, body) == [(one_way, 2 * one_way)] * ranks


@pytest.mark.parametrize("strategy", ["state_scan", "ptp_chain", "ptp_tree", "hybrid"])
def test_packed_documents_change_states_alone(strategy):
    """Summaries are a row's, whatever the documents in it; final and initial states are a document's."""
    rows = (0, 7, 7, 30, 36)
    for cu, count in ((None, 1), (rows, len(rows) - 1)):
        problem = CoreProblem(
            lengths=(12, 12, 12), strategy=strategy, batch=1, num_heads=HK, num_v_heads=HV, head_dim=K, v_head_dim=V, cu_seqlens=cu,
        )  # fmt: skip

        def body(group, problem=problem):
            run_explicit(problem, group)
            return group.traffic

        counted = lockstep.run(3, body, problem.lengths)
        states = count * HV * K * V * 4
        assert {t.logical("final_state") for t in counted} == {2 * states}
        assert {t.logical("dh0") for t in counted} == {states}
        moved = [t.logical("state") for t in counted]
        if cu is None:
            dense = moved
    assert moved == dense  # no document ends at a border, where the chain would have nothing to send


def test_a_gathered_sequence_counts_tokens():
    def body(group):
        cell, x = GatherSequence(group), Tensor(np.full((B, 4, 5), float(group.rank), np.float32))
        out = cell.construct(x)
        forward = group.traffic.logical("tokens")
        grad = cell.bprop(x, out, out)[0].asnumpy()
        return forward, group.traffic.logical("tokens"), float(grad.mean())

    payload = B * 4 * 5 * 4
    assert lockstep.run(3, body, (4, 4, 4)) == [(2 * payload, 5 * payload, 3.0 * r) for r in range(3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_exchange_by_hand(dtype):
    """24 numbers of a payload among three ranks; messages and rounds are float32."""
    payload = 24 * (4 if dtype == "float32" else 2)

    def body(group):
        c, x = group.collectives, ops.ones((4, 6), getattr(ms, dtype))
        c.all_gather(x, "tokens")
        c.all_reduce(x, "parameter")
        c.all_to_all(ops.ones((4, 3, 6), x.dtype), "heads", 1)
        c.round(ops.ones((4, 6), ms.float32), 1, "state")
        if group.rank == 0:
            c.send(ops.ones((4, 6), ms.float32), 2, "halo")
        if group.rank == 2:
            c.recv((4, 6), 0, "halo")
        return {name: (r.exchanges, r.logical, r.physical) for name, r in group.traffic.read().items() if r.exchanges}

    for rank, counted in enumerate(lockstep.run(3, body)):
        expected = {"tokens": (1, 2 * payload, 2 * payload), "parameter": (1, payload, payload), "heads": (1, 2 * payload, 2 * payload)}
        expected["state"] = (1, 0 if rank == 1 else 96, 2 * 96)
        if rank != 1:
            expected["halo"] = (1, 0, 0) if rank == 0 else (1, 96, 96)
        assert counted == expected


def test_reset_and_unknown_purposes():
    traffic = Traffic()
    traffic.add("halo", 3, 6)
    copy = traffic.read()
    traffic.reset()
    assert (copy["halo"].logical, copy["halo"].physical, traffic.logical(), traffic.physical()) == (3, 6, 0, 0)
    traffic.add("state", 5, 7)
    traffic.add("halo", 1, 1)
    assert (traffic.logical(), traffic.physical(), traffic.physical("halo")) == (6, 8, 1)
    with pytest.raises(ValueError, match="purpose is 'rows'; allowed: state, heads"):
        traffic.add("rows", 1, 1)
