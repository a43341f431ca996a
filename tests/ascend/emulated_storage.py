"""What the emulated kernels store and check: bfloat16 values, types and shapes, packed sequences, chunks."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

CHUNK, WIDTH = 64, 128
LN2 = np.log(2.0)
B16, F32 = (ms.bfloat16,), (ms.float32,)
EITHER = (ms.bfloat16, ms.float32)
calls: list[str] = []  # names of the functions called since the last installation


def stored(x: np.ndarray) -> np.ndarray:
    """float32 values as bfloat16 holds them (round to nearest even)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def bf16(x: np.ndarray) -> Tensor:
    return Tensor(stored(x)).astype(ms.bfloat16)


def f32(x: np.ndarray) -> Tensor:
    return Tensor(np.ascontiguousarray(x, np.float32))


def read(x: Tensor) -> np.ndarray:
    return ops.cast(x, ms.float32).asnumpy()


def need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def need_tensor(name: str, x, dtypes: tuple, shape: tuple) -> None:
    """Type and shape of a kernel's input; None in ``shape`` is any size."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a Tensor, but got {type(x).__name__}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} has invalid dtype {x.dtype}, expected {' or '.join(str(d) for d in dtypes)}")
    ok = len(x.shape) == len(shape) and all(want is None or want == have for want, have in zip(shape, x.shape, strict=True))
    need(ok, f"{name} has invalid shape {tuple(x.shape)}, expected {shape}")


def sequences(batch: int, tokens: int, cu_seqlens, chunk_indices, strictly: bool = True) -> list[list[tuple[int, int, int]]]:
    """Chunks ``(row, begin, end)`` of every sequence."""
    if cu_seqlens is None:
        need(chunk_indices is None, "chunk_indices needs cu_seqlens")
        bounds = [[(b, 0, tokens)] for b in range(batch)]
    else:
        need(isinstance(cu_seqlens, (list, tuple)) and all(isinstance(n, int) for n in cu_seqlens), "cu_seqlens must be host integers")
        need(batch == 1, f"varlen input needs B=1, but got {batch}")
        cu = list(cu_seqlens)
        need(len(cu) > 1 and cu[0] == 0 and cu[-1] == tokens, f"cu_seqlens must go from 0 to {tokens}, but got {cu}")
        need(not strictly or all(a < b for a, b in zip(cu[:-1], cu[1:], strict=True)), f"cu_seqlens must rise strictly, but got {cu}")
        bounds = [[(0, a, b)] for a, b in zip(cu[:-1], cu[1:], strict=True)]
    result = [[(r, c, min(c + CHUNK, e)) for c in range(b, e, CHUNK)] for ((r, b, e),) in bounds]
    if chunk_indices is not None:
        want = [x for n, chunks in enumerate(result) for c in range(len(chunks)) for x in (n, c)]
        need(list(chunk_indices) == want, f"chunk_indices must be {want[:8]}..., but got {list(chunk_indices)[:8]}")
    return result


def chunk_number(batch: int, all_chunks: list) -> dict:
    """``(row, begin) -> position in h``: rows have chunks of their own, packed sequences share them."""
    place, count = {}, dict.fromkeys(range(batch), 0)
    for chunks in all_chunks:
        for row, begin, _ in chunks:
            place[row, begin] = count[row]
            count[row] += 1
    return place


def need_attributes(chunk_size: int, use_exp2: bool = True) -> None:
    need(chunk_size == CHUNK, f"chunk_size must be {CHUNK}, but got {chunk_size}")
    need(use_exp2, "use_exp2 must be True")
