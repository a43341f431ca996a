"""PyNative and graph mode, ways to differentiate, training, memory layouts of inputs, and repeatability."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from op_cases import STORED, assert_same_bits, check, make_problem, run, tensor_of

from kcp.ops import chunk_kda

pytestmark = pytest.mark.usefixtures("backend")


def tensors(problem, dtype: str = "float32") -> dict[str, Tensor]:
    return {n: tensor_of(n, x, dtype=dtype) for n, x in problem.inputs.items()}


# A graph unrolls chunks and their rows of 16 tokens: two chunks of 16 are the smallest that has everything in it.
SMALL = {"T": 20, "chunk_size": 16, "K": 8, "initial_state": True, "d_final": True}


@pytest.mark.ci
@pytest.mark.parametrize("gate", ["lower_bound", *(pytest.param(g, marks=pytest.mark.ci) for g in ("softplus", "none"))])
def test_jit_equals_the_oracle(gate):
    problem = make_problem(1, gate=gate, **SMALL)
    check(run(problem, jit=True), problem.truth())


@pytest.mark.ci
def test_jit_with_chunks_of_64():
    problem = make_problem(1, **{**SMALL, "T": 130, "chunk_size": 64})
    check(run(problem, jit=True), problem.truth())


@pytest.mark.ci
@pytest.mark.parametrize("disable_recompute", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jit_with_and_without_recompute(dtype, disable_recompute):
    problem = make_problem(2, Hv=4, dtype=dtype, state_v_first=True, V=4, **SMALL)
    check(run(problem, jit=True, disable_recompute=disable_recompute), problem.truth(), dtype=dtype)


@pytest.mark.ci
def test_jit_without_states():
    problem = make_problem(3, T=20, chunk_size=16)
    check(run(problem, jit=True), problem.truth())


def _loss(problem):
    weight, options = Tensor(problem.d_out), problem.options

    def loss(q, k, v, g, beta, a_log, dt_bias):
        out, _ = chunk_kda(q, k, v, g, beta, a_log=a_log, dt_bias=dt_bias, layout="BSND", **options)
        return (out * weight).sum()

    return loss


def test_grad_and_value_and_grad_agree():
    problem = make_problem(4, T=40)
    loss, values = _loss(problem), tuple(tensors(problem).values())
    want = run(problem)
    grads = ms.grad(loss, tuple(range(7)))(*values)
    value, again = ms.value_and_grad(loss, tuple(range(7)))(*values)
    exact = problem.truth()
    assert float(value) == pytest.approx(float((exact["out"] * problem.d_out).sum()), abs=1e-3)
    for name, first, second in zip(problem.inputs, grads, again, strict=True):
        assert np.array_equal(first.asnumpy(), want[name]), name
        assert np.array_equal(second.asnumpy(), want[name]), name


@pytest.mark.parametrize("position", [0, 2, 5])
def test_gradient_of_one_input(position):
    problem = make_problem(5, T=20)
    names = list(problem.inputs)
    grad = ms.grad(_loss(problem), position)(*tensors(problem).values())
    assert np.array_equal(grad.asnumpy(), run(problem)[names[position]])


@pytest.mark.ci
def test_grad_inside_jit_equals_jit_inside_grad(backend, request):
    if backend == "composite":  # docs/platform-notes.md: MindSpore 2.9.0 drops a function graph that forward and backward share
        request.applymarker(pytest.mark.xfail(raises=RuntimeError, strict=True, reason="grad of a compiled function on composite"))
    problem = make_problem(6, T=20, chunk_size=16)
    loss, values = _loss(problem), tuple(tensors(problem).values())
    inside = ms.jit(ms.grad(loss, tuple(range(7))))(*values)
    outside = ms.grad(ms.jit(loss), tuple(range(7)))(*values)
    for name, first, second in zip(problem.inputs, inside, outside, strict=True):
        assert np.array_equal(first.asnumpy(), second.asnumpy()), name


class TinyKda(nn.Cell):
    """Projections around the op, with its parameters."""

    def __init__(self, width: int = 8, heads: int = 2, dim: int = 8):
        super().__init__()
        rng = np.random.default_rng(0)

        def parameter(name, *shape, scale=0.5):
            return ms.Parameter(Tensor((scale * rng.standard_normal(shape)).astype(np.float32)), name=name)

        self.heads, self.dim = heads, dim
        self.qkvg = parameter("qkvg", width, 4 * heads * dim)
        self.beta = parameter("beta", width, heads)
        self.a_log = parameter("a_log", heads)
        self.dt_bias = parameter("dt_bias", heads * dim)
        self.out = parameter("out", heads * dim, width)

    def construct(self, x):
        batch, tokens, width = x.shape
        flat = x.reshape(batch * tokens, width)
        q, k, v, g = ops.split(ops.matmul(flat, self.qkvg).reshape(batch, tokens, 4 * self.heads, self.dim), self.heads, 2)
        beta = ops.matmul(flat, self.beta).reshape(batch, tokens, self.heads)
        y, _ = chunk_kda(
            q, k, v, g, beta, None, 16, layout="BSND", a_log=self.a_log, dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        return ops.matmul(y.reshape(batch * tokens, self.heads * self.dim), self.out).reshape(x.shape)


@pytest.mark.ci
@pytest.mark.parametrize("graph", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_a_cell_trains(graph):
    """The loss of a small regression falls by a half; every parameter has a finite gradient that is not zero."""
    net = TinyKda()
    optimizer = nn.Adam(net.trainable_params(), learning_rate=3e-2)
    rng = np.random.default_rng(1)
    x = Tensor(rng.standard_normal((2, 20, 8)).astype(np.float32))
    target = Tensor(np.roll(x.asnumpy(), 1, axis=1))

    def loss(x):
        return ((net(x) - target) ** 2).mean()

    value_and_grad = ms.value_and_grad(loss, None, weights=optimizer.parameters)
    step = ms.jit(value_and_grad) if graph else value_and_grad
    values = []
    for _ in range(25):
        value, grads = step(x)
        for parameter, grad in zip(optimizer.parameters, grads, strict=True):
            assert np.all(np.isfinite(grad.asnumpy())) and np.any(grad.asnumpy()), parameter.name
        optimizer(grads)
        values.append(float(value))
    assert values[-1] < values[0] / 2, values


def test_non_contiguous_inputs():
    """Transposed views, slices of a wider tensor, and values with a stride of zero."""
    problem = make_problem(7, T=40, K=8, V=8)
    want, plain = run(problem), tensors(problem)
    turned = {n: Tensor(np.ascontiguousarray(np.swapaxes(problem.inputs[n], 1, 2))).swapaxes(1, 2) for n in STORED}
    assert_same_bits(run(problem, tensors=turned), want)
    wide = ops.concat((plain["q"], plain["k"], plain["v"], plain["g"]), 2)
    split = {n: wide[:, :, 2 * i : 2 * i + 2] for i, n in enumerate(("q", "k", "v", "g"))}
    assert_same_bits(run(problem, tensors=split), want)


def test_gradient_with_stride_zero():
    """The gradient of a plain sum is one number expanded to the shape of the output."""
    problem = make_problem(8, T=20)
    problem.d_out[...] = 1.0
    want = run(problem)

    def loss(q, k, v, g, beta, a_log, dt_bias):
        return chunk_kda(q, k, v, g, beta, a_log=a_log, dt_bias=dt_bias, layout="BSND", **problem.options)[0].sum()

    grads = ms.grad(loss, tuple(range(7)))(*tensors(problem).values())
    for name, grad in zip(problem.inputs, grads, strict=True):
        assert np.array_equal(grad.asnumpy(), want[name]), name


@pytest.mark.parametrize("cu_form", ["host", "tensor"])
def test_values_behind_the_inputs_change_nothing(cu_form):
    """Every input is a slice of a buffer that goes on with 1e30; the last chunk has a tail that must not be read."""
    problem = make_problem(9, lens=(5, 0, 70), K=12, V=20, initial_state=True, d_final=True)

    def guarded(n: str, x: np.ndarray) -> Tensor:
        if n in STORED:
            wide = np.concatenate([x, np.full((1, 64, *x.shape[2:]), 1e30, np.float32)], 1)
            return Tensor(wide)[:, : x.shape[1]]
        wide = np.concatenate([x.reshape(-1), np.full(4096, 1e30, np.float32)])
        return Tensor(wide)[: x.size].reshape(x.shape)

    inputs = dict(problem.inputs)
    if cu_form == "tensor":
        inputs.pop("initial_state")
    assert_same_bits(run(problem, cu_form=cu_form, tensors={n: guarded(n, x) for n, x in inputs.items()}),
                     run(problem, cu_form=cu_form))  # fmt: skip


@pytest.mark.parametrize("runs", [3, pytest.param(20, marks=pytest.mark.ci)])
def test_runs_are_bitwise_equal(runs):
    problem = make_problem(10, lens=(65, 66, 71, 79), Hv=4, initial_state=True, d_final=True)
    want = run(problem)
    for _ in range(runs - 1):
        assert_same_bits(run(problem), want)


@pytest.mark.parametrize("d_out, d_final", [(True, False), (False, True)])
@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_one_output_alone_in_the_loss(jit, d_out, d_final):
    """No gradient arrives for the other one: zeros in PyNative, None in graph mode."""
    problem = make_problem(11, **{**SMALL, "d_out": d_out, "d_final": d_final})
    check(run(problem, jit=jit), problem.truth())
