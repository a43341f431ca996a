"""The routing table of section 3.3 of the Hyper-Parallel document, and the precision gate of its section 8.2."""

from __future__ import annotations

from dataclasses import replace

import emulator
import numpy as np
import pytest
from op_cases import relative, run
from test_ascend_stages import bf16_problem
from test_states import _final_state_only

from kcp.ops.backends import ascend
from kcp.ops.backends.ascend_routing import FUSED, OTHER, STAGES, Traits, completed, route

# safe gate, gate in kernel, initial state, recompute, V-first, final state in the loss, strategy between the stages -> way
TABLE = [
    ((0, 1, 0, 0, 0, 0, 0), FUSED, "raw softplus gate without states"),
    ((1, 1, 0, 0, 0, 0, 0), STAGES, "safe_gate with a raw gate"),
    ((0, 1, 1, 0, 0, 0, 0), STAGES, "an initial state is given"),
    ((0, 1, 0, 1, 0, 0, 0), STAGES, "disable_recompute=False"),
    ((0, 1, 0, 0, 1, 0, 0), STAGES, "V-first"),
    ((0, 1, 0, 0, 0, 1, 0), STAGES, "the fused backward refuses"),
    ((0, 0, 0, 0, 0, 0, 0), STAGES, "the gate is pre-computed"),
    ((0, 1, 0, 0, 0, 0, 1), STAGES, "between the stages"),
    ((1, 1, 1, 1, 1, 1, 1), STAGES, "between the stages"),
]


def traits(flags) -> Traits:
    safe, inside, initial, recompute, v_first, final, opened = map(bool, flags)
    return Traits(
        safe_gate=safe, use_gate_in_kernel=inside, has_initial_state=initial, disable_recompute=not recompute, state_v_first=v_first,
        wants_final_state=final, opened=opened,
    )  # fmt: skip


@pytest.mark.parametrize(("flags", "kind", "why"), TABLE)
def test_the_table(flags, kind, why):
    way = route(traits(flags))
    assert way.kind == kind and why in way.why
    assert ("bwd_finalize" in completed(traits(flags))) == (not (flags[0] and flags[1]))


@pytest.mark.parametrize(
    ("change", "why"),
    [({"key_width": 64}, "K is 64"), ({"value_width": 256}, "V is 256"), ({"chunk_size": 16}, "chunk_size is 16"),
     ({"dtype": "Float32"}, "BFloat16"), ({"compiled": True}, "PyNative")],
)  # fmt: skip
def test_limits_come_first(change, why):
    way = route(replace(traits(TABLE[1][0]), **change))
    assert way.kind == OTHER and why in way.why


CALLS = {
    "softplus, no states": ({"gate": "softplus"}, False, True),
    "softplus, final state wanted": ({"gate": "softplus", "d_final": True}, True, False),
    "softplus, initial state": ({"gate": "softplus", "initial_state": True}, False, False),
    "softplus, recompute": ({"gate": "softplus", "disable_recompute": False}, False, False),
    "softplus, V-first": ({"gate": "softplus", "state_v_first": True}, False, False),
    "lower-bound gate": ({}, False, False),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_take_their_way(call):
    changes, final, fused = CALLS[call]
    problem = bf16_problem(1, T=5, **changes)
    with emulator.installed():
        run(problem, output_final_state=True) if final else _run_without_state(problem)
        assert ("chunk_kda" in emulator.calls) == fused
        assert ("fwd_h" in emulator.calls) != fused


def _run_without_state(problem):
    from test_ascend_stages import _without_final_state

    return _without_final_state(problem)


def test_the_fused_backward_refuses_a_final_state():
    """What the route avoids is real: the emulated fused op raises."""
    import mindspore as ms
    from mindspore import Tensor

    x = Tensor(np.ones((1, 1, 3, 128), np.float32)).astype(ms.bfloat16)

    def loss(v):
        return emulator.npu_chunk_kda(x, x, v, x, x[..., 0], 1.0, a_log=Tensor(np.zeros(1, np.float32)), output_final_state=True)[1].sum()

    with pytest.raises(RuntimeError, match="final_state must not take part in the loss"):
        ms.grad(loss)(x)


def _gate(seeds) -> tuple[float, float]:
    """Largest error of dk without and with the correction; a vanishing dk is judged as in tests/ops/test_states.py."""
    worst = {"off": 0.0, "auto": 0.0}
    for seed in seeds:
        problem = _final_state_only(seed, 1)
        want = problem.truth()["k"]
        same_sign = replace(problem, inputs={**problem.inputs, "v": np.abs(problem.inputs["v"])})
        size = max(np.linalg.norm(want), 1e-3 * np.linalg.norm(same_sign.truth()["k"]))
        for mode in worst:
            with emulator.installed(), ascend.use_correction(mode):
                got = run(problem)["k"]
            worst[mode] = max(worst[mode], float(np.linalg.norm(got - want)) / size)
    return worst["off"], worst["auto"]


@pytest.mark.ci
def test_precision_gate_20_seeds():
    """Seed 99 fails the document's gate of 4 % without the correction: the emulation loses what the kernels lose."""
    without, corrected = _gate(range(80, 100))
    assert without > 0.04
    assert corrected <= 0.01


@pytest.mark.once
def test_precision_gate_200_seeds():
    without, corrected = _gate(range(200))
    print(f"dk over 200 seeds: {without:.2%} without the correction, {corrected:.2%} with it")
    assert without > 0.04
    assert corrected <= 0.01


@pytest.mark.ci
@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
@pytest.mark.parametrize("changes", [{}, {"Hv": 4}, {"l2": False}, {"lens": (5, 0, 61, 66)}], ids=["plain", "grouped", "no_norm", "packed"])
def test_the_correction_brings_every_gradient_nearer(gate, changes, emulated):
    """A loss on the final state alone: with the correction dk and dg are never worse; off, always and auto do what they say."""
    problem = bf16_problem(2, **{"gate": gate, "d_out": False, "d_final": True, "initial_state": True, **changes})
    problem.d_final_state[...] = 1.0
    truth, found = problem.truth(), {}
    for mode in ("off", "auto", "always"):
        with ascend.use_correction(mode):
            got = run(problem)
        found[mode] = {n: relative(got[n], truth[n]) for n in ("k", "g", "dt_bias")}
    assert found["auto"] == found["always"]
    assert found["auto"]["k"] < found["off"]["k"]
    assert found["auto"]["g"] <= found["off"]["g"] * 1.02
    assert found["auto"]["dt_bias"] <= found["off"]["dt_bias"] * 1.05
