"""Linear, embedding, norms, SwiGLU and cross entropy against float64 NumPy, values and all gradients."""

import mindspore as ms
import numpy as np
import pytest
from layer_checks import BACKWARD, EPS, FORWARD, Weighted, check, np_rms, np_sigmoid, numeric_gradient, relative
from mindspore import Tensor

from kcp.layers.cross_entropy import SummedCrossEntropy, valid_tokens
from kcp.layers.linear import Embedding, Linear
from kcp.layers.mlp import SwiGLU
from kcp.layers.norms import GatedRMSNorm, RMSNorm
from kcp.ops import backends


@pytest.fixture(params=[ms.PYNATIVE_MODE, ms.GRAPH_MODE], ids=["pynative", "graph"], autouse=True)
def mode(request):
    ms.set_device("CPU")
    ms.set_context(mode=request.param)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


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


@pytest.fixture(params=backends.available())
def backend(request):
    with backends.use(request.param):
        yield request.param


def test_cross_entropy_counts_valid_tokens_alone(backend):
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


@pytest.mark.parametrize("columns", [1, 15, 16, 259, 70_001])
def test_cross_entropy_of_any_vocabulary_and_size_of_logits(backend, columns):
    """Large logits, masked columns (-inf), a label's logit far below the others: float64's losses and gradients."""
    rng = np.random.default_rng(columns)
    logits = (30 * rng.normal(size=(6, columns))).astype(np.float32)
    logits[1] += 3e4
    logits[2] = np.where(rng.random(columns) < 0.5, -np.inf, logits[2])
    labels = rng.integers(0, columns, 6).astype(np.int32)
    logits[2, labels[2]] = 0.0
    logits[3, labels[3]] = -500.0
    weights = np.array([1, 2, 0.5, 1, 0, 1], np.float32)
    loss, gradients = ms.value_and_grad(SummedCrossEntropy(), (0, 2))(Tensor(logits), Tensor(labels), Tensor(weights))
    exact = np_cross_entropy(logits.astype(np.float64), labels, weights)
    assert abs(float(loss) - exact) <= FORWARD * exact
    e = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    want = e / e.sum(-1, keepdims=True)
    want[np.arange(6), labels] -= 1
    assert np.max(np.abs(gradients[0].asnumpy() - want * weights[:, None])) <= BACKWARD
    assert not np.any(gradients[1].asnumpy())
