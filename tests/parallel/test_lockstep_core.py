"""KdaCore over W ranks in lockstep against the float64 recurrence: every strategy, unequal slices, states in and out."""

import pytest
from core_cases import INPUTS, SCANS, STRATEGIES, CoreProblem, check, run_explicit
from mindspore import ops

from kcp.layers import KdaCore
from kcp.ops.options import describe
from kcp.parallel import lockstep


def _run(problem: CoreProblem, point_to_point: bool = True):
    ranks = lockstep.run(len(problem.lengths), lambda group: run_explicit(problem, group), problem.lengths, point_to_point)
    check(problem, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slow_decay_and_states_in_the_loss(strategy, ranks):
    heads = ranks if strategy == "ulysses" else 2
    _run(CoreProblem(lengths=(18,) * ranks, strategy=strategy, num_heads=heads, num_v_heads=2 * heads, seed=ranks))


@pytest.mark.parametrize(
    "options",
    [
        {"disable_recompute": False, "state_v_first": True},
        {"keep_transitions": False},
        {"reduce_replicated_grads": "kcp"},
        {"safe_gate": False},
    ],
    ids=["recompute-v-first", "transitions-exchanged", "kcp-reduces", "softplus"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options(strategy, options):
    _run(CoreProblem(lengths=(7, 20, 13), strategy=strategy, num_heads=3, num_v_heads=3, options=options))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("initial", "final"), [(False, True), (True, False), (False, False)])
def test_states_given_or_not(strategy, initial, final):
    _run(
        CoreProblem(
            lengths=(9, 1, 22, 8), strategy=strategy, num_heads=4, num_v_heads=4, with_initial_state=initial, with_final_state=final
        )
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("without", [("a_log",), ("dt_bias",), ("a_log", "dt_bias")], ids="-".join)
def test_gates_without_parameters(strategy, without):
    """One of the ranks has no tokens."""
    options = {"reduce_replicated_grads": "kcp"}
    _run(CoreProblem(lengths=(7, 0, 13), strategy=strategy, num_heads=3, num_v_heads=6, without=without, options=options))


@pytest.mark.parametrize("point_to_point", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_final_states_alone_in_the_loss(strategy, point_to_point):
    """No gradient of the output exists on any rank."""
    problem = CoreProblem(lengths=(7, 0, 20, 13), strategy=strategy, num_heads=4, num_v_heads=4, with_out_gradient=False)
    _run(problem, point_to_point)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fast_decay_and_long_first_slice(strategy):
    _run(CoreProblem(lengths=(65, 3), strategy=strategy, slow=False, options={"chunk_size": 64}))


def test_ulysses_carries_packed_documents():
    _run(CoreProblem(lengths=(15, 14, 11), strategy="ulysses", num_heads=3, num_v_heads=6, batch=1, cu_seqlens=(0, 13, 13, 14, 40)))


@pytest.mark.parametrize("strategy", SCANS)
def test_more_ranks_than_a_transposed_transition_survives(strategy):
    """dM = M^T, applied over several ranks: with slow decay and W = 8 a wrong one is off by far more than the gate."""
    _run(CoreProblem(lengths=(5,) * 8, strategy=strategy, batch=1, num_heads=1, num_v_heads=1, seed=3))


@pytest.mark.parametrize("lengths", [(9, 1, 22, 8), (6, 0, 0, 5, 0)], ids=str)
@pytest.mark.parametrize("strategy", ["ptp_chain", "ptp_tree"])
def test_rounds_where_there_is_no_point_to_point(strategy, lengths):
    """The schedules of graphs: every message is a round of all ranks."""
    _run(CoreProblem(lengths=lengths, strategy=strategy), point_to_point=False)


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_chain_in_any_number_of_head_groups(groups):
    options = {"ptp_head_groups": groups}
    _run(CoreProblem(lengths=(7, 20, 13), strategy="ptp_chain", num_heads=6, num_v_heads=12, options=options))


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("reduced_by", ["trainer", "kcp"])
def test_hybrid_of_every_degree(degree, reduced_by):
    options = {"hybrid_ulysses_degree": degree, "reduce_replicated_grads": reduced_by}
    _run(CoreProblem(lengths=(9, 1, 22, 8), strategy="hybrid", num_heads=4, num_v_heads=4, options=options))


@pytest.mark.parametrize(("ranks", "degree"), [(4, 2), (8, 2), (8, 4)])
def test_hybrid_blocks_and_scan(ranks, degree):
    _run(CoreProblem(lengths=(5,) * ranks, strategy="hybrid", num_heads=4, num_v_heads=8, options={"hybrid_ulysses_degree": degree}))


class Counted:
    """A backend that notes which summaries it is asked for."""

    def __init__(self, backend):
        self.backend, self.asked = backend, []

    def __getattr__(self, name):
        if name in ("forward_summary", "forward_end", "backward_summary", "backward_end"):
            self.asked.append(name)
        return getattr(self.backend, name)


@pytest.mark.parametrize(
    ("cu_seqlens", "options", "asked"),
    [
        (None, {}, [["forward_end"], ["forward_summary", "backward_end"], [], ["backward_end"]]),
        (None, {"keep_transitions": False}, [["forward_end"], ["forward_summary", "backward_summary"], [], ["backward_end"]]),
        ((0, 15, 30), {"keep_transitions": False}, [["forward_end"], ["forward_end", "backward_end"], [], ["backward_end"]]),
    ],
    ids=["dense", "transitions-exchanged", "packed"],
)
@pytest.mark.parametrize("strategy", ["state_scan", "ptp_tree"])
def test_no_summary_is_made_that_nobody_needs(strategy, cu_seqlens, options, asked):
    """A known state is followed without its transition; the last rank sends none on, the first none back, one without tokens none."""
    problem = CoreProblem(lengths=(10, 10, 0, 10), strategy=strategy, batch=1, cu_seqlens=cu_seqlens, options=options)

    def body(group):
        tensors = problem.rank_tensors(group.rank)
        inputs = [tensors[name] for name in INPUTS]
        cell = KdaCore(problem.config(), group).strategy_cell(tuple(map(describe, inputs)), cu_seqlens, None, True)
        cell.strategy.backend = Counted(cell.strategy.backend)
        results = cell.construct(*inputs, ops.zeros((1,)))
        cell.bprop(*inputs, ops.zeros((1,)), results, (tensors["d_out"], tensors["d_final"]))
        return cell.strategy.backend.asked

    assert lockstep.run(4, body, problem.lengths) == asked
