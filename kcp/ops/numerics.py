"""Elementwise functions that are right to float32 rounding on every device.

MindSpore's float32 ``exp`` and ``sigmoid`` are off by up to 2e-5 (relative) on the CPU, too much for gates and decays; its float64
``exp`` is right, its float64 ``log1p`` is not for small arguments. On the CPU these helpers therefore work in float64 and round once.
"""

import math

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.ops import constexpr

LN2 = math.log(2.0)


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
    return ops.cast(ops.sigmoid(ops.cast(x, wide_dtype())), ms.float32)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), float32 in and out."""
    return x * sigmoid(x)


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
