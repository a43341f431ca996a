"""Affine summaries of runs of tokens: ``H_out = M H_in + E`` as one tensor ``[..., K, V + K]`` = ``[E | M]``, float32.

They compose associatively (the prefix scan that makes context parallelism of the delta rule possible)::

    compose(later, earlier) = [M_l E_e + E_l | M_l M_e]

The backward summaries ``[dE | dM]`` compose the same way against time: ``dH_in = dM dH_out + dE``, dM = M^T.
"""

import mindspore as ms
from mindspore import Tensor, ops

from kcp.ops.numerics import matmul


def split(summary: Tensor) -> tuple[Tensor, Tensor]:
    """``(E [..., K, V], M [..., K, K])``."""
    width = summary.shape[-1] - summary.shape[-2]
    return summary[..., :width], summary[..., width:]


def identity(batch: int, heads: int, width: int, value_width: int) -> Tensor:
    """``[batch, heads, width, value_width + width]``, the summary ``[0 | I]`` of no token."""
    eye = ops.broadcast_to(ops.eye(width, width, ms.float32), (batch, heads, width, width))
    return ops.concat((ops.zeros((batch, heads, width, value_width), ms.float32), eye), -1)


def compose(second: Tensor, first: Tensor) -> Tensor:
    """Summary of ``first`` applied, then ``second`` (in time order for forward summaries, against it for backward ones)."""
    e, m = split(second)
    width = e.shape[-1]
    product = matmul(m, first)
    return ops.concat((product[..., :width] + e, product[..., width:]), -1)


def apply(summary: Tensor, state: Tensor) -> Tensor:
    """M state + E."""
    e, m = split(summary)
    return matmul(m, state) + e


def prefix(summaries: Tensor, rank: int, initial_state: Tensor) -> Tensor:
    """State that enters ``rank``: ranks 0 .. rank-1 applied to the initial state in time order.

    Args:
        summaries: ``[W, N, Hv, K, V + K]``, rank order = time order.
        initial_state: ``[N, Hv, K, V]``.
    """
    state = initial_state
    for r in range(rank):
        state = apply(summaries[r], state)
    return state


def suffix(d_e: Tensor, d_m: Tensor, rank: int, d_final: Tensor) -> Tensor:
    """State gradient that enters ``rank`` from later ranks: ranks W-1 .. rank+1 applied to the final state's gradient.

    Args:
        d_e: ``[W, N, Hv, K, V]``; d_m ``[W, N, Hv, K, K]``.
        d_final: ``[N, Hv, K, V]``.
    """
    grad = d_final
    for i in range(d_e.shape[0] - 1 - rank):
        r = d_e.shape[0] - 1 - i
        grad = matmul(d_m[r], grad) + d_e[r]
    return grad
