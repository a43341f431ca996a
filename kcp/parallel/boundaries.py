"""Global document boundaries of every row of a batch: their forms, their checks, and rows laid one after the other."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from kcp.ops.options import check_cu_seqlens, check_tensor, is_host_boundaries, refuse_boundaries


def host_rows(cu_seqlens: Tensor):
    """The values of a boundary Tensor: a tuple for one axis, a tuple of tuples for two."""
    values = cu_seqlens.asnumpy()
    if values.dtype != np.int32:
        raise TypeError(f"cu_seqlens has dtype {cu_seqlens.dtype}; allowed: Int32, or host integers")
    return tuple(tuple(row) for row in values.tolist()) if values.ndim == 2 else tuple(values.reshape(-1).tolist())


def check_rows(rows, batch: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Boundaries of every row, each from 0 to ``num_tokens``: one list of integers for a batch of one, or one list a row.

    Raises:
        ValueError, TypeError: naming the row, what it holds and what is allowed.
    """
    if not is_host_boundaries(rows):
        refuse_boundaries(rows)
    rows = list(rows)
    if not rows or not is_host_boundaries(rows[0]):
        rows = [rows]
    if len(rows) != batch:
        raise ValueError(f"cu_seqlens has boundaries for {len(rows)} rows; allowed: one list a row, {batch} in all")
    return tuple(check_cu_seqlens(row, num_tokens, f"cu_seqlens of row {b}" if batch > 1 else "cu_seqlens") for b, row in enumerate(rows))


def check_row_tensor(info, batch: int) -> int:
    """Check ``(shape, dtype)`` of a boundary Tensor ``[M + 1]`` (one row) or ``[B, M + 1]``; returns M."""
    if len(info[0]) == 1 and batch == 1:
        check_tensor("cu_seqlens", info, "M+1", {}, ("Int32",))
    else:
        check_tensor("cu_seqlens", info, "B M+1", {"B": batch}, ("Int32",))
    if info[0][-1] < 2:
        raise ValueError(f"cu_seqlens has shape {tuple(info[0])}; allowed: at least two boundaries a row")
    return info[0][-1] - 1


def flat_rows(rows: tuple, num_tokens: int) -> tuple[int, ...]:
    """Boundaries of all rows laid one after the other, ``num_tokens`` each."""
    flat = [0]
    for b, row in enumerate(rows):
        flat += [b * num_tokens + c for c in row[1:]]
    return tuple(flat)


def flat_tensor_rows(boundaries: Tensor, num_tokens: int) -> Tensor:
    """``[B, M + 1] -> [B M + 1]``, the same for a boundary Tensor."""
    batch, per_row = boundaries.shape[0], boundaries.shape[1] - 1
    offset = _row_offsets(batch, num_tokens)
    return ops.concat(((boundaries[:, :per_row] + offset[:batch]).reshape(-1), offset[batch]), 0)


@constexpr
def _row_offsets(batch: int, num_tokens: int) -> Tensor:
    return Tensor(np.arange(batch + 1)[:, None] * num_tokens, ms.int32)
