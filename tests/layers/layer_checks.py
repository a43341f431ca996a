"""Layers against float64 NumPy: values, and every gradient against central differences of the NumPy function."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

EPS = 1e-5
FORWARD, BACKWARD = 1e-6, 5e-6


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
