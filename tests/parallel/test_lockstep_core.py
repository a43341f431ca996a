"""KdaCore over W ranks in lockstep against the float64 recurrence: every strategy, unequal slices, states in and out."""

import pytest
from core_cases import CoreProblem, check, run_explicit

from kcp.parallel import lockstep


def _run(problem: CoreProblem):
    check(problem, lockstep.run(len(problem.lengths), lambda group: run_explicit(problem, group), problem.lengths))


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("strategy", ["ulysses", "state_scan"])
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
@pytest.mark.parametrize("strategy", ["ulysses", "state_scan"])
def test_options(strategy, options):
    _run(CoreProblem(lengths=(7, 20, 13), strategy=strategy, num_heads=3, num_v_heads=3, options=options))


@pytest.mark.parametrize("strategy", ["ulysses", "state_scan"])
@pytest.mark.parametrize(("initial", "final"), [(False, True), (True, False), (False, False)])
def test_states_given_or_not(strategy, initial, final):
    _run(
        CoreProblem(
            lengths=(9, 1, 22, 8), strategy=strategy, num_heads=4, num_v_heads=4, with_initial_state=initial, with_final_state=final
        )
    )


@pytest.mark.parametrize("strategy", ["ulysses", "state_scan"])
def test_fast_decay_and_long_first_slice(strategy):
    _run(CoreProblem(lengths=(65, 3), strategy=strategy, slow=False, options={"chunk_size": 64}))


def test_ulysses_carries_packed_documents():
    _run(CoreProblem(lengths=(15, 14, 11), strategy="ulysses", num_heads=3, num_v_heads=6, batch=1, cu_seqlens=(0, 13, 13, 14, 40)))


def test_more_ranks_than_a_transposed_transition_survives():
    """dM = M^T, applied over several ranks: with slow decay and W = 8 a wrong one is off by far more than the gate."""
    _run(CoreProblem(lengths=(5,) * 8, strategy="state_scan", batch=1, num_heads=1, num_v_heads=1, seed=3))
