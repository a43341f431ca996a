"""Initial and final states: gradients on every path, V-first, and sequences cut in two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from op_cases import assert_same_bits, check, make_problem, relative, run

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("disable_recompute", [True, False])
@pytest.mark.parametrize("d_out, d_final", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("initial_state", [True, False])
def test_state_gradients(initial_state, d_out, d_final, disable_recompute):
    problem = make_problem(1, T=70, initial_state=initial_state, d_out=d_out, d_final=d_final)
    check(run(problem, disable_recompute=disable_recompute), problem.truth())


@pytest.mark.parametrize("gate", ["lower_bound", "softplus", "none"])
def test_final_state_alone_in_the_loss(gate):
    """The query does not reach the final state: its gradient is exactly zero."""
    problem = make_problem(2, B=2, T=70, gate=gate, d_out=False, d_final=True, initial_state=True)
    got = run(problem)
    check(got, problem.truth())
    assert not np.any(got["q"])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("disable_recompute", [True, False])
def test_v_first_is_the_transpose_bitwise(packed, disable_recompute):
    lens = (30, 0, 40) if packed else None
    problem = make_problem(3, T=70, K=12, V=20, lens=lens, initial_state=True, d_final=True)
    want = run(problem)
    turned = replace(
        problem,
        inputs={**problem.inputs, "initial_state": np.swapaxes(problem.inputs["initial_state"], -1, -2)},
        d_final_state=np.swapaxes(problem.d_final_state, -1, -2),
    ).with_options(state_v_first=True)
    got = run(turned, disable_recompute=disable_recompute)
    for name in ("initial_state", "final_state"):
        got[name] = np.swapaxes(got[name], -1, -2)
    assert_same_bits(got, want)


@pytest.mark.ci
@pytest.mark.parametrize("cut", [1, 63, 64, 65])
def test_two_parts_equal_one_pass(cut):
    """Output, states and every gradient, the state's gradient carried from the second part to the first."""
    whole = make_problem(4, T=130, initial_state=True, d_final=True)
    want = whole.truth()

    def part(tokens: slice, state, d_final):
        inputs = {n: x[:, tokens] if n in ("q", "k", "v", "g", "beta") else x for n, x in whole.inputs.items()}
        inputs["initial_state"] = state
        return replace(whole, inputs=inputs, d_out=whole.d_out[:, tokens], d_final_state=d_final)

    head = run(part(slice(0, cut), whole.inputs["initial_state"], whole.d_final_state))
    second = run(part(slice(cut, None), head["final_state"], whole.d_final_state))
    first = run(part(slice(0, cut), whole.inputs["initial_state"], second["initial_state"]))
    joined = {n: np.concatenate([first[n], second[n]], 1) for n in ("q", "k", "v", "g", "beta", "out")}
    joined |= {n: first[n] + second[n] for n in ("a_log", "dt_bias")}
    joined |= {"initial_state": first["initial_state"], "final_state": second["final_state"]}
    check(joined, want)


def test_parts_cut_at_a_chunk_border_give_the_same_bits(backend):
    if backend != "composite":
        pytest.skip("bitwise equality of parts is a property of the composite backend")
    whole = make_problem(5, T=128)
    want = run(whole)
    first = replace(whole, inputs={n: x[:, :64] if x.ndim > 2 else x for n, x in whole.inputs.items()})
    first = replace(first, d_out=whole.d_out[:, :64])
    head = run(first)
    second = {n: x[:, 64:] if x.ndim > 2 else x for n, x in whole.inputs.items()}
    tail = run(replace(whole, inputs={**second, "initial_state": head["final_state"]}, d_out=whole.d_out[:, 64:]))
    assert np.array_equal(np.concatenate([head["out"], tail["out"]], 1), want["out"])
    assert np.array_equal(tail["final_state"], want["final_state"])


def _final_state_only(seed: int, heads: int):
    """Section 8.2 of the Hyper-Parallel document: strong decay, bfloat16, T = 65, constant gradient of the state."""
    problem = make_problem(seed, T=65, Hk=heads, K=128, dtype="bfloat16", d_out=False, d_final=True, initial_state=True, shift=1.0)
    problem.d_final_state[...] = 1.0
    problem.inputs["a_log"][...] = 0.0
    return problem


def _check_final_state_only(seed: int, heads: int) -> float:
    """dk within 1 % of its norm; where sum_V v_new nearly vanishes the norm of its terms, 1e-3 of them, is the floor.

    With a constant gradient dk is a product with sum_V v_new, which can cancel to nothing by itself; then the relative
    error says nothing about the op, and the error is judged by the gradient that values of one sign would give.
    """
    problem = _final_state_only(seed, heads)
    got, want = run(problem)["k"], problem.truth()["k"]
    same_sign = replace(problem, inputs={**problem.inputs, "v": np.abs(problem.inputs["v"])})
    floor = 1e-3 * np.linalg.norm(same_sign.truth()["k"])
    error = float(np.linalg.norm(got - want) / max(np.linalg.norm(want), floor))
    assert error <= 0.01, f"seed {seed}, {heads} heads: dk is off by {error:.2%}"
    return relative(got, want)


@pytest.mark.ci
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_final_state_only_loss_under_strong_decay(heads):
    for seed in range(2):
        _check_final_state_only(seed, heads)


@pytest.mark.ci
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_final_state_only_loss_under_strong_decay_20_seeds(heads):
    for seed in range(20):
        _check_final_state_only(seed, heads)


@pytest.mark.once
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_final_state_only_loss_under_strong_decay_200_seeds(heads):
    for seed in range(200):
        _check_final_state_only(seed, heads)
