"""The same results whatever the number of ranks, and the same bits from run to run, in lockstep."""

import itertools

import numpy as np
import pytest
from core_cases import STRATEGIES, TOKEN_INPUTS, CoreProblem, relative, run_autodiff, run_explicit

from kcp.parallel import CpGroup, lockstep

DEGREES = (1, 2, 4, 8, 16, 64)
TOKENS = 1280


def _problem(strategy: str, ranks: int, **fields) -> CoreProblem:
    sizes = {"batch": 1, "num_heads": 4, "num_v_heads": 4, "head_dim": 16, "v_head_dim": 16, "decay": 0.01, **fields}
    return CoreProblem(lengths=(TOKENS // ranks,) * ranks, strategy=strategy, seed=9, options={"chunk_size": 64}, **sizes)


def _run(problem: CoreProblem) -> dict[str, np.ndarray]:
    """Tokens put together, states of the last rank."""
    if len(problem.lengths) == 1:
        return run_autodiff(problem.one_device(), CpGroup.single(), jit=False, host_boundaries=True)
    ranks = lockstep.run(len(problem.lengths), lambda group: run_explicit(problem, group), problem.lengths)
    tokens = {name: np.concatenate([r[name] for r in ranks], 1) for name in ("out", *TOKEN_INPUTS)}
    return {**ranks[-1], **tokens}


@pytest.mark.ci
@pytest.mark.parametrize("decay", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("cu_seqlens", [None, (0, 300, 301, 1280)], ids=["dense", "packed"])
def test_tokens_and_states_of_the_state_scan_do_not_depend_on_the_degree(cu_seqlens, decay, record_property):
    """Within 1e-6 of each other, every pair of degrees.

    Under the slowest decay the raw gate's gradient, a sum that cancels, is further than that from the truth on one device already:
    there degrees may differ by that much and half of it.
    """
    problems = [_problem("state_scan", ranks, cu_seqlens=cu_seqlens, decay=decay) for ranks in DEGREES]
    results = [_run(problem) for problem in problems]
    rounding = relative(results[0]["g"], problems[0].truth()["g"])
    worst = {}
    for name in ("out", "final_state", "initial_state", *TOKEN_INPUTS):
        worst[name] = max(relative(a[name], b[name]) for a, b in itertools.permutations(results, 2))
        gate = max(1e-6, 1.5 * rounding) if name == "g" and decay == 0.01 else 1e-6
        assert worst[name] <= gate, (name, worst[name])
    record_property("worst", worst)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_runs_give_the_same_bits(strategy):
    problem = _problem(strategy, 4, cu_seqlens=(0, 300, 301, 1280))
    first, second = _run(problem), _run(problem)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
