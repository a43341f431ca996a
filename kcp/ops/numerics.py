"""Elementwise functions that are right to float32 rounding on every device.

MindSpore's float32 ``exp`` and ``sigmoid`` are off by up to 2e-5 (relative) on the CPU, too much for gates and decays; its float64
``exp`` is right, its float64 ``log1p`` is not for small arguments. On the CPU these helpers therefore work in float64 and round once.
"""

import math

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.common._grad_function import _Function
from mindspore.ops import constexpr

LN2 = math.log(2.0)
BLOCK = 1 << 20  # numbers that PyNative widens at a time


@constexpr
def wide_dtype():
    """Dtype in which transcendental functions and long sums are evaluated: float64 on the CPU, float32 elsewhere."""
    return ms.float64 if ms.get_context("device_target") == "CPU" else ms.float32


@constexpr(check=False)
def _is_none(value):
    return value is None


def _probe():
    return 0


def in_graph() -> bool:
    """True while a graph is being compiled (``ms.jit`` or GRAPH_MODE), False in PyNative."""
    return _is_none(_probe)


def exp(x: Tensor) -> Tensor:
    """e^x, float32 in and out, relative error 6e-8."""
    return ops.cast(ops.exp(ops.cast(x, wide_dtype())), ms.float32)


def exp2(x: Tensor) -> Tensor:
    """2^x, float32 in and out, relative error 6e-8 (the scaling by ln 2 happens in the wide dtype)."""
    return ops.cast(ops.exp(ops.cast(x, wide_dtype()) * LN2), ms.float32)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), float32 in and out."""
    return _sigmoid(x) if in_graph() else _Lean.apply(x, _sigmoid, _sigmoid_grad)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), float32 in and out."""
    return _silu(x) if in_graph() else _Lean.apply(x, _silu, silu_grad)


def _sigmoid(x):
    return ops.cast(ops.sigmoid(ops.cast(x, wide_dtype())), ms.float32)


def _sigmoid_grad(x, grad):
    s = ops.sigmoid(ops.cast(x, wide_dtype()))
    return ops.cast(ops.cast(grad, wide_dtype()) * s * (1.0 - s), ms.float32)


def _silu(x):
    return x * _sigmoid(x)


def silu_grad(x: Tensor, grad: Tensor) -> Tensor:
    """Gradient of :func:`silu` at ``x``, for the gradient of its result; float32 in and out."""
    wide = ops.cast(x, wide_dtype())
    s = ops.sigmoid(wide)
    return ops.cast(ops.cast(grad, wide_dtype()) * s * (1.0 + wide * (1.0 - s)), ms.float32)


def _in_blocks(function, *tensors):
    """An elementwise function of equally shaped tensors, a block of numbers at a time."""
    shape, size = tensors[0].shape, tensors[0].size
    if size <= BLOCK:
        return function(*tensors)
    flat = [x.reshape((-1,)) for x in tensors]
    parts = [function(*(x[i : i + BLOCK] for x in flat)) for i in range(0, size, BLOCK)]
    return ops.concat(tuple(parts), 0).reshape(shape)


class _Lean(_Function):
    """An elementwise function in PyNative that keeps its input alone, and no wide copies of whole tensors."""

    @staticmethod
    def forward(ctx, x, function, gradient):
        ctx.save_for_backward(x)
        ctx.gradient = gradient
        return _in_blocks(function, x)

    @staticmethod
    def backward(ctx, grad):
        return _in_blocks(ctx.gradient, ctx.saved_tensors[0], grad), None, None


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), linear above 20, right in the relative sense for very negative x; float32 in and out.

    log(1+t) is taken as log(u) * t / (u - 1) with u = 1 + t, which cancels the rounding of u.
    """
    wide = ops.cast(x, wide_dtype())
    t = ops.exp(-ops.abs(wide))
    u = 1.0 + t
    rounded_away = u == 1.0
    log1p = ops.select(rounded_away, t, ops.log(u) * t / ops.select(rounded_away, u, u - 1.0))
    return ops.cast(0.5 * (wide + ops.abs(wide)) + log1p, ms.float32)


def total(x: Tensor, axis: tuple[int, ...]) -> Tensor:
    """Sum over ``axis`` accumulated in the wide dtype, returned as float32."""
    return ops.cast(ops.cast(x, wide_dtype()).sum(axis), ms.float32)


def matmul(a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    """Batched product of the last two axes, ``op(a) @ op(b)``, float32; the batch axes must be equal."""
    return ops.BatchMatMul(transpose_a, transpose_b)(a, b)
