"""Extreme decays, strengths, keys, lengths and packings: finite, and equal to the float64 recurrence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from op_cases import Problem, check, make_problem, run

pytestmark = pytest.mark.usefixtures("backend")


def with_inputs(problem: Problem, **inputs) -> Problem:
    """``problem`` with some inputs replaced, each broadcast to its shape."""
    shaped = {n: np.broadcast_to(np.float32(x), problem.inputs[n].shape).copy() for n, x in inputs.items()}
    return replace(problem, inputs={**problem.inputs, **shaped})


@pytest.mark.parametrize("a", [0.0, -1e-3, -5.0, -20.0, -1000.0])
@pytest.mark.parametrize("T", [64, 130])
def test_constant_pre_computed_decay(a, T):
    problem = with_inputs(make_problem(1, T=T, gate="none", initial_state=True, d_final=True), g=a)
    check(run(problem), problem.truth())


def test_mixed_pre_computed_decays():
    """Neighbouring tokens and channels with nothing, everything and all between forgotten."""
    problem = make_problem(2, T=130, gate="none", initial_state=True, d_final=True)
    values = np.random.default_rng(2).choice([0.0, -1e-3, -0.3, -5.0, -20.0, -1000.0], problem.inputs["g"].shape)
    problem = with_inputs(problem, g=values)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
@pytest.mark.parametrize("raw", [-20.0, -12.0, 0.0, 12.0, 20.0])
def test_constant_raw_gate(gate, raw):
    problem = make_problem(3, T=70, gate=gate, dt_bias=False, initial_state=True, d_final=True)
    problem = with_inputs(problem, g=raw)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_raw_gate_over_its_range(gate):
    problem = make_problem(4, T=70, gate=gate, dt_bias=False, initial_state=True, d_final=True)
    problem = with_inputs(problem, g=np.random.default_rng(4).uniform(-20, 20, problem.inputs["g"].shape))
    check(run(problem), problem.truth())


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("a", [-0.01, -1.0])
def test_write_strength(beta, a):
    problem = make_problem(5, T=70, gate="none", sigmoid=False, initial_state=True, d_final=True)
    problem = with_inputs(problem, beta=beta, g=a)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("raw_beta", [-30.0, -12.0, 8.0, 12.0, 30.0])
def test_saturated_sigmoid(raw_beta):
    problem = with_inputs(make_problem(6, T=70, allow_neg_eigval=True, d_final=True), beta=raw_beta)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("a", [0.0, -1e-3, -0.05])
def test_identical_keys(a):
    """I + L is then as ill-conditioned as it gets: every pair of tokens has a score of nearly 1."""
    problem = make_problem(7, T=64, gate="none", sigmoid=False, initial_state=True, d_final=True)
    key = np.random.default_rng(7).standard_normal(16)
    problem = with_inputs(problem, k=key, g=a, beta=0.835)
    check(run(problem), problem.truth())


def test_query_equals_key_constant():
    problem = with_inputs(make_problem(8, T=130, d_final=True), q=0.25, k=0.25)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("extra", [1, 2, 7, 14, 15])
def test_tails(extra):
    problem = make_problem(9, T=128 + extra, d_final=True, initial_state=True)
    check(run(problem), problem.truth())


@pytest.mark.ci
@pytest.mark.parametrize("extra", range(1, 16))
def test_every_tail(extra):
    problem = make_problem(9, T=1280 + extra, Hk=1, d_final=True, initial_state=True, shift=-5.0)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("cu_form", ["host", "tensor"])
@pytest.mark.parametrize("length", [16, pytest.param(32, marks=pytest.mark.ci), pytest.param(64, marks=pytest.mark.ci)])
def test_127_sequences(length, cu_form):
    problem = make_problem(10, lens=(length,) * 127, K=8, Hk=1, initial_state=True, d_final=True)
    check(run(problem, cu_form=cu_form), problem.truth())


@pytest.mark.ci
def test_65536_tokens_in_one_sequence():
    """Slow decay: what the state keeps is hundreds of tokens old, and its error does not grow with them."""
    problem = make_problem(11, T=65536, Hk=1, K=8, shift=-7.0, initial_state=True, d_final=True)
    want, got = problem.truth(), run(problem)
    check(got, want)
    off, size = (np.sqrt((x**2).sum((0, 2, 3))) for x in (got["out"] - want["out"], want["out"]))
    errors = off / size
    start, end = np.median(errors[:1024]), np.median(errors[-1024:])
    assert end <= 3 * start + 1e-6, (start, end)


@pytest.mark.ci
def test_without_any_decay_over_4096_tokens():
    problem = with_inputs(make_problem(12, T=4096, Hk=1, K=16, gate="none", d_final=True), g=0.0)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_strong_decay_in_storage_types(dtype):
    problem = make_problem(13, T=70, gate="none", dtype=dtype, initial_state=True, d_final=True)
    problem = with_inputs(problem, g=-20.0)
    check(run(problem), problem.truth(), dtype=dtype)


@pytest.mark.parametrize("gate", ["lower_bound", "none"])
def test_zero_inputs(gate):
    """Zero queries, keys and values: the norm's epsilon keeps the gradients finite."""
    problem = with_inputs(make_problem(14, T=20, gate=gate, d_final=True), q=0.0, k=0.0, v=0.0)
    check(run(problem), problem.truth())
