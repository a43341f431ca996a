"""Many ranks in one process: how exact context parallelism is, without machines (``kcp simulate``).

:func:`summary_errors` follows the algebra of summaries alone, up to 1,024 ranks; :func:`core_errors` runs ShortConv's halo and KdaCore
whole, forward and backward, as ranks in lockstep; :mod:`kcp.parallel.simulate_layer` runs whole layers.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from kcp.ops.options import describe
from kcp.parallel import lockstep, summary
from kcp.parallel.group import CpGroup
from kcp.parallel.halo import Halo

MOST_RANKS = 1024
MOST_CORE_RANKS = 64
TOKENS_PER_SUMMARY = 16
HALO = 3
_INPUTS = ("query", "key", "value", "gate", "beta", "dt_bias", "initial_state")


def random_summaries(ranks: int, heads: int, width: int, decay: float, seed: int) -> np.ndarray:
    """Summaries ``[W, 1, H, K, V + K]`` (V = K) of 16 random tokens a rank, rounded to float32 values, in float64.

    Log decays are uniform in [-decay / 16, 0] a token, write strengths in [0, 2], keys of length 1.
    """
    rng = np.random.default_rng(seed)
    whole = np.zeros((ranks, 1, heads, width, 2 * width))
    whole[..., width:] = np.eye(width)
    for _ in range(TOKENS_PER_SUMMARY):
        key = rng.standard_normal((ranks, 1, heads, width, 1))
        key /= np.linalg.norm(key, axis=-2, keepdims=True)
        strength = rng.uniform(0.0, 2.0, (ranks, 1, heads, 1, 1))
        whole = np.exp(rng.uniform(-decay / TOKENS_PER_SUMMARY, 0.0, (ranks, 1, heads, width, 1))) * whole
        value = np.concatenate([rng.standard_normal((ranks, 1, heads, 1, width)), np.zeros((ranks, 1, heads, 1, width))], -1)
        whole += strength * key * (value - np.swapaxes(key, -1, -2) @ whole)
    return whole.astype(np.float32).astype(np.float64)


def summary_errors(ranks: int, heads: int = 2, width: int = 32, decay: float = 0.01, seed: int = 0) -> list[tuple]:
    """How far float32 summaries drift: for 2, 4, 8, ... and ``ranks`` ranks, relative L2 against float64.

    Args:
        ranks: W, 2 to 1,024.
        heads, width: H, and K = V.
        decay: largest log decay of a rank.
        seed: of the summaries.

    Returns:
        Rows ``(W, prefix, suffix, tree)``: the state after all ranks, the gradient before all ranks, and the state from summaries that
        were composed in pairs.

    Raises:
        ValueError: ranks out of bounds.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise ValueError(f"ranks is {ranks}; allowed: 2 to {MOST_RANKS}")
    wide = random_summaries(ranks, heads, width, decay, seed)
    boundary = np.random.default_rng(seed + 1).standard_normal((1, heads, width, width)).astype(np.float32)
    narrow, start = Tensor(wide.astype(np.float32)), Tensor(boundary)
    counts = [2**n for n in range(1, ranks.bit_length()) if 2**n < ranks] + [ranks]
    return [(count, *_errors(wide[:count], narrow[:count], boundary, start)) for count in counts]


