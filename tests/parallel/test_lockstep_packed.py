"""Packed documents over W ranks in lockstep against the float64 recurrence: documents that start, end or sit anywhere."""

import itertools

import numpy as np
import pytest
from core_cases import SCANS, STRATEGIES, CoreProblem, check, run_explicit

from kcp.parallel import lockstep


def _boundaries(lengths):
    return (0, *itertools.accumulate(lengths))


def _slices(total, cuts):
    return tuple(int(n) for n in np.diff([0, *cuts, total]))


# document lengths and the cuts between ranks: [20, 20] and [30, 10] at 10, 20, 30 and at 10, 30, 30 tell every rule for dM apart
PACKINGS = [
    ((40,), (10, 20, 30)),
    ((20, 20), (10, 20, 30)),
    ((20, 20), (10, 30, 30)),
    ((30, 10), (10, 20, 30)),
    ((30, 10), (10, 30, 30)),
    ((13, 1, 17, 9), (10, 20, 30)),
    ((10, 10, 20), (10, 20, 30)),
    ((40,), (3, 3, 17)),
    ((5, 0, 35), (5, 20, 20)),
    ((0, 12, 0, 0, 28, 0), (12, 12, 30)),
    ((1,) * 40, (10, 20, 30)),
    ((39, 1), (1, 2, 39)),
    ((7, 33), (7, 7, 7)),
    ((10, 10, 10, 10), (10, 20, 30)),
    ((37, 3), (0, 0, 40)),
    ((20, 20), (10, 40, 40)),
    ((20, 20), (0, 0, 30)),
]


def _run(problem):
    check(problem, lockstep.run(len(problem.lengths), lambda group: run_explicit(problem, group), problem.lengths))


@pytest.mark.parametrize("strategy", SCANS)
@pytest.mark.parametrize(("documents", "cuts"), PACKINGS, ids=lambda x: "-".join(map(str, x[:8])))
def test_every_packing(strategy, documents, cuts):
    total = sum(documents)
    _run(CoreProblem(lengths=_slices(total, cuts), strategy=strategy, batch=1, cu_seqlens=_boundaries(documents)))


@pytest.mark.parametrize(
    "options",
    [{"keep_transitions": False}, {"disable_recompute": False, "state_v_first": True}, {"reduce_replicated_grads": "kcp"}],
    ids=["transitions-exchanged", "recompute-v-first", "kcp-reduces"],
)
@pytest.mark.parametrize(("documents", "cuts"), [PACKINGS[2], PACKINGS[3], PACKINGS[8], PACKINGS[9]])
@pytest.mark.parametrize("strategy", SCANS)
def test_options(strategy, documents, cuts, options):
    problem = CoreProblem(
        lengths=_slices(sum(documents), cuts), strategy=strategy, batch=1, cu_seqlens=_boundaries(documents), options=options
    )
    _run(problem)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_row_has_its_own_documents(strategy):
    rows = (_boundaries((40,)), _boundaries((7, 0, 25, 8)), _boundaries((10, 30)))
    _run(CoreProblem(lengths=(10, 12, 0, 18), strategy=strategy, num_heads=4, num_v_heads=4, batch=3, cu_seqlens=rows))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("initial", "final"), [(False, True), (True, False), (False, False)])
def test_states_given_or_not(strategy, initial, final):
    problem = CoreProblem(
        lengths=(9, 1, 22, 8), strategy=strategy, num_heads=4, num_v_heads=4, batch=1, cu_seqlens=_boundaries((5, 30, 5)),
        with_initial_state=initial, with_final_state=final,
    )  # fmt: skip
    _run(problem)


@pytest.mark.parametrize("strategy", ["ptp_chain", "ptp_tree"])
def test_rounds_where_there_is_no_point_to_point(strategy):
    """Among the slices: one that a document ends in and another one leaves, and one without tokens."""
    rows = (_boundaries((40,)), _boundaries((7, 0, 25, 8)), _boundaries((10, 30)), _boundaries((13, 27)))
    problem = CoreProblem(lengths=(10, 12, 0, 18), strategy=strategy, batch=4, cu_seqlens=rows)
    check(problem, lockstep.run(4, lambda group: run_explicit(problem, group), problem.lengths, point_to_point=False))


@pytest.mark.parametrize("strategy", SCANS)
def test_a_document_says_nothing_about_the_others(strategy):
    """Perturbing document 0 leaves the others bitwise equal: no leak through a boundary, with slow decay and slices anywhere."""
    problem = CoreProblem(lengths=(40, 44, 44), strategy=strategy, batch=1, cu_seqlens=_boundaries((37, 51, 40)))

    class Perturbed(CoreProblem):
        def arrays(self):
            x = super().arrays()
            for name in ("q", "k", "v", "g", "beta", "d_out"):
                x[name][:, :37] *= 1.5
            return x

    other = Perturbed(lengths=problem.lengths, strategy=strategy, batch=1, cu_seqlens=problem.cu_seqlens)
    a, b = (lockstep.run(3, lambda group, p=p: run_explicit(p, group), p.lengths) for p in (problem, other))
    for name in ("out", "q", "k", "v", "g", "beta"):
        one, two = (np.concatenate([r[name] for r in ranks], 1)[:, 37:] for ranks in (a, b))
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(a[0]["final_state"][1:], b[0]["final_state"][1:])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "rows", [(_boundaries((5, 0, 30, 5)),), (_boundaries((40,)), _boundaries((7, 25, 8)))], ids=["one row", "two rows"]
)
def test_boundaries_that_are_not_known_before_the_run(strategy, rows):
    cu = rows if len(rows) > 1 else rows[0]
    problem = CoreProblem(
        lengths=(9, 1, 22, 8), strategy=strategy, num_heads=4, num_v_heads=4, batch=len(rows), cu_seqlens=cu,
        with_initial_state=False, with_final_state=False,
    )  # fmt: skip
    check(problem, lockstep.run(4, lambda group: run_explicit(problem, group, as_tensor=True), problem.lengths))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "rows", [(_boundaries((5, 0, 30, 5)),), (_boundaries((12, 16, 12, 0)), _boundaries((0, 8, 2, 30)))], ids=["one row", "two rows"]
)
def test_states_where_boundaries_are_not_known_before_the_run(strategy, rows):
    """As in a graph: messages go by rounds."""
    cu = rows if len(rows) > 1 else rows[0]
    problem = CoreProblem(lengths=(9, 1, 22, 8), strategy=strategy, num_heads=4, num_v_heads=4, batch=len(rows), cu_seqlens=cu)
    check(problem, lockstep.run(4, lambda group: run_explicit(problem, group, as_tensor=True), problem.lengths, point_to_point=False))


@pytest.mark.parametrize("as_tensor", [False, True], ids=["host", "tensor"])
@pytest.mark.parametrize("strategy", ["state_scan", "ptp_tree", "hybrid"])
def test_transitions_exchanged_where_a_document_passes_through_some_rows_alone(strategy, as_tensor):
    """Slices 10 to 20 and 20 to 30 lie inside the first row's document; others begin, end or change there."""
    rows = ((0, 40, 40), (0, 15, 40), (0, 30, 40))
    problem = CoreProblem(lengths=(10,) * 4, strategy=strategy, batch=3, cu_seqlens=rows, options={"keep_transitions": False})
    check(problem, lockstep.run(4, lambda group: run_explicit(problem, group, as_tensor), problem.lengths, not as_tensor))
