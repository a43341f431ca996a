"""Linear, embedding, norms, SwiGLU and cross entropy against float64 NumPy, values and all gradients."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from kcp.layers.cross_entropy import SummedCrossEntropy, valid_tokens
from kcp.layers.linear import Embedding, Linear
from kcp.layers.mlp import SwiGLU
from kcp.layers.norms import GatedRMSNorm, RMSNorm

pytestmark = pytest.mark.fast
EPS = 1e-5
FORWARD, BACKWARD = 1e-6, 5e-6


@pytest.fixture(params=[ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["pynative", "graph"], autouse=True)
def mode(request):
    ms.set_device("CPU")
    ms.set_context(mode=request.param)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def numeric_gradient(function, x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Central differences of a scalar float64 function."""
    gradient = np.zeros_like(x)
    flat, out = x.reshape(-1), gradient.reshape(-1)
    for i in range(flat.size):
        kept = flat[i]
        flat[i] = kept + step
        above = function()
        flat[i] = kept - step
        below = function()
        flat[i] = kept
        out[i] = (above - below) / (2 * step)
    return gradient


class Weighted(nn.Cell):
    """Scalar ``sum(cell(*inputs) * cotangent)``."""

    def __init__(self, cell, cotangent):
        super().__init__()
        self.cell = cell
        self.cotangent = Tensor(cotangent.astype(np.float32))

    def construct(self, *inputs):
        return (self.cell(*inputs) * self.cotangent).sum()


def check(cell, reference, inputs, rng, scale=None):
    """Compare ``cell(*inputs)`` and the gradients of inputs and weights with ``reference(inputs, weights)``."""
    weights, names = {}, [parameter.name for parameter in cell.trainable_params()]
    for parameter in cell.trainable_params():
        value = rng.normal(size=parameter.shape) * (scale or 1.0) + (1.0 if scale is None else 0.0)
        value = value.astype(np.float32)
        parameter.set_data(Tensor(value))
        weights[parameter.name] = value.astype(np.float64)
    wide = [x.astype(np.float64) for x in inputs]
    want = reference(wide, weights)
    cotangent = rng.normal(size=want.shape).astype(np.float32)
    tensors = [Tensor(x.astype(np.float32)) for x in inputs]
    assert relative(cell(*tensors).asnumpy(), want) < FORWARD
    gradient = ms.grad(Weighted(cell, cotangent), tuple(range(len(inputs))), cell.trainable_params())
    of_inputs, of_weights = gradient(*tensors)

    def loss():
        return float((reference(wide, weights) * cotangent).sum())

    of_inputs = of_inputs if isinstance(of_inputs, tuple) else (of_inputs,)
    for x, got in zip(wide, of_inputs, strict=True):
        assert relative(got.asnumpy(), numeric_gradient(loss, x)) < BACKWARD
    for name, got in zip(names, of_weights, strict=True):
        assert relative(got.asnumpy(), numeric_gradient(loss, weights[name])) < BACKWARD, name


def np_rms(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)


def np_sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_linear_with_bias():
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(2, 3, 5)).astype(np.float32)]
    check(Linear(5, 4, has_bias=True), lambda x, w: x[0] @ w["weight"].T + w["bias"], inputs, rng)


def test_rms_norm():
    rng = np.random.default_rng(1)
    inputs = [(3 * rng.normal(size=(2, 3, 8))).astype(np.float32)]
    check(RMSNorm(8, EPS), lambda x, w: np_rms(x[0]) * w["weight"], inputs, rng)


def test_gated_rms_norm_with_saturated_gates():
    rng = np.random.default_rng(2)
    gate = (8 * rng.normal(size=(2, 3, 8))).astype(np.float32)
    inputs = [rng.normal(size=(2, 3, 8)).astype(np.float32), gate]
    check(GatedRMSNorm(8, EPS), lambda x, w: np_rms(x[0]) * w["weight"] * np_sigmoid(x[1]), inputs, rng)


def test_swiglu():
    rng = np.random.default_rng(3)

    def reference(x, w):
        gate = x[0] @ w["gate_proj.weight"].T
        return (gate * np_sigmoid(gate) * (x[0] @ w["up_proj.weight"].T)) @ w["down_proj.weight"].T

    check(SwiGLU(6, 10), reference, [rng.normal(size=(2, 3, 6)).astype(np.float32)], rng, scale=1.0)


def test_embedding_gathers_and_adds_up_the_gradients_of_repeated_tokens():
    cell = Embedding(7, 4)
    ids = np.array([[1, 3, 3], [6, 1, 3]], np.int32)
    table = cell.weight.asnumpy()
    assert np.array_equal(cell(Tensor(ids)).asnumpy(), table[ids])
    cotangent = np.random.default_rng(4).normal(size=(2, 3, 4)).astype(np.float32)
    (gradient,) = ms.grad(Weighted(cell, cotangent), None, cell.trainable_params())(Tensor(ids))
    want = np.zeros_like(table)
    np.add.at(want, ids, cotangent)
    assert relative(gradient.asnumpy(), want) < FORWARD


def np_cross_entropy(logits, labels, weights):
    shifted = logits - logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(-1))
    return ((log_sum - shifted[np.arange(len(labels)), np.maximum(labels, 0)]) * weights).sum()


def test_cross_entropy_counts_valid_tokens_alone():
    rng = np.random.default_rng(5)
    logits = (4 * rng.normal(size=(9, 11))).astype(np.float32)
    labels = np.array([0, 10, 3, -100, 5, 5, 2, 7, 1], np.int32)
    mask = np.array([1, 1, 0, 1, 1, 1, 1, 0, 1], np.int32)
    weights = valid_tokens(Tensor(labels), Tensor(mask))
    assert weights.asnumpy().tolist() == [1, 1, 0, 0, 1, 1, 1, 0, 1]
    cell = SummedCrossEntropy()
    inputs = (Tensor(logits), Tensor(labels), weights)
    wide = logits.astype(np.float64)
    want = np_cross_entropy(wide, labels, weights.asnumpy())
    assert abs(float(cell(*inputs)) / want - 1) < FORWARD
    gradient = ms.grad(cell, 0)(*inputs)
    want = numeric_gradient(lambda: np_cross_entropy(wide, labels, weights.asnumpy()), wide)
    assert relative(gradient.asnumpy(), want) < BACKWARD
    assert np.all(gradient.asnumpy()[[2, 3, 7]] == 0)
