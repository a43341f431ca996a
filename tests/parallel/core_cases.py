"""Random problems for KdaCore over W ranks, run in lockstep or under msrun, and compared with the float64 recurrence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from kcp.layers import KdaCore, KdaCoreConfig
from kcp.ops.options import describe
from kcp.ops.reference import kda_reference_grad
from kcp.parallel import CpGroup

TOKEN_INPUTS = ("q", "k", "v", "g", "beta")
INPUTS = TOKEN_INPUTS + ("a_log", "dt_bias", "initial_state")
STRATEGIES = ("ulysses", "state_scan", "ptp_chain", "ptp_tree", "hybrid")
SCANS = STRATEGIES[1:]  # those that carry states across ranks
FORWARD, BACKWARD = 1e-5, 5e-5  # gates of relative L2 in float32


@dataclass(frozen=True)
class CoreProblem:
    """One call of KdaCore over all tokens: sizes, options, and which slices the ranks hold.

    ``decay``: log decays are uniform in [-decay, 0] (under the lower-bound gate) and write strengths spread up to 2. ``dtype``: of the
    token tensors; bfloat16 inputs are numbers that bfloat16 holds, so that the float64 recurrence sees the same ones. ``without``: which
    of a_log and dt_bias are not given. ``with_out_gradient``: False: the final states alone are in the loss, and no gradient of the
    output exists (explicit runs alone).
    """

    lengths: tuple[int, ...]
    strategy: str
    batch: int = 2
    num_heads: int = 2
    num_v_heads: int = 4
    head_dim: int = 12
    v_head_dim: int = 10
    slow: bool = True
    with_initial_state: bool = True
    with_final_state: bool = True
    cu_seqlens: tuple | None = None
    seed: int = 0
    decay: float | None = None
    dtype: str = "float32"
    without: tuple[str, ...] = ()
    with_out_gradient: bool = True
    options: dict = field(default_factory=dict)

    def config(self, strategy: str | None = None) -> KdaCoreConfig:
        defaults = {"safe_gate": True, "allow_neg_eigval": True, "chunk_size": 16}
        return KdaCoreConfig(
            num_heads=self.num_heads,
            num_v_heads=self.num_v_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            strategy=self.strategy if strategy is None else strategy,
            **{**defaults, **self.options},
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Inputs, ``d_out`` and ``d_final`` over all tokens, float32; slow decay (a near 0) unless asked otherwise."""
        rng = np.random.default_rng(self.seed)
        b, t, hk, hv, k, v = self.batch, sum(self.lengths), self.num_heads, self.num_v_heads, self.head_dim, self.v_head_dim
        n = b if self.cu_seqlens is None else sum(len(row) - 1 for row in self.rows())
        state = (n, hv, v, k) if self.config().state_v_first else (n, hv, k, v)
        shapes = {
            "q": (b, t, hk, k), "k": (b, t, hk, k), "v": (b, t, hv, v), "g": (b, t, hv, k), "beta": (b, t, hv),
            "a_log": (hv,), "dt_bias": (hv, k), "initial_state": state, "d_out": (b, t, hv, v), "d_final": state,
        }  # fmt: skip
        out = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        out["a_log"] *= 0.3
        out["g"] -= 6.0 if self.slow else 0.0
        if self.decay is not None:
            rate = rng.uniform(1e-6, 1.0, out["g"].shape) * self.decay / -self.config().lower_bound
            out["g"] = (np.log(rate / (1.0 - rate)) / np.exp(out["a_log"])[:, None] - out["dt_bias"]).astype(np.float32)
            out["beta"] *= 3.0
        if self.dtype == "bfloat16":
            for name in (*TOKEN_INPUTS, "d_out"):
                out[name] = rounded_to_bf16(out[name])
        return out

    def rows(self) -> tuple:
        """Boundaries of every row."""
        return self.cu_seqlens if isinstance(self.cu_seqlens[0], tuple) else (self.cu_seqlens,)

    def truth(self) -> dict[str, np.ndarray]:
        """Outputs and gradients of the float64 recurrence over all tokens; packed rows are laid one after the other for it."""
        x, c, cu = self.arrays(), self.config(), self.cu_seqlens
        if cu is not None:
            cu = [0] + [b * sum(self.lengths) + end for b, row in enumerate(self.rows()) for end in row[1:]]
            for name in (*TOKEN_INPUTS, "d_out"):
                x[name] = x[name].reshape((1, -1) + x[name].shape[2:])
        inputs = {name: x[name] for name in INPUTS if name not in self.without and (name != "initial_state" or self.with_initial_state)}
        truth = kda_reference_grad(
            **inputs,
            cu_seqlens=cu,
            safe_gate=c.safe_gate,
            allow_neg_eigval=c.allow_neg_eigval,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=c.state_v_first,
            d_out=x["d_out"] if self.with_out_gradient else None,
            d_final_state=x["d_final"] if self.with_final_state else None,
        )
        for name in (*TOKEN_INPUTS, "out"):
            truth[name] = truth[name].reshape((self.batch, sum(self.lengths)) + truth[name].shape[2:])
        return truth

    def one_device(self) -> CoreProblem:
        """The same call on one rank that holds all tokens."""
        return replace(self, lengths=(sum(self.lengths),), strategy="none")

    def rank_tensors(self, rank: int) -> dict[str, Tensor]:
        """What rank ``rank`` holds; every rank puts an equal part of the final state's gradient into the loss."""
        x = self.arrays()
        begin = sum(self.lengths[:rank])
        end = begin + self.lengths[rank]
        kind = getattr(ms, self.dtype)
        local = {name: ops.cast(Tensor(x[name][:, begin:end].copy()), kind) for name in (*TOKEN_INPUTS, "d_out")}
        whole = {name: Tensor(x[name]) for name in ("a_log", "dt_bias", "initial_state")}
        return {**local, **whole, "d_final": Tensor(x["d_final"] / len(self.lengths))}


