"""Faults reported against other implementations, by their number in the shared list; those that concern the op."""

from __future__ import annotations

from dataclasses import replace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from op_cases import STORED, assert_same_bits, check, make_problem, relative, run, tensor_of

from kcp.ops import chunk_kda
from kcp.ops.reference import kda_reference

pytestmark = pytest.mark.usefixtures("backend")


def constant(problem, **inputs):
    """``problem`` with some inputs set to a constant."""
    filled = {n: np.broadcast_to(np.float32(x), problem.inputs[n].shape).copy() for n, x in inputs.items()}
    return replace(problem, inputs={**problem.inputs, **filled})


def test_reported_fault_05():
    """Non-contiguous inputs: q, k, v split from one projection, and the stride-0 gradient of a sum."""
    problem = make_problem(5, T=70, K=8)
    problem.d_out[...] = 1.0
    projection = Tensor(np.concatenate([problem.inputs[n] for n in ("q", "k", "v")], -1))
    parts = {n: projection[..., 8 * i : 8 * i + 8] for i, n in enumerate(("q", "k", "v"))}
    want = run(problem)
    assert_same_bits(run(problem, tensors=parts), want)

    def loss(q, k, v):
        rest = {n: Tensor(problem.inputs[n]) for n in ("g", "beta", "a_log", "dt_bias")}
        return chunk_kda(q, k, v, **rest, layout="BSND", **problem.options)[0].sum()

    for name, grad in zip(parts, ms.grad(loss, (0, 1, 2))(*parts.values()), strict=True):
        assert np.array_equal(grad.asnumpy(), want[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [2, 4])
def test_reported_fault_06(group, dtype):
    """Hv = 2 Hk and 4 Hk: equal to the call with repeated heads, whose gradients are then summed."""
    problem = make_problem(6, T=70, Hk=2, Hv=2 * group, dtype=dtype, initial_state=True, d_final=True)
    wide = replace(problem, inputs={**problem.inputs, **{n: problem.inputs[n].repeat(group, 2) for n in ("q", "k")}})
    got, want = run(problem), run(wide)
    for name in ("v", "g", "beta", "out", "final_state", "initial_state", "a_log", "dt_bias"):
        assert np.array_equal(got[name], want[name]), name
    check(got, problem.truth(), dtype=dtype)


def test_reported_fault_07():
    """A gate a head instead of a channel, and a bfloat16 initial state, are refused."""
    problem = make_problem(7, T=8, initial_state=True)
    values = {n: tensor_of(n, x) for n, x in problem.inputs.items()}
    with pytest.raises(ValueError, match=r"^g has shape \(1, 8, 2\)"):
        chunk_kda(**{**values, "g": values["beta"]}, layout="BSND", **problem.options)
    with pytest.raises(TypeError, match=r"^initial_state has dtype BFloat16"):
        state = values["initial_state"].astype(ms.bfloat16)
        chunk_kda(**{**values, "initial_state": state}, layout="BSND", **problem.options)


@pytest.mark.parametrize("a", [0.0, -5.0, -20.0, -1000.0])
def test_reported_fault_08(a):
    """Exponent before the mask: constant decays, one full chunk, every value finite and right."""
    problem = constant(make_problem(8, T=64, gate="none", initial_state=True, d_final=True), g=a)
    check(run(problem), problem.truth())


def nearly_equal_keys(seed: int, spread: float, **arguments):
    problem = make_problem(seed, T=64, gate="none", initial_state=True, d_final=True, **arguments)
    rng = np.random.default_rng(seed)
    key = rng.standard_normal(16) + spread * rng.standard_normal(problem.inputs["k"].shape)
    problem.inputs["k"][...] = key
    return problem, rng


def test_reported_fault_09():
    """Correlated keys and slow decay: the strict lower triangle of (I + L)^-1 alone, against float64."""
    from kcp.ops import chunk_kda_fwd_prepare

    problem, rng = nearly_equal_keys(9, 0.02, Hk=1)
    problem.inputs["g"][...] = rng.uniform(-0.05, 0.0, problem.inputs["g"].shape)
    values = [tensor_of(n, problem.inputs[n]) for n in STORED]
    flags = {n: problem.options[n] for n in ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel")}
    akk = chunk_kda_fwd_prepare(*values, 16**-0.5, 64, layout="BSND", use_gate_in_kernel=False, **flags)[2]
    k = problem.inputs["k"][0, :, 0].astype(np.float64)
    k /= np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    beta = 1.0 / (1.0 + np.exp(-problem.inputs["beta"][0, :, 0].astype(np.float64)))
    total = np.cumsum(problem.inputs["g"][0, :, 0].astype(np.float64), 0)
    lower = np.tril(np.einsum("ik,jk,ijk->ij", k, k, np.exp(np.minimum(total[:, None] - total[None], 0.0))), -1)
    exact = np.linalg.inv(np.eye(64) + beta[:, None] * lower)
    strict = np.tril_indices(64, -1)
    assert relative(akk.asnumpy()[0, 0][strict], exact[strict]) <= 1e-5
    check(run(problem), problem.truth())


def test_reported_fault_10():
    """Identical keys, beta 0.835, a = -1e-3."""
    problem, _ = nearly_equal_keys(10, 0.0, sigmoid=False)
    problem = constant(problem, beta=0.835, g=-1e-3)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("T", [512, pytest.param(16384, marks=pytest.mark.ci)])
def test_reported_fault_11(T):
    """q = k constant, raw gate -12, raw beta 8."""
    problem = make_problem(11, T=T, Hk=1, K=8, l2=False, dt_bias=False, d_final=True)
    problem = constant(problem, q=0.3, k=0.3, g=-12.0, beta=8.0, a_log=0.0)
    want = problem.truth()
    check(run(problem), want)

    # With the norm, dq is parallel to q and almost all of it is projected away: judged against what it was before.
    normed = problem.with_options(use_qk_l2norm_in_kernel=True)
    got, want = run(normed), normed.truth()
    unit = constant(problem, q=8**-0.5, k=8**-0.5).truth()
    for name in ("q", "k"):
        size = np.linalg.norm(unit[name]) / (0.3 * 8**0.5)
        assert np.linalg.norm(got.pop(name) - want[name]) <= 5e-5 * size, name
    check(got, want)


def test_reported_fault_12():
    """At T = 1 without a state only pairs of a token with itself are left: the gate's gradient is exactly zero."""
    for a in (0.0, -1e-3, -5.0):
        problem = constant(make_problem(12, T=1, gate="none", d_final=True), g=a)
        got = run(problem)
        assert not np.any(got["g"]), a
        check(got, problem.truth())


def test_reported_fault_12_at_every_token():
    """Keys orthogonal between tokens of a chunk and no loss across tokens: the gate's gradient is zero."""
    problem = make_problem(12, T=16, Hk=1, K=16, gate="none", l2=False, shift=5.0)
    eye = np.eye(16, dtype=np.float32)[None, :, None]
    problem.inputs["q"][...] = eye
    problem.inputs["k"][...] = eye
    problem.inputs["g"][...] = -5.0
    got = run(problem)
    assert not np.any(got["g"])
    check(got, problem.truth())


@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_reported_fault_13(gate):
    """Strong decay: gradients of a_log and dt_bias; rows after the last boundary are refused, never left unwritten."""
    problem = make_problem(13, lens=(60, 70), gate=gate, shift=6.0, initial_state=True, d_final=True)
    check(run(problem), problem.truth())
    for cu in ([0, 60, 120], Tensor(np.asarray([0, 60, 120], np.int32))):
        with pytest.raises(ValueError, match=r"cu_seqlens.*120.*130"):
            run(problem, cu_seqlens=cu)


def test_reported_fault_14():
    """Lengths [640, 783]: a tail of 15 tokens."""
    problem = make_problem(14, lens=(640, 783), Hk=1, initial_state=True, d_final=True)
    check(run(problem), problem.truth())


@pytest.mark.ci
def test_reported_fault_15():
    """Boundaries [0, 65, 131, 202, 281]: 20 runs bitwise equal."""
    problem = make_problem(15, lens=(65, 66, 71, 79), initial_state=True, d_final=True)
    want = run(problem)
    for _ in range(19):
        assert_same_bits(run(problem), want)


@pytest.mark.parametrize("T", [65, 79, pytest.param(1281, marks=pytest.mark.ci)])
def test_reported_fault_16(T):
    """Final state of a sequence with a short tail (every tail of 1 to 15 tokens: ``test_every_tail``)."""
    problem = make_problem(16, T=T, shift=-5.0, initial_state=True, d_final=True)
    got, want = run(problem), problem.truth()
    assert relative(got["final_state"], want["final_state"]) <= 1e-5
    check(got, want)


@pytest.mark.ci
@pytest.mark.parametrize("cu_form", ["host", "tensor"])
def test_reported_fault_17(cu_form):
    """A dozen lengths in one pack, each equal to itself alone (the oracle runs them apart)."""
    lens = (2049, 1011, 513, 256, 128, 65, 32, 16, 8, 4, 5, 1)
    problem = make_problem(17, lens=lens, Hk=1, K=8, initial_state=True, d_final=True, shift=-4.0)
    got, want = run(problem, cu_form=cu_form), problem.truth()
    check(got, want)
    edges = np.cumsum((0,) + lens)
    for n, (start, end) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        for name in ("out", "q", "k", "v", "beta"):
            assert relative(got[name][:, start:end], want[name][:, start:end]) <= 5e-5, (n, name)
        assert relative(got["final_state"][n], want["final_state"][n]) <= 1e-5, n


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reported_fault_18(dtype):
    """T = 65536 in four documents, 1024 chunks and more."""
    problem = make_problem(18, lens=(16385, 16383, 16400, 16368), Hk=1, K=8, dtype=dtype, shift=-4.0, d_final=True)
    check(run(problem), problem.truth(), dtype=dtype)


def test_reported_fault_19():
    """Boundaries [0, 12, 8, 16] are refused, as integers and as a Tensor."""
    problem = make_problem(19, T=16)
    for cu in ([0, 12, 8, 16], Tensor(np.asarray([0, 12, 8, 16], np.int32))):
        with pytest.raises(ValueError, match=r"cu_seqlens.*12.*8"):
            run(problem, cu_seqlens=cu)


@pytest.mark.ci
@pytest.mark.parametrize("length", [16, 32, 64])
def test_reported_fault_20(length):
    """127 documents: more padded chunks than tokens / chunk_size."""
    problem = make_problem(20, lens=(length,) * 127, K=8, Hk=1, initial_state=True, d_final=True)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("cu_form", ["host", "tensor"])
def test_reported_fault_21(cu_form):
    """A document without tokens in the middle: its state and its gradient pass through, later ones keep their index."""
    problem = make_problem(21, lens=(128, 0, 128), Hk=1, initial_state=True, d_final=True)
    got = run(problem, cu_form=cu_form)
    assert np.array_equal(got["final_state"][1], problem.inputs["initial_state"][1])
    assert np.array_equal(got["initial_state"][1], problem.d_final_state[1])
    check(got, problem.truth())


@pytest.mark.parametrize("cu_form", ["host", "tensor"])
def test_reported_fault_23(cu_form):
    """Documents [37, 51, 40] under slow decay: another document 0 leaves 1 and 2 bitwise equal."""
    problem = make_problem(23, lens=(37, 51, 40), shift=-8.0, d_final=True)
    other = replace(problem, inputs={n: x.copy() for n, x in problem.inputs.items()}, d_out=problem.d_out.copy())
    for n in STORED:
        other.inputs[n][:, :37] += 1.0
    other.d_out[:, :37] += 1.0
    first, second = run(problem, cu_form=cu_form), run(other, cu_form=cu_form)
    for name in ("out", *STORED):
        assert np.array_equal(first[name][:, 37:], second[name][:, 37:]), name
        assert not np.array_equal(first[name][:, :37], second[name][:, :37]), name
    assert np.array_equal(first["final_state"][1:], second["final_state"][1:])


def test_reported_fault_25():
    """Boundaries changed in place, in a list and in a Tensor, give the new result."""
    problem = make_problem(25, T=40)
    values = {n: tensor_of(n, x) for n, x in problem.inputs.items()}
    host, tensor = [0, 10, 40], Tensor(np.asarray([0, 10, 40], np.int32))
    chunk_kda(**values, layout="BSND", cu_seqlens=host, **problem.options)
    chunk_kda(**values, layout="BSND", cu_seqlens=tensor, **problem.options)
    host[1] = 25
    tensor[1] = 25
    want = kda_reference(**problem.inputs, **problem.options, cu_seqlens=[0, 25, 40]).out
    for cu in (host, tensor):
        out, _ = chunk_kda(**values, layout="BSND", cu_seqlens=cu, **problem.options)
        assert relative(out.asnumpy(), want) <= 1e-5


@pytest.mark.parametrize("state_v_first", [False, True])
def test_reported_fault_27(state_v_first):
    """K = 64, V = 128, an initial state that is not symmetric, both orders."""
    problem = make_problem(27, T=70, K=64, V=128, initial_state=True, d_final=True, state_v_first=state_v_first, shift=-4.0)
    check(run(problem), problem.truth())


@pytest.mark.parametrize("cut", [1, 63, 64, 65])
def test_reported_fault_28(cut):
    """A sequence split in two, final state passed on, equals one pass (gradients: test_states.py)."""
    whole = make_problem(28, T=130, d_final=True)

    def part(tokens: slice, **state):
        inputs = {n: x[:, tokens] if n in STORED else x for n, x in whole.inputs.items()}
        return run(replace(whole, inputs={**inputs, **state}, d_out=whole.d_out[:, tokens]))

    head = part(slice(0, cut))
    tail = part(slice(cut, None), initial_state=head["final_state"])
    want = whole.truth()
    assert relative(np.concatenate([head["out"], tail["out"]], 1), want["out"]) <= 1e-5
    assert relative(tail["final_state"], want["final_state"]) <= 1e-5


def test_reported_fault_29():
    """A misspelt keyword raises."""
    problem = make_problem(29, T=4)
    values = {n: tensor_of(n, x) for n, x in problem.inputs.items()}
    with pytest.raises(TypeError, match="output_finalstate"):
        chunk_kda(**values, layout="BSND", output_finalstate=True, **problem.options)


@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_reported_fault_30(gate):
    """Each gate equals its own formula over raw gates in [-20, 20]: the decay is read off the state of one token."""
    raw = np.linspace(-20.0, 20.0, 64, dtype=np.float32).reshape(1, 1, 2, 32)
    problem = make_problem(30, T=1, K=32, V=4, gate=gate, dt_bias=False, initial_state=True)
    problem.inputs["g"][...] = raw
    problem = constant(problem, k=0.0, initial_state=1.0)
    decay = run(problem)["final_state"][0, :, :, 0]
    rate, x = np.exp(problem.inputs["a_log"].astype(np.float64))[:, None], raw[0, 0].astype(np.float64)
    a = -5.0 / (1.0 + np.exp(-rate * x)) if gate == "lower_bound" else -rate * np.logaddexp(0.0, x)
    assert np.max(np.abs(decay / np.exp(a) - 1.0)[a > -60]) <= 1e-5


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_reported_fault_31(length):
    """Grouped values: a_log is one number a value head, any other length raises."""
    problem = make_problem(31, T=8, Hk=2, Hv=4)
    values = {n: tensor_of(n, x) for n, x in problem.inputs.items()}
    values["a_log"] = Tensor(np.zeros(length, np.float32))
    with pytest.raises(ValueError, match=rf"a_log has shape \({length},\).*4"):
        chunk_kda(**values, layout="BSND", **problem.options)
