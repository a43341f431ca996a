"""KdaCore: chunk_kda over sequences that are sliced among the ranks of a CP group; wires the strategies."""

import itertools
import weakref
from dataclasses import dataclass

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.common._grad_function import _Function
from mindspore.ops import constexpr

from kcp.ops import backends
from kcp.ops.chunk_kda import chunk_kda, resolve_scale
from kcp.ops.numerics import in_graph
from kcp.ops.options import (
    check_choice,
    check_chunk_size,
    check_flag,
    check_inputs,
    check_lower_bound,
    describe,
    require_tensor,
)
from kcp.parallel.boundaries import (
    check_row_tensor,
    check_rows,
    flat_rows,
    flat_tensor_rows,
    host_rows,
)
from kcp.parallel.degrees import head_groups
from kcp.parallel.gradients import REDUCE_CHOICES
from kcp.parallel.group import CpGroup
from kcp.parallel.strategies import STRATEGIES, Call, build, check_strategy, resolve_auto, split_for


@dataclass(frozen=True)
class KdaCoreConfig:
    """Configuration of :class:`KdaCore`.

    Attributes:
        num_heads: key heads Hk.
        num_v_heads: value heads Hv, a multiple of Hk; None: Hk.
        head_dim: key width K <= 256.
        v_head_dim: value width V <= 256; None: K.
        strategy: ``"none"`` (one rank), ``"ulysses"``, ``"state_scan"``, ``"ptp_chain"``, ``"ptp_tree"``, ``"hybrid"``; ``"auto"``: the
            cheapest by :mod:`kcp.parallel.plan`, chosen when the core is built (its ``config`` then says which).
        scale: factor of the scores; None: K^-1/2.
        safe_gate, lower_bound, use_gate_in_kernel, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, epsilon,
        chunk_size, disable_recompute, state_v_first: as in :func:`kcp.ops.chunk_kda`.
        keep_transitions: state_scan (and hybrid) keeps the gathered M of the forward, so that its backward exchanges and computes dE alone;
            ptp_tree keeps its own M and computes dE alone.
        ptp_head_groups: in how many groups of heads ptp_chain passes states on, a divisor of num_heads; None: the largest up to
            8 (W - 1) for W ranks.
        hybrid_ulysses_degree: consecutive ranks that exchange heads under hybrid, a divisor of the group's size and of both head counts;
            None: the largest.
        plan_tokens: tokens of a whole sequence that ``"auto"`` plans for; None: 4,096 a rank.
        plan_packed: whether ``"auto"`` plans for document boundaries that a graph learns at run time.
        reduce_replicated_grads: who sums the gradients of a_log and dt_bias over the group, ``"trainer"`` or ``"kcp"``.
    """

    num_heads: int
    num_v_heads: int | None = None
    head_dim: int = 128
    v_head_dim: int | None = None
    strategy: str = "none"
    scale: float | None = None
    safe_gate: bool = False
    lower_bound: float = -5.0
    use_gate_in_kernel: bool = True
    use_qk_l2norm_in_kernel: bool = True
    use_beta_sigmoid_in_kernel: bool = True
    allow_neg_eigval: bool = False
    epsilon: float = 1e-6
    chunk_size: int = 64
    disable_recompute: bool = True
    state_v_first: bool = False
    keep_transitions: bool = True
    reduce_replicated_grads: str = "trainer"
    ptp_head_groups: int | None = None
    hybrid_ulysses_degree: int | None = None
    plan_tokens: int | None = None
    plan_packed: bool = False

    def __post_init__(self):
        if self.num_v_heads is None:
            object.__setattr__(self, "num_v_heads", self.num_heads)
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        for name, limit in (("num_heads", None), ("num_v_heads", None), ("head_dim", 256), ("v_head_dim", 256)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (limit is not None and value > limit):
                raise ValueError(f"{name} is {value!r}; allowed: an integer >= 1" + ("" if limit is None else f" and <= {limit}"))
        if self.num_v_heads % self.num_heads:
            raise ValueError(f"num_v_heads is {self.num_v_heads}; allowed: a multiple of num_heads={self.num_heads}")
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("reduce_replicated_grads", self.reduce_replicated_grads, REDUCE_CHOICES)
        check_chunk_size(self.chunk_size)
        check_lower_bound(self.lower_bound)
        check_flag("keep_transitions", self.keep_transitions)
        check_flag("plan_packed", self.plan_packed)
        for name in ("ptp_head_groups", "hybrid_ulysses_degree", "plan_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}; allowed: None or an integer >= 1")
        head_groups(self.num_heads, self.ptp_head_groups)


_numbers = itertools.count()
_cores: "weakref.WeakValueDictionary[int, KdaCore]" = weakref.WeakValueDictionary()  # graph code names a core by its number


class StrategyCell(nn.Cell):
    """A strategy with its options fixed, as one differentiable Cell; ``forward``/``backward`` are its explicit halves.

    Inputs are those of :class:`KdaCore` in order, with placeholders for what is absent.
    """

    def __init__(self, strategy, output_final_state: bool):
        super().__init__(auto_prefix=False)
        self.strategy = strategy
        self.output_final_state = output_final_state

    def construct(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu):
        out, final_state, saved = self.strategy.forward(q, k, v, g, beta, a_log, dt_bias, initial_state, cu, self.output_final_state)
        return (out, final_state) + saved

    def bprop(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu, out, dout):
        # every exchange of the backward comes after those of the forward, and after the later layers' (see state_scan.py)
        q = ops.depend(q, out[0])
        d_out = dout[0]
        d_final = dout[1] if self.output_final_state else None
        if d_out is not None:
            q = ops.depend(q, d_out)
        if d_final is not None:
            d_final = ops.depend(d_final, q)
        grads = self.strategy.backward(q, k, v, g, beta, a_log, dt_bias, initial_state, cu, out[2:], d_out, d_final)
        return grads + (cu - cu,)


class _StrategyPyNative(_Function):
    """The same call for PyNative, where a Cell's caches would get zero gradients as large as they are; here they stay in the context."""

    @staticmethod
    def forward(ctx, cell, *tensors):
        out, final_state, saved = cell.strategy.forward(*tensors, cell.output_final_state)
        ctx.cell, ctx.state_shape = cell, final_state.shape
        ctx.save_for_backward(*tensors, *saved)
        ctx.set_materialize_grads(False)
        return out, final_state

    @staticmethod
    def backward(ctx, d_out, d_final):
        cell, saved = ctx.cell, ctx.saved_tensors
        if not cell.output_final_state:
            d_final = None
        elif d_final is None:  # other ranks may have a gradient, and all of them sum it
            d_final = ops.zeros(ctx.state_shape, ms.float32)
        return (None, *cell.strategy.backward(*saved[:9], saved[9:], d_out, d_final), None)


def _split_boundaries(cu_seqlens):
    """``(host boundaries or None, boundary Tensor or None)``; in PyNative a Tensor's values are read and become host boundaries."""
    if cu_seqlens is None:
        return None, None
    if isinstance(cu_seqlens, Tensor):
        if in_graph():
            return None, cu_seqlens
        return host_rows(cu_seqlens), None
    return cu_seqlens, None


def _wide(x):
    return ops.cast(x, ms.float32) if x.dtype == ms.bfloat16 else x


def _value(x):
    """What a graph knows of a Parameter; handed as it is to a Cell with a bprop, MindSpore can fail to compile (parameter_eliminate)."""
    return x * 1.0 if in_graph() else x


@constexpr(check=False)
def _check_tokens(q, k, v, g, beta):
    check_inputs("BSND", q, k, v, g, beta, None, None, None, False, None, sliced=True)


@constexpr(check=False)
def _flat_host_rows(rows, batch, num_tokens):
    return flat_rows(check_rows(rows, batch, num_tokens), num_tokens)


@constexpr(check=False)
def _strategy_cell(number, tensors, host, boundaries, output_final_state, compiled):
    return _cores[number].strategy_cell(tensors, host, boundaries, output_final_state, compiled)


class KdaCore(nn.Cell):
    """Kimi Delta Attention over this rank's slice of every sequence.

    Args:
        config: a :class:`KdaCoreConfig`.
        group: the ranks that share every sequence; None: one rank.

    Inputs:
        - query, key ``[B, T_local, Hk, K]``, value ``[B, T_local, Hv, V]``, gate ``[B, T_local, Hv, K]``, beta ``[B, T_local, Hv]``: this
          rank's tokens.
        - a_log ``[Hv]``, dt_bias ``[Hv, K]`` or ``[Hv*K]``, float32 or None: replicated on every rank.
        - initial_state ``[N, Hv, K, V]`` float32 or None, the same on every rank.
        - cu_seqlens: global boundaries of packed documents, from 0 to T: host integers (one list for B = 1, one list a row for B > 1), or
          an int32 Tensor ``[M+1]`` or ``[B, M+1]`` padded with T; None: every row is one document. N counts the documents of all rows.
        - output_final_state: return the state after the last token of the whole sequence.

    Outputs:
        ``(out [B, T_local, Hv, V], final_state [N, Hv, K, V] or None)``; the final state is the same on every rank.

    Gradients:
        Token gradients are this rank's; initial_state's is whole on every rank; a_log's and dt_bias's are partial sums for the trainer to
        add up, or whole with ``reduce_replicated_grads="kcp"``; the final state's incoming gradient is summed over the ranks.

    Raises:
        ValueError, TypeError: naming the argument, what it got and what is allowed.

    Source: section 6 of the Hyper-Parallel document.
    """

    def __init__(self, config: KdaCoreConfig, group: CpGroup | None = None):
        super().__init__()
        group = CpGroup.single() if group is None else group
        config = resolve_auto(config, group)
        check_strategy(config, group)
        self.config = config
        self.group = group
        self.group_parts = split_for(config, group)
        self.distributed = group.size > 1
        self.widens = ms.get_context("device_target") == "CPU"  # its graphs can't reshape, slice or transpose bfloat16
        self.dense_cell = (None, None)
        self.number = next(_numbers)
        _cores[self.number] = self

    def construct(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gate: Tensor,
        beta: Tensor,
        a_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_state: Tensor | None = None,
        cu_seqlens=None,
        output_final_state: bool = True,
    ):
        for name, x in (("query", query), ("key", key), ("value", value), ("gate", gate), ("beta", beta)):
            require_tensor(name, x)
        if self.widens and in_graph() and value.dtype == ms.bfloat16:
            out, final_state = self._run(
                _wide(query), _wide(key), _wide(value), _wide(gate), _wide(beta), a_log, dt_bias, initial_state, cu_seqlens,
                output_final_state,
            )  # fmt: skip
            return ops.cast(out, ms.bfloat16), final_state
        return self._run(query, key, value, gate, beta, a_log, dt_bias, initial_state, cu_seqlens, output_final_state)

    def _run(self, query, key, value, gate, beta, a_log, dt_bias, initial_state, cu_seqlens, output_final_state):
        if self.distributed:
            return self._distributed(query, key, value, gate, beta, a_log, dt_bias, initial_state, cu_seqlens, output_final_state)
        if cu_seqlens is None:
            return self._local(query, key, value, gate, beta, a_log, dt_bias, initial_state, cu_seqlens, output_final_state)
        _check_tokens(describe(query), describe(key), describe(value), describe(gate), describe(beta))
        batch, num_tokens = query.shape[:2]
        rows, boundaries = _split_boundaries(cu_seqlens)
        cu = (
            _flat_host_rows(rows, batch, num_tokens)
            if boundaries is None
            else flat_tensor_rows(boundaries.reshape((batch, -1)), num_tokens)
        )
        flat = (1, batch * num_tokens)
        out, final_state = self._local(
            query.reshape(flat + query.shape[2:]), key.reshape(flat + key.shape[2:]), value.reshape(flat + value.shape[2:]),
            gate.reshape(flat + gate.shape[2:]), beta.reshape(flat + beta.shape[2:]), a_log, dt_bias, initial_state, cu, output_final_state,
        )  # fmt: skip
        return out.reshape(value.shape), final_state

    def _local(self, query, key, value, gate, beta, a_log, dt_bias, initial_state, cu_seqlens, output_final_state):
        c = self.config
        return chunk_kda(
            query, key, value, gate, beta, c.scale, c.chunk_size,
            layout="BSND", output_final_state=output_final_state, safe_gate=c.safe_gate, lower_bound=c.lower_bound,
            use_gate_in_kernel=c.use_gate_in_kernel, a_log=a_log, dt_bias=dt_bias, cu_seqlens=cu_seqlens,
            initial_state=initial_state, disable_recompute=c.disable_recompute, state_v_first=c.state_v_first, epsilon=c.epsilon,
            use_qk_l2norm_in_kernel=c.use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel=c.use_beta_sigmoid_in_kernel,
            allow_neg_eigval=c.allow_neg_eigval,
        )  # fmt: skip

    def _distributed(self, q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens, output_final_state):
        rows, boundaries = _split_boundaries(cu_seqlens)
        infos = (
            describe(q),
            describe(k),
            describe(v),
            describe(g),
            describe(beta),
            describe(a_log),
            describe(dt_bias),
            describe(initial_state),
        )
        cell = _strategy_cell(self.number, infos, rows, describe(boundaries), output_final_state, in_graph())
        none = ops.zeros((1,), ms.float32)
        tensors = (
            q, k, v, g, beta,
            none if a_log is None else _value(a_log),
            none if dt_bias is None else _value(dt_bias),
            none if initial_state is None else _value(initial_state),
            none if boundaries is None else boundaries,
        )  # fmt: skip
        results = cell(*tensors) if in_graph() else _StrategyPyNative.apply(cell, *tensors)
        return results[0], results[1] if output_final_state else None

    def strategy_cell(self, tensors: tuple, rows, boundaries, output_final_state: bool, compiled: bool = False) -> StrategyCell:
        """The strategy for inputs with these ``(shape, dtype)`` (None: absent), after checking them.

        ``rows``: host boundaries, one tuple of integers for B = 1 or one a row; ``boundaries``: ``(shape, dtype)`` of a boundary Tensor;
        ``compiled``: the cell becomes part of a graph.
        """
        if rows is not None or boundaries is not None or compiled:
            return StrategyCell(self._strategy(tensors, rows, boundaries, compiled), output_final_state)
        key = (tensors, output_final_state, backends.select("chunk_kda"))
        if self.dense_cell[0] != key:  # one step's shapes are mostly the last one's
            self.dense_cell = key, StrategyCell(self._strategy(tensors, None, None, False), output_final_state)
        return self.dense_cell[1]

    def _strategy(self, tensors, rows, boundaries, compiled):
        c, group = self.config, self.group
        q, k, v, g, beta, a_log, dt_bias, initial_state = tensors
        batch, num_tokens = q[0][0], sum(group.lengths(q[0][1] if len(q[0]) > 1 else 0))
        if rows is not None:
            rows = check_rows(rows, batch, num_tokens)
            num_documents = sum(len(row) - 1 for row in rows)
        elif boundaries is not None:
            num_documents = batch * check_row_tensor(boundaries, batch)
        else:
            num_documents = batch
        sizes = check_inputs("BSND", q, k, v, g, beta, a_log, dt_bias, initial_state, c.state_v_first, num_documents, sliced=True)
        for name, axis, expected in (
            ("query", "Hk", c.num_heads), ("value", "Hv", c.num_v_heads), ("query", "K", c.head_dim), ("value", "V", c.v_head_dim),
        ):  # fmt: skip
            if sizes[axis] != expected:
                raise ValueError(f"{name} has {axis}={sizes[axis]}; allowed: {expected}, as configured")
        if group.lengths(sizes["T"])[group.rank] != sizes["T"]:
            raise ValueError(f"query has {sizes['T']} tokens; allowed: {group.lengths(0)[group.rank]}, the slice of rank {group.rank}")
        per_row = 0 if boundaries is None else num_documents // batch
        call = Call(batch, num_tokens, sizes["T"], rows, per_row, initial_state is not None, compiled)
        fields = self.local_options(a_log is not None, dt_bias is not None)
        return build(c, group, self.group_parts, backends.select("chunk_kda", compiled), fields, call)

    def local_options(self, has_a_log: bool, has_dt_bias: bool) -> dict:
        """Fields of :class:`~kcp.ops.options.KdaOptions` for the local op, but boundaries and states."""
        c = self.config
        return {
            "scale": resolve_scale(c.scale, c.head_dim),
            "chunk_size": c.chunk_size,
            "layout": "BSND",
            "safe_gate": c.safe_gate,
            "lower_bound": c.lower_bound,
            "use_gate_in_kernel": c.use_gate_in_kernel,
            "has_a_log": has_a_log,
            "has_dt_bias": has_dt_bias,
            "disable_recompute": c.disable_recompute,
            "epsilon": c.epsilon,
            "use_qk_l2norm_in_kernel": c.use_qk_l2norm_in_kernel,
            "use_beta_sigmoid_in_kernel": c.use_beta_sigmoid_in_kernel,
            "allow_neg_eigval": c.allow_neg_eigval,
        }