def rounded_to_bf16(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 numbers (ties to even), as float32."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def boundary_tensor(problem: CoreProblem) -> Tensor:
    """Boundaries as the int32 Tensor ``[M + 1]``, or ``[B, M + 1]`` for several rows; padded unless states are given or returned."""
    rows, total = problem.rows(), sum(problem.lengths)
    longest = max(len(row) for row in rows) + (0 if problem.with_initial_state or problem.with_final_state else 2)
    padded = np.array([[*row, *[total] * (longest - len(row))] for row in rows], np.int32)
    return Tensor(padded if problem.batch > 1 else padded[0])


def run_explicit(problem: CoreProblem, group: CpGroup, as_tensor: bool = False) -> dict[str, np.ndarray]:
    """One rank's outputs and gradients through the strategy's explicit forward and backward (for lockstep runs).

    ``as_tensor``: hand the boundaries over as a Tensor whose values the strategy does not know (with states, all rows need equally many
    documents: padding would add some).
    """
    t = problem.rank_tensors(group.rank)
    core = KdaCore(problem.config(), group)
    state = t["initial_state"] if problem.with_initial_state else None
    tensors = [None if name in problem.without else t[name] for name in INPUTS[:-1]] + [state]
    rows, cu = problem.cu_seqlens, ops.zeros((1,), ms.float32)
    if as_tensor:
        rows, cu = None, boundary_tensor(problem)
    cell = core.strategy_cell(tuple(describe(x) for x in tensors), rows, describe(cu) if as_tensor else None, problem.with_final_state)
    inputs = [ops.zeros((1,), ms.float32) if x is None else x for x in tensors] + [cu]
    results = cell.construct(*inputs)
    d_out, d_final = (t["d_out"] if problem.with_out_gradient else None), (t["d_final"] if problem.with_final_state else None)
    grads = cell.bprop(*inputs, results, (d_out, d_final))
    return _named(results[0], results[1] if problem.with_final_state else None, grads)


def run_autodiff(
    problem: CoreProblem, group: CpGroup, jit: bool, host_boundaries: bool = False, twice: bool = False
) -> dict[str, np.ndarray]:
    """One rank's outputs and gradients through ``ms.grad`` of a loss, in PyNative or compiled (for msrun workers).

    ``host_boundaries``: hand the boundaries over as integers, else as a Tensor (only without states, see :func:`run_explicit`);
    ``twice``: run it again and insist on the same bits.
    """
    t = problem.rank_tensors(group.rank)
    core = KdaCore(problem.config(), group)
    d_out, d_final = t["d_out"], t["d_final"]
    with_initial, with_final = problem.with_initial_state, problem.with_final_state
    rows = problem.cu_seqlens
    cu = None if rows is None or host_boundaries else boundary_tensor(problem)

    def loss(q, k, v, g, beta, a_log, dt_bias, initial_state, cu):
        out, final_state = core(
            q,
            k,
            v,
            g,
            beta,
            a_log,
            dt_bias,
            initial_state if with_initial else None,
            rows if host_boundaries else cu,
            output_final_state=with_final,
        )
        total = (ops.cast(out, ms.float32) * ops.cast(d_out, ms.float32)).sum()
        if with_final:
            return total + (final_state * d_final).sum(), out, final_state
        return total, out, out

    grad = ms.value_and_grad(loss, tuple(range(8)), has_aux=True)
    if jit:
        grad = ms.jit(grad)

    def run():
        (_, out, final_state), grads = grad(*[t[name] for name in INPUTS], cu)
        return _named(out, final_state if with_final else None, grads)

    results = run()
    if twice:
        for name, again in run().items():
            np.testing.assert_array_equal(results[name], again, err_msg=f"{name} of a second run")
    return results


def _named(out, final_state, grads) -> dict[str, np.ndarray]:
    named = {"out": out, **dict(zip(INPUTS, grads[:8], strict=True))}
    if final_state is not None:
        named["final_state"] = final_state
    return {name: ops.cast(x, ms.float32).asnumpy() for name, x in named.items()}


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Relative L2 distance of a from b."""
    return float(np.linalg.norm(a.astype(np.float64) - b) / max(float(np.linalg.norm(b)), 1e-30))


def errors(problem: CoreProblem, ranks: list[dict[str, np.ndarray]], truth: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative L2 of every result of the ranks, put together; a_log's gradient against the sum of its absolute terms."""
    out = {name: relative(np.concatenate([r[name] for r in ranks], 1), truth[name]) for name in ("out", *TOKEN_INPUTS)}
    whole = problem.config().reduce_replicated_grads == "kcp"
    a_log, dt_bias = (ranks[0][name] if whole else sum(r[name] for r in ranks) for name in ("a_log", "dt_bias"))
    if "a_log" not in problem.without:
        out["a_log"] = float(np.max(np.abs(a_log - truth["a_log"]) / truth["a_log_terms"]))
    if "dt_bias" not in problem.without:
        out["dt_bias"] = relative(dt_bias, truth["dt_bias"])
    if problem.with_final_state:
        out["final_state"] = max(relative(r["final_state"], truth["final_state"]) for r in ranks)
    if problem.with_initial_state:
        out["initial_state"] = max(relative(r["initial_state"], truth["initial_state"]) for r in ranks)
    return out


def check(problem: CoreProblem, ranks: list[dict[str, np.ndarray]], truth: dict[str, np.ndarray] | None = None) -> dict[str, float]:
    """Every rank's results, put together, against the float64 recurrence (or a truth at hand); returns the errors."""
    found = errors(problem, ranks, problem.truth() if truth is None else truth)
    for name, error in found.items():
        gate = FORWARD if name in ("out", "final_state", "a_log") else BACKWARD
        assert error <= gate, (name, error)
    return found


def check_bfloat16(problem: CoreProblem, ranks: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """bfloat16 inputs: what is rounded to bfloat16 is as exact as on one device, the rest keeps its gate; returns the errors.

    The errors of rounded tensors are given as multiples of one device's.
    """
    truth, single = problem.truth(), problem.one_device()
    found = errors(problem, ranks, truth)
    whole = errors(single, [run_autodiff(single, CpGroup.single(), jit=False, host_boundaries=True)], truth)
    for name, error in found.items():
        if name in ("out", *TOKEN_INPUTS):
            found[name] = error / whole[name]
            assert found[name] <= 1.001, (name, error, whole[name])
        else:
            assert error <= BACKWARD, (name, error)
    return found
