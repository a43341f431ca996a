"""The oracle itself: against the float64 truths that PyTorch's autograd made, and against central differences."""

from __future__ import annotations

import numpy as np
import pytest
from golden_cases import OP_CASES
from op_cases import golden_problem, make_problem, relative

from kcp.ops.reference import kda_reference, kda_reference_grad


@pytest.mark.parametrize("case", OP_CASES)
def test_equals_autograd_in_float64(case):
    problem, truth, _ = golden_problem(case)
    got = problem.truth()
    for name, want in truth.items():
        if np.any(want):
            assert relative(got[name].reshape(want.shape), want) < 1e-7, name
        else:
            assert np.max(np.abs(got[name])) < 1e-12, name


VARIANTS = {
    "lower_bound": {"gate": "lower_bound"},
    "lower_bound_without_a_log": {"gate": "lower_bound", "a_log": False, "dt_bias": False},
    "softplus": {"gate": "softplus", "shift": 0.0},
    "softplus_linear_part": {"gate": "softplus", "shift": 21.0, "dt_bias": False},
    "pre_computed": {"gate": "none"},
    "raw_beta_raw_keys": {"gate": "softplus", "l2": False, "sigmoid": False},
    "neg_eigval": {"allow_neg_eigval": True},
    "grouped_heads": {"Hk": 2, "Hv": 6},
    "rectangular_v_first": {"K": 3, "V": 5, "state_v_first": True},
    "batch": {"B": 3},
    "packed": {"lens": (4, 0, 1, 7, 0)},
    "packed_v_first": {"lens": (3, 0, 5), "state_v_first": True, "V": 2},
    "own_constants": {"scale": 0.7, "epsilon": 0.1, "lower_bound": -2.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_central_differences(variant):
    arguments = {"T": 9, "K": 4, "Hk": 1, "initial_state": True, "d_final": True, **VARIANTS[variant]}
    problem = make_problem(3, **arguments)
    inputs = {n: x.astype(np.float64) for n, x in problem.inputs.items()}

    def loss() -> float:
        result = kda_reference(**inputs, **problem.options)
        return float((result.out * problem.d_out).sum() + (result.final_state * problem.d_final_state).sum())

    grads = problem.truth()
    rng, step = np.random.default_rng(0), 1e-5
    for name, x in inputs.items():
        for _ in range(3):
            direction = rng.standard_normal(x.shape)
            start = x.copy()
            x[...] = start + step * direction
            above = loss()
            x[...] = start - step * direction
            below = loss()
            x[...] = start
            slope = (above - below) / (2 * step)
            assert slope == pytest.approx(float((grads[name] * direction).sum()), rel=1e-6, abs=1e-8), name


def test_blocks_of_recomputed_states_do_not_show():
    """More tokens than one block, rows of different lengths: equal to every sequence alone."""
    lens = (130, 3, 64, 0, 65)
    problem = make_problem(4, lens=lens, initial_state=True, d_final=True, K=6)
    whole, start = problem.truth(), 0
    for n, length in enumerate(lens):
        if length == 0:
            assert np.array_equal(whole["final_state"][n], problem.inputs["initial_state"][n])
            assert np.array_equal(whole["initial_state"][n], problem.d_final_state[n])
            continue
        part = slice(start, start + length)
        inputs = {m: x[:, part] for m, x in problem.inputs.items() if m in ("q", "k", "v", "g", "beta")}
        inputs |= {m: problem.inputs[m] for m in ("a_log", "dt_bias")}
        inputs["initial_state"] = problem.inputs["initial_state"][n : n + 1]
        options = {m: x for m, x in problem.options.items() if m != "cu_seqlens"}
        alone = kda_reference_grad(**inputs, **options, d_out=problem.d_out[:, part], d_final_state=problem.d_final_state[n : n + 1])
        for m in ("q", "k", "v", "g", "beta", "out"):
            assert np.allclose(whole[m][:, part], alone[m], rtol=1e-12, atol=1e-13), m
        for m in ("initial_state", "final_state"):
            assert np.allclose(whole[m][n], alone[m][0], rtol=1e-12, atol=1e-13), m
        start += length


def test_terms_of_a_log_bound_its_gradient():
    for gate in ("lower_bound", "softplus"):
        grads = make_problem(5, gate=gate).truth()
        assert np.all(grads["a_log_terms"] >= np.abs(grads["a_log"]))
        assert np.all(grads["a_log_terms"] > 0)


@pytest.mark.parametrize("cu", [[0, 12, 8, 16], [0, 8], [1, 16], [0, 17], [16]])
def test_boundaries_that_do_not_rise_to_t_are_refused(cu):
    problem = make_problem(6, T=16)
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to 16"):
        kda_reference(**problem.inputs, **{**problem.options, "cu_seqlens": cu})


def test_packed_batch_is_refused():
    problem = make_problem(7, B=2, T=16)
    with pytest.raises(ValueError, match="batch of 1, got 2"):
        kda_reference(**problem.inputs, **{**problem.options, "cu_seqlens": [0, 16]})
