"""Token layouts and head groups.

Inside, tensors are head-major ``[B, H, T, D]`` (beta ``[B, H, T]``); ``NTD`` and ``TND`` have no batch axis and become B = 1.
"""

from mindspore import Tensor, ops

LAYOUTS = ("BNSD", "BSND", "NTD", "TND")


def is_packed_layout(layout: str) -> bool:
    """True for the layouts without a batch axis."""
    return layout in ("NTD", "TND")


def to_head_major(x: Tensor, layout: str) -> Tensor:
    """``x`` in ``layout`` (with or without its last feature axis) -> ``[B, H, T(, D)]``."""
    if layout in ("NTD", "TND"):
        x = ops.expand_dims(x, 0)
    if layout in ("BSND", "TND"):
        x = ops.swapaxes(x, 1, 2)
    return x


def from_head_major(x: Tensor, layout: str) -> Tensor:
    """``[B, H, T(, D)]`` -> ``layout``."""
    if layout in ("BSND", "TND"):
        x = ops.swapaxes(x, 1, 2)
    if layout in ("NTD", "TND"):
        x = ops.squeeze(x, 0)
    return x


def token_major(layout: str) -> str:
    """Layout of the attention output for inputs in ``layout`` (section 4.3 of the Hyper-Parallel document)."""
    return "TND" if layout in ("NTD", "TND") else "BSND"


def expand_heads(x: Tensor, num_v_heads: int) -> Tensor:
    """``[B, Hk, ...] -> [B, Hv, ...]``: every key head serves Hv / Hk value heads in a row."""
    num_heads = x.shape[1]
    if num_heads == num_v_heads:
        return x
    shape = x.shape
    repeat = num_v_heads // num_heads
    x = ops.broadcast_to(ops.expand_dims(x, 2), shape[:2] + (repeat,) + shape[2:])
    return x.reshape(shape[:1] + (num_v_heads,) + shape[2:])


def reduce_heads(x: Tensor, num_heads: int) -> Tensor:
    """Adjoint of :func:`expand_heads`: ``[B, Hv, ...] -> [B, Hk, ...]`` by summing each group of value heads."""
    shape = x.shape
    if shape[1] == num_heads:
        return x
    return x.reshape(shape[:1] + (num_heads, shape[1] // num_heads) + shape[2:]).sum(2)


def transpose_state(x: Tensor, state_v_first: bool) -> Tensor:
    """``[..., K, V] <-> [..., V, K]`` when ``state_v_first``, else unchanged."""
    return ops.swapaxes(x, -1, -2) if state_v_first else x
