"""NaN and infinity in inputs come out again, where they belong and nowhere else; what float16 can't hold becomes infinity, never NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from op_cases import Problem, errors, make_problem, run

pytestmark = pytest.mark.usefixtures("backend")
LARGEST = 65504.0


@pytest.mark.ci
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_what_is_not_finite_comes_out_in_its_own_row_and_head(name, value):
    """Neither lost on the way (the step would then be done with it) nor carried into another row, another head or an earlier chunk."""
    problem = make_problem(1, B=2, T=40, Hk=2, Hv=4, K=8, gate="none", initial_state=True, d_final=True, chunk_size=16, sigmoid=False)
    clean = run(problem)
    x = problem.inputs[name].copy()
    at = (1, 2, 3, 4) if name == "initial_state" else (1, 20, 1, 3)[: x.ndim]
    x[at] = value
    got = run(replace(problem, inputs={**problem.inputs, name: x}))
    heads = {"initial_state": [2], "q": [2, 3], "k": [2, 3]}.get(name, [1])
    others = [head for head in range(4) if head not in heads]
    assert not np.isfinite(got["out"][1][:, heads]).all() or not np.isfinite(got["final_state"][1, heads]).all()
    for tensor in ("out", "final_state", "q", "k", "v", "g", "beta", "initial_state"):
        assert np.array_equal(got[tensor][0], clean[tensor][0]), f"{tensor}: another row"
    for tensor in ("out", "v", "g", "beta"):
        assert np.array_equal(got[tensor][1][:, others], clean[tensor][1][:, others]), f"{tensor}: another head"
    assert np.array_equal(got["final_state"][1, others], clean["final_state"][1, others])
    if name != "initial_state":
        assert np.array_equal(got["out"][1, :16], clean["out"][1, :16]), "an earlier chunk"


def extreme_problem(seed: int, size: float) -> Problem:
    """Queries of length ``size`` that see many values near float16's largest; states, outputs and gradients go far beyond it."""
    problem = make_problem(
        seed, T=70, K=16, gate="none", l2=False, initial_state=True, d_final=True, dtype="float16", scale=1.0, sigmoid=False
    )
    rng = np.random.default_rng(seed)
    inputs = dict(problem.inputs)
    inputs["v"] = (rng.choice([-1.0, 1.0], inputs["v"].shape) * rng.uniform(0.5, 1.0, inputs["v"].shape) * LARGEST).astype(np.float16)
    inputs["q"] = (size * inputs["q"]).astype(np.float16)
    inputs["g"] = (0.01 * inputs["g"]).astype(np.float16)
    inputs["initial_state"] = 1e5 * inputs["initial_state"]
    inputs = {name: np.asarray(x, np.float32) for name, x in inputs.items()}
    return replace(problem, inputs=inputs)


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_results_beyond_float16_are_infinite_and_the_others_right(size):
    """Everything inside is float32: a result is infinite exactly where its true value rounds beyond 65504."""
    problem = extreme_problem(3, size)
    want, got = problem.truth(), run(problem)
    assert np.max(np.abs(want["final_state"])) > LARGEST
    overflown = 0
    for name in ("out", "q", "k", "v", "g", "beta"):
        truth, result = want[name], got[name]
        beyond = np.abs(truth) >= 65520 * 1.001  # halfway to the next step, which float16 would have above its largest
        within = np.abs(truth) <= 65520 * 0.999
        assert not np.isnan(result).any(), name
        assert np.array_equal(result[beyond], np.sign(truth[beyond]) * np.inf), name
        assert np.isfinite(result[within]).all(), name
        off = np.linalg.norm(result[within] - truth[within])
        assert off <= 5e-5 * np.linalg.norm(truth) + 2.0**-11 * np.linalg.norm(truth[within]), name
        overflown += int(beyond.sum())
    assert overflown > 1000
    exact = {name: got[name] for name in ("final_state", "initial_state")}
    found = errors(exact, want)
    assert found["final_state"] <= 1e-5 and found["initial_state"] <= 5e-5, found


def test_parts_beyond_float16_whose_sum_is_within():
    """Four orthogonal keys, each with the largest value; a query that adds two of them and takes two away sees nothing but the rest."""
    T, K = 5, 4
    k = np.zeros((1, T, 1, K), np.float32)
    k[0, range(4), 0, range(4)] = 1.0
    k[0, 4, 0, 0] = 1.0
    q = np.zeros_like(k)
    q[0, 4, 0] = [2.0, 2.0, -2.0, -2.0]
    q[0, 3, 0] = 1.0
    v = np.full((1, T, 1, 2), LARGEST, np.float32)
    v[0, 4] = 64992.0
    inputs = {"q": q, "k": k, "v": v, "g": np.zeros((1, T, 1, K), np.float32), "beta": np.ones((1, T, 1), np.float32)}
    options = {"scale": 1.0, "use_gate_in_kernel": False, "use_qk_l2norm_in_kernel": False, "use_beta_sigmoid_in_kernel": False}
    problem = Problem(inputs, {**options, "safe_gate": False}, np.zeros_like(v), None, "float16")
    got, want = run(problem), problem.truth()
    assert np.array_equal(want["out"][0, 4, 0], 2 * [2 * (64992.0 - LARGEST)]) and want["out"][0, 3, 0, 0] == 4 * LARGEST
    assert np.array_equal(got["out"][0, 4, 0], want["out"][0, 4, 0])
    assert np.array_equal(got["out"][0, 3, 0], [np.inf, np.inf])