def _errors(wide, narrow, boundary, start):
    width, count = wide.shape[-2], wide.shape[0]
    state = grad = boundary.astype(np.float64)
    for r in range(count):
        state = wide[r][..., width:] @ state + wide[r][..., :width]
        last = wide[count - 1 - r]
        grad = np.swapaxes(last[..., width:], -1, -2) @ grad + last[..., :width]
    prefix = summary.apply(narrow[count - 1], summary.prefix(narrow, count - 1, start))
    d_m = ops.swapaxes(narrow[..., width:], -1, -2)
    suffix = ops.matmul(d_m[0], summary.suffix(narrow[..., :width], d_m, 0, start)) + narrow[0][..., :width]
    level = [narrow[r] for r in range(count)]
    while len(level) > 1:
        pairs = [summary.compose(level[i + 1], level[i]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) // 2 * 2 :]
    tree = summary.apply(level[0], start)
    return relative(prefix.asnumpy(), state), relative(suffix.asnumpy(), grad), relative(tree.asnumpy(), state)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Relative L2 distance of ``a`` from ``b``; the absolute one where ``b`` is zero."""
    norm = float(np.linalg.norm(b.astype(np.float64)))
    return float(np.linalg.norm(a.astype(np.float64) - b)) / (norm if norm > 0 else 1.0)


def slice_lengths(tokens: int, ranks: int) -> tuple[int, ...]:
    """Slices as equal as they can be, the longer ones first."""
    return tuple(tokens // ranks + (r < tokens % ranks) for r in range(ranks))


def boundaries_of(documents: tuple[int, ...] | None, tokens: int) -> tuple[int, ...] | None:
    """``cu_seqlens`` of documents of these lengths; None for None.

    Raises:
        ValueError: they do not have ``tokens`` tokens in all.
    """
    if documents is None:
        return None
    if sum(documents) != tokens:
        raise ValueError(f"documents {documents} have {sum(documents)} tokens; allowed: tokens = {tokens}")
    return tuple(int(n) for n in np.cumsum((0, *documents)))


def core_errors(
    strategy: str,
    ranks: int,
    tokens: int,
    heads: int = 2,
    width: int = 32,
    decay: float = 0.01,
    documents: tuple[int, ...] | None = None,
    seed: int = 0,
    dtype=ms.float32,
) -> dict[str, float]:
    """Relative L2 of outputs and gradients of W ranks in lockstep against one rank; ``halo`` is exact if right.

    Args:
        strategy: as in :class:`~kcp.layers.kda_core.KdaCoreConfig`.
        ranks: W, 1 to 64.
        tokens: T; slices are as equal as they can be.
        heads, width: H = Hk = Hv, and K = V <= 256.
        decay: log decays of tokens are uniform in [-decay, 0]; write strengths reach 2.
        documents: lengths of packed documents, T in all; None: one.
        seed: of the inputs.
        dtype: of query, key, value, gate and beta.

    Returns:
        ``{"out": ..., "final_state": ..., "query": ..., ...}``; parameter gradients are summed over the ranks first.

    Raises:
        ValueError: sizes that don't fit, or that the strategy can't serve.
    """
    if not 1 <= ranks <= MOST_CORE_RANKS:
        raise ValueError(f"ranks is {ranks}; allowed: 1 to {MOST_CORE_RANKS}")
    cu = boundaries_of(documents, tokens)
    x = _inputs(tokens, heads, width, decay, 1 if documents is None else len(documents), seed)
    lengths = slice_lengths(tokens, ranks)
    results = lockstep.run(ranks, lambda group: _rank(group, x, cu, strategy, heads, width, lengths, dtype), lengths)
    expected = _one_rank(x, cu, heads, width, dtype)
    errors = {name: relative(np.concatenate([r[name] for r in results], 1), expected[name]) for name in ("out", *_INPUTS[:5])}
    errors["dt_bias"] = relative(sum(r["dt_bias"] for r in results), expected["dt_bias"])
    for name in ("final_state", "initial_state"):
        errors[name] = max(relative(r[name], expected[name]) for r in results)
    return {**errors, **_halo_errors(x, results, lengths)}


def _inputs(tokens, heads, width, decay, num_documents, seed):
    rng = np.random.default_rng(seed)
    token, state = (1, tokens, heads, width), (num_documents, heads, width, width)
    shapes = {"query": token, "key": token, "value": token, "beta": token[:-1], "initial_state": state, "d_out": token, "d_final": state}
    x = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    rate = rng.uniform(0.02, 0.98, token) * decay / 5.0  # of the lower bound -5
    x["gate"] = np.log(rate / (1.0 - rate)).astype(np.float32)
    x["dt_bias"] = np.zeros((heads, width), np.float32)
    x["halo"] = rng.standard_normal((1, tokens, 8)).astype(np.float32)
    x["d_halo"] = rng.standard_normal((MOST_CORE_RANKS, 1, HALO, 8)).astype(np.float32)
    return x


def _core(strategy, heads, width, group):
    from kcp.layers.kda_core import KdaCore, KdaCoreConfig

    config = KdaCoreConfig(heads, heads, width, width, strategy=strategy, safe_gate=True, allow_neg_eigval=True)
    return KdaCore(config, group)


def _rank(group, x, cu, strategy, heads, width, lengths, dtype):
    """Outputs and gradients of one rank through the strategy's explicit halves."""
    begin = sum(lengths[: group.rank])
    end = begin + lengths[group.rank]
    local = {name: _tensor(x[name][:, begin:end]) for name in (*_INPUTS[:5], "d_out", "halo")}
    q, k, v, g, beta = (local[name].astype(dtype) for name in _INPUTS[:5])
    none, dt_bias, initial = ops.zeros((1,), ms.float32), Tensor(x["dt_bias"]), Tensor(x["initial_state"])
    out = {}
    if group.size == 1:
        out.update(_one_rank(x, cu, heads, width, dtype))
    else:
        core = _core(strategy, heads, width, group)
        infos = tuple(None if t is None else describe(t) for t in (q, k, v, g, beta, None, dt_bias, initial))
        cell = core.strategy_cell(infos, cu, None, True)
        inputs = (q, k, v, g, beta, none, dt_bias, initial, none)
        results = cell.construct(*inputs)
        grads = cell.bprop(*inputs, results, (local["d_out"].astype(dtype), Tensor(x["d_final"] / group.size)))
        out["out"], out["final_state"] = _array(results[0]), _array(results[1])
        out.update({name: _array(grads[i]) for i, name in zip((0, 1, 2, 3, 4, 6, 7), _INPUTS, strict=True)})
    halo = Halo(group, HALO)
    out["halo"] = halo.construct(local["halo"]).asnumpy()
    out["halo_grad"] = halo.backward(local["halo"], Tensor(x["d_halo"][group.rank])).asnumpy()
    return out


def _tensor(x):
    return Tensor(x.copy()) if x.size else ops.zeros(x.shape, ms.float32)


def _array(x):
    return x.astype(ms.float32).asnumpy()


def _one_rank(x, cu, heads, width, dtype):
    """The same on one rank, through automatic differentiation."""
    core = _core("none", heads, width, CpGroup.single())
    d_out, d_final = Tensor(x["d_out"]), Tensor(x["d_final"])

    def loss(q, k, v, g, beta, dt_bias, initial):
        out, final = core(q, k, v, g, beta, None, dt_bias, initial, cu)
        return (out.astype(ms.float32) * d_out).sum() + (final * d_final).sum(), out, final

    tensors = [Tensor(x[name]).astype(dtype) if name in _INPUTS[:5] else Tensor(x[name]) for name in _INPUTS]
    (_, out, final), grads = ms.value_and_grad(loss, tuple(range(7)), has_aux=True)(*tensors)
    named = {"out": out, "final_state": final, **dict(zip(_INPUTS, grads, strict=True))}
    return {name: _array(value) for name, value in named.items()}


def _halo_errors(x, results, lengths):
    """Every rank's halo against the tokens before it, and the gradient against their owners' sums."""
    padded = np.concatenate([np.zeros((1, HALO, x["halo"].shape[2]), np.float32), x["halo"]], 1)
    owed, begin, worst = np.zeros_like(padded), 0, 0.0
    for rank, length in enumerate(lengths):
        worst = max(worst, relative(results[rank]["halo"], padded[:, begin : begin + HALO]))
        owed[:, begin : begin + HALO] += x["d_halo"][rank]
        begin += length
    return {"halo": worst, "halo_grad": relative(np.concatenate([r["halo_grad"] for r in results], 1), owed[:, HALO:])}
