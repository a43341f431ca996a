"""Mathematics inside a chunk, batched over all chunks, in MindSpore ops (design section 2; KDA paper, chunkwise form).

Shapes: B batch, H value heads, N chunks, C tokens a chunk, K key width, V value width, S = 16 tokens a sub-block, J = C / S.
Decays are powers of two, and no exponent is ever positive: pairs in different sub-blocks are normalised at the row block's start, pairs
inside a sub-block use running products of the one-token decays e = 2^a2 (a2 = a / ln 2).
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from kcp.ops.numerics import LN2, exp2, matmul

SUB_BLOCK = 16


@constexpr
def _constant(kind: str, size: int) -> Tensor:
    """Float32 constants: 'lower' (ones on and below the diagonal), 'strict' (below it), 'upper' (above it), 'eye', 'exponents'."""
    ones = np.ones((size, size), np.float32)
    if kind == "exponents":
        return Tensor(_exponent_sums(size))
    table = {
        "lower": np.tril(ones),
        "strict": np.tril(ones, -1),
        "upper": np.triu(ones, 1),
        "eye": np.eye(size, dtype=np.float32),
    }
    return Tensor(table[kind])


def _exponent_sums(chunk_size: int) -> np.ndarray:
    """Rows that sum a2 over a chunk into every exponent needed; each row adds terms of one sign, so nothing cancels."""
    t = np.arange(chunk_size)
    row, col = t[:, None], t[None, :]
    blocks = [col <= row, col > row, (col <= row) & (col // SUB_BLOCK == row // SUB_BLOCK)]
    for start in range(SUB_BLOCK, chunk_size, SUB_BLOCK):
        blocks.append((col > row[:start]) & (col < start))
    return np.concatenate(blocks).astype(np.float32)


def batch_constant(kind: str, size: int, like: Tensor) -> Tensor:
    """A constant matrix repeated over the batch axes of ``like`` (``[..., rows, cols]``)."""
    table = _constant(kind, size)
    return ops.broadcast_to(table, like.shape[:-2] + table.shape)


def decays(a: Tensor):
    """Decays of every chunk.

    Args:
        a: ``[B, H, N, C, K]`` natural-log decay, zero on padded rows.

    Returns:
        ``(cumulative, from_start, to_end, in_block, to_blocks)``: ``cumulative`` G = chunk-local cumulative sum of a / ln 2,
        ``from_start`` 2^G, ``to_end`` 2^(G_last - G), ``in_block`` 2^(G - G at the sub-block's start), each ``[B, H, N, C, K]``;
        ``to_blocks[I-1]`` 2^(sum of a2 after the row up to the start of sub-block I) ``[B, H, N, S I, K]``.
    """
    c = a.shape[3]
    sums = matmul(batch_constant("exponents", c, a), a / LN2)
    powers = exp2(sums)
    to_blocks, row = [], 3 * c
    for start in range(SUB_BLOCK, c, SUB_BLOCK):
        to_blocks.append(powers[..., row : row + start, :])
        row += start
    return (
        sums[..., :c, :],
        powers[..., :c, :],
        powers[..., c : 2 * c, :],
        powers[..., 2 * c : 3 * c, :],
        tuple(to_blocks),
    )


def _to_blocks(x: Tensor) -> Tensor:
    """``[B, H, N, C, D] -> [B, H, N, J, S, D]``."""
    shape = x.shape
    return x.reshape(shape[:3] + (shape[3] // SUB_BLOCK, SUB_BLOCK, shape[4]))


def _place_blocks(diagonal: Tensor, off_diagonal: tuple) -> Tensor:
    """Block rows -> ``[B, H, N, C, C]``: diagonal ``[B, H, N, J, S, S]``, off_diagonal[I-1] ``[B, H, N, S, S I]``."""
    num_blocks = diagonal.shape[3]
    rows = []
    for i in range(num_blocks):
        parts = [] if i == 0 else [off_diagonal[i - 1]]
        parts.append(diagonal[:, :, :, i])
        if i + 1 < num_blocks:
            parts.append(ops.zeros(diagonal.shape[:3] + (SUB_BLOCK, (num_blocks - 1 - i) * SUB_BLOCK), ms.float32))
        rows.append(ops.concat(tuple(parts), -1) if len(parts) > 1 else parts[0])
    return ops.concat(tuple(rows), -2) if num_blocks > 1 else rows[0]


def pair_scores(q: Tensor, k: Tensor, a: Tensor, in_block: Tensor, to_blocks: tuple):
    """Decayed scores of all pairs of a chunk: ``sum_d x_id k_jd 2^(G_id - G_jd)`` for x = q (j <= i) and x = k (j < i).

    Args:
        q, k, a, in_block: ``[B, H, N, C, K]``.

    Returns:
        ``(scores_q, scores_k)`` ``[B, H, N, C, C]``; zero above the diagonal, scores_k on it too.
    """
    qb, kb, e = _to_blocks(q), _to_blocks(k), _to_blocks(exp2(a / LN2))
    diagonal_q, diagonal_k = _diagonal_scores(qb, kb, e)
    decayed = _to_blocks(in_block)
    rows = ops.concat((qb * decayed, kb * decayed), -2)
    off_q, off_k = [], []
    for i in range(1, qb.shape[3]):
        scores = matmul(rows[:, :, :, i], k[..., : i * SUB_BLOCK, :] * to_blocks[i - 1], transpose_b=True)
        off_q.append(scores[..., :SUB_BLOCK, :])
        off_k.append(scores[..., SUB_BLOCK:, :])
    return _place_blocks(diagonal_q, tuple(off_q)), _place_blocks(diagonal_k, tuple(off_k))


def _diagonal_scores(q: Tensor, k: Tensor, e: Tensor):
    """Scores inside each sub-block ``[B, H, N, J, S, K] -> 2 x [B, H, N, J, S, S]``; exact zeros under any decay."""
    past = ops.zeros(k.shape, ms.float32)  # row j: k_j 2^(G_i - G_j) for the current i, zero for j > i
    eye = _constant("eye", SUB_BLOCK)
    rows = []
    for i in range(SUB_BLOCK):
        past = past * e[..., i : i + 1, :] + eye[:, i : i + 1] * k[..., i : i + 1, :]
        rows.append(matmul(ops.concat((q[..., i : i + 1, :], k[..., i : i + 1, :]), -2), past, transpose_b=True))
    scores = ops.stack(tuple(rows), -3)
    return scores[..., 0, :], scores[..., 1, :] * _constant("strict", SUB_BLOCK)


def pair_grads(d_q: Tensor, d_k: Tensor, q: Tensor, k: Tensor, a: Tensor, in_block: Tensor, to_blocks: tuple, beta: Tensor):
    """Adjoint of :func:`pair_scores` over the pairs j < i (pairs i = j carry no decay and are left to the caller).

    Args:
        d_q: ``[B, H, N, C, C]`` gradient of scores_q (dAqk, scale included), strictly lower.
        d_k: ``[B, H, N, C, C]`` gradient of scores_k before beta_i, i.e. dL of ``L_ij = beta_i scores_k_ij``, strictly lower.
        beta: ``[B, H, N, C, 1]``.

    Returns:
        ``(x, y, w)`` ``[B, H, N, C, K]``: gradient of q, gradient of k as a row divided by beta, gradient of k as a column.
    """
    qb, kb, e = _to_blocks(q), _to_blocks(k), _to_blocks(exp2(a / LN2))
    d_kb = d_k * beta
    num_blocks = qb.shape[3]
    diag = [_diagonal_of(m, num_blocks) for m in (d_q, d_k, d_kb)]
    x, y, w = _diagonal_grads(diag[0], diag[1], diag[2], qb, kb, e)
    xs, ys, ws = [x[:, :, :, 0]], [y[:, :, :, 0]], []
    column = ops.zeros(q.shape, ms.float32)
    decayed = _to_blocks(in_block)
    for i in range(1, num_blocks):
        start, stop = i * SUB_BLOCK, (i + 1) * SUB_BLOCK
        dq_i, dk_i, dkb_i = d_q[..., start:stop, :start], d_k[..., start:stop, :start], d_kb[..., start:stop, :start]
        past = k[..., :start, :] * to_blocks[i - 1]
        xs.append(x[:, :, :, i] + decayed[:, :, :, i] * matmul(dq_i, past))
        ys.append(y[:, :, :, i] + decayed[:, :, :, i] * matmul(dk_i, past))
        back = matmul(dq_i, qb[:, :, :, i] * decayed[:, :, :, i], transpose_a=True)
        back = back + matmul(dkb_i, kb[:, :, :, i] * decayed[:, :, :, i], transpose_a=True)
        pad = ops.zeros(q.shape[:3] + (q.shape[3] - start, q.shape[4]), ms.float32)
        column = column + ops.concat((back * to_blocks[i - 1], pad), -2)
    for i in range(num_blocks):
        ws.append(w[:, :, :, i])
    if num_blocks == 1:
        return xs[0], ys[0], ws[0]
    return ops.concat(tuple(xs), -2), ops.concat(tuple(ys), -2), ops.concat(tuple(ws), -2) + column


def _diagonal_of(m: Tensor, num_blocks: int) -> Tensor:
    """Diagonal sub-blocks ``[B, H, N, C, C] -> [B, H, N, J, S, S]``."""
    blocks = []
    for i in range(num_blocks):
        start, stop = i * SUB_BLOCK, (i + 1) * SUB_BLOCK
        blocks.append(m[..., start:stop, start:stop])
    return ops.stack(tuple(blocks), 3)


def _diagonal_grads(d_q, d_k, d_kb, q, k, e):
    """Pairs j < i inside a sub-block, by running products forward (rows) and backward (columns); ``[B, H, N, J, S, *]``."""
    eye = _constant("eye", SUB_BLOCK)
    past = ops.zeros(k.shape, ms.float32)
    x_rows, y_rows = [], []
    for i in range(SUB_BLOCK):
        past = past * e[..., i : i + 1, :]
        both = matmul(ops.concat((d_q[..., i : i + 1, :], d_k[..., i : i + 1, :]), -2), past)
        x_rows.append(both[..., :1, :])
        y_rows.append(both[..., 1:, :])
        past = past + eye[:, i : i + 1] * k[..., i : i + 1, :]
    future = ops.zeros(k.shape, ms.float32)  # row j: sum over i' > i of 2^(G_i' - G_i) (...) for the current i
    w_rows = []
    for i in range(SUB_BLOCK - 1, -1, -1):
        w_rows.append(future[..., i : i + 1, :])
        future = future + matmul(d_q[..., i : i + 1, :], q[..., i : i + 1, :], transpose_a=True)
        future = (future + matmul(d_kb[..., i : i + 1, :], k[..., i : i + 1, :], transpose_a=True)) * e[..., i : i + 1, :]
    return ops.concat(tuple(x_rows), -2), ops.concat(tuple(y_rows), -2), ops.concat(tuple(w_rows[::-1]), -2)


def inverse_unit_lower(l_strict: Tensor) -> Tensor:
    """(I + L)^-1 for strictly lower L ``[B, H, N, C, C]``: substitution in 16 x 16 blocks, then block by block.

    (Repeated squaring of L is faster on paper and wrong for correlated keys under slow decay.)
    """
    chunk_size = l_strict.shape[-1]
    num_blocks = chunk_size // SUB_BLOCK
    blocks = _diagonal_of(l_strict, num_blocks)
    eye = _constant("eye", SUB_BLOCK)
    inverse = ops.zeros(blocks.shape, ms.float32)
    for i in range(SUB_BLOCK):
        row = eye[i : i + 1] - matmul(blocks[..., i : i + 1, :], inverse)
        inverse = inverse + eye[:, i : i + 1] * row
    parts = [inverse[:, :, :, i] for i in range(num_blocks)]
    size = SUB_BLOCK
    while len(parts) > 1:
        merged = []
        for p in range(0, len(parts), 2):
            at = p * size
            lower = l_strict[..., at + size : at + 2 * size, at : at + size]
            corner = -matmul(parts[p + 1], matmul(lower, parts[p]))
            top = ops.concat((parts[p], ops.zeros(corner.shape, ms.float32)), -1)
            merged.append(ops.concat((top, ops.concat((corner, parts[p + 1]), -1)), -2))
        parts = merged
        size = 2 * size
    return parts[0]
