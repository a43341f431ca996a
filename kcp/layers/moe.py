"""Mixture of experts with a sigmoid router (Kimi Linear report; DeepSeek-V3's router with a correction bias).

s = sigmoid(x W_g)                            scores; the bias only decides who is chosen
chosen = top-k of s + bias within the best ``topk_group`` of ``num_expert_group`` groups (a group's worth: its two best)
weight_e = s_e (/ sum of the chosen s with ``renormalize``) * routed_scaling_factor
y = sum_e weight_e SwiGLU_e(x) + SwiGLU_shared(x)
"""

from dataclasses import dataclass

import mindspore as ms
from mindspore import nn, ops
from mindspore.common.initializer import Normal, initializer

from kcp.layers.fused import LANE, ROW_BLOCK, layer_cell, serves
from kcp.layers.linear import Linear
from kcp.layers.mlp import SwiGLU, silu_times
from kcp.ops import numerics


@dataclass(frozen=True)
class MoeConfig:
    """Configuration of :class:`SparseMoe`.

    Attributes:
        hidden_size: width D; intermediate_size: width inside an expert.
        num_experts: routed experts E; num_experts_per_token: chosen per token; num_shared_experts: width of the shared one in experts.
        num_expert_group, topk_group: groups of experts, and how many of them may be chosen from.
        renormalize: the chosen scores add up to one before scaling.
        routed_scaling_factor: factor of the routed experts' sum.
        initializer_range: standard deviation of the start.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int = 1
    num_expert_group: int = 1
    topk_group: int = 1
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    initializer_range: float = 0.02

    def __post_init__(self):
        for name in ("hidden_size", "intermediate_size", "num_experts", "num_experts_per_token", "num_expert_group", "topk_group"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; allowed: an integer >= 1")
        if self.num_experts % self.num_expert_group:
            raise ValueError(f"num_experts is {self.num_experts}; allowed: a multiple of num_expert_group={self.num_expert_group}")
        if self.topk_group > self.num_expert_group:
            raise ValueError(f"topk_group is {self.topk_group}; allowed: at most num_expert_group={self.num_expert_group}")
        reachable = self.num_experts // self.num_expert_group * self.topk_group
        if self.num_experts_per_token > reachable:
            raise ValueError(
                f"num_experts_per_token is {self.num_experts_per_token}; allowed: at most {reachable}, the experts of topk_group groups"
            )


class Router(nn.Cell):
    """Weights of the experts for every token.

    Inputs:
        x ``[N, D]``.

    Outputs:
        ``(weights [N, E] float32, zero where an expert is not chosen; load [E], the fraction of tokens that chose each expert)``.

    Parameters: ``weight [E, D]``, ``e_score_correction_bias [E]`` (not trained by gradients).
    """

    def __init__(self, config: MoeConfig):
        super().__init__()
        self.config = config
        shape = (config.num_experts, config.hidden_size)
        self.weight = ms.Parameter(initializer(Normal(sigma=config.initializer_range), shape, ms.float32), name="weight")
        bias = initializer("zeros", (config.num_experts,), ms.float32)
        self.e_score_correction_bias = ms.Parameter(bias, name="e_score_correction_bias", requires_grad=False)
        self.product = ops.MatMul(transpose_b=True)

    def construct(self, x):
        weights, chosen, _ = self.route(x)
        return weights, chosen.mean(0)

    def route(self, x):
        """``(weights [N, E], chosen [N, E] of zeros and ones, index [N, k] of the chosen experts)``."""
        c = self.config
        scores, ranked = self._ranked(x)
        chosen, index = self._chosen(ranked, c.num_experts_per_token, c.num_experts)
        weights = scores * chosen
        if c.renormalize:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return weights * c.routed_scaling_factor, chosen, index

    def margin(self, x):
        """``[1]``: the smallest distance, over the tokens, between the last score that is chosen and the first that is not."""
        count = self.config.num_experts_per_token
        best = ops.topk(self._ranked(x)[1], min(count + 1, self.config.num_experts))[0]
        return ops.ReduceMin()(best[:, count - 1] - best[:, -1]).reshape((1,))

    def _ranked(self, x):
        """``(scores, what they are ranked by)``, both ``[N, E]``."""
        c = self.config
        scores = numerics.sigmoid(self.product(ops.cast(x, ms.float32), self.weight))
        ranked = ops.stop_gradient(scores) + self.e_score_correction_bias
        if c.num_expert_group > 1:
            grouped = ranked.reshape((-1, c.num_expert_group, c.num_experts // c.num_expert_group))
            worth = ops.topk(grouped, min(2, c.num_experts // c.num_expert_group))[0].sum(-1)
            allowed = self._chosen(worth, c.topk_group, c.num_expert_group)[0]
            allowed = ops.broadcast_to(ops.expand_dims(allowed, -1), grouped.shape).reshape(ranked.shape)
            ranked = ranked * allowed - 1e30 * (1.0 - allowed)
        return scores, ranked

    @staticmethod
    def _chosen(values, count, size):
        """The ``count`` largest of each row: ``[N, size]`` of zeros and ones, and their places ``[N, count]``."""
        index = ops.topk(values, count)[1]
        ones = ops.one_hot(index, size, ms.Tensor(1.0, ms.float32), ms.Tensor(0.0, ms.float32)).sum(1)
        return ops.stop_gradient(ones), index


class Expert(nn.Cell):
    """SwiGLU with the checkpoint's names: ``w1`` gate, ``w3`` up, ``w2`` down."""

    def __init__(self, hidden_size: int, intermediate_size: int, init_std: float):
        super().__init__()
        self.w1 = Linear(hidden_size, intermediate_size, init_std=init_std)
        self.w2 = Linear(intermediate_size, hidden_size, init_std=init_std)
        self.w3 = Linear(hidden_size, intermediate_size, init_std=init_std)

    def construct(self, x):
        return self.w2(silu_times(self.w1(x), self.w3(x)))


def _rows_by_expert(chosen, index, num_rows):
    """Where every choice's row lies when rows are grouped by expert, each group filled up to a multiple of 16.

    Args:
        chosen: ``[N, E]`` of zeros and ones; index ``[N, k]``, the same as numbers of experts; num_rows: R, enough for all.

    Returns:
        ``(row [N, k], token [R], ends [E])`` int32; rows that fill up say token 0.
    """
    places = ops.cumsum(chosen, 0)
    filled = ops.floor((places[-1] + (ROW_BLOCK - 1)) / ROW_BLOCK) * ROW_BLOCK
    ends = ops.cumsum(filled, 0)
    row = ops.cast(ops.gather_d(places + (ends - filled - 1.0), 1, index), ms.int32)
    tokens = ops.broadcast_to(ops.expand_dims(ops.arange(0, index.shape[0], 1, dtype=ms.int32), 1), index.shape)
    token = ops.unsorted_segment_sum(tokens.reshape((-1,)), row.reshape((-1,)), num_rows)
    return row, token, ops.cast(ends, ms.int32)


class _Dispatch(nn.Cell):
    """``x [N, D] -> [R, D]``: every choice's row; the gradient adds up each token's rows."""

    def construct(self, x, row, token):
        return ops.gather(x, token, 0)

    def bprop(self, x, row, token, out, dout):
        dx = ops.gather(dout, row[:, 0], 0)
        for j in range(1, row.shape[1]):
            dx = dx + ops.gather(dout, row[:, j], 0)
        return dx, row - row, token - token


class _Combine(nn.Cell):
    """``y [R, D], weights [N, k] -> [N, D]``: the weighted sum of each token's rows."""

    def construct(self, y, weights, row, token):
        out = ops.gather(y, row[:, 0], 0) * weights[:, :1]
        for j in range(1, row.shape[1]):
            out = out + ops.gather(y, row[:, j], 0) * weights[:, j : j + 1]
        return out

    def bprop(self, y, weights, row, token, out, dout):
        d_weights = ()
        for j in range(row.shape[1]):
            d_weights = d_weights + ((ops.gather(y, row[:, j], 0) * dout).sum(-1, keepdims=True),)
        of_row = ops.unsorted_segment_sum(weights.reshape((-1,)), row.reshape((-1,)), y.shape[0])
        dy = ops.gather(dout, token, 0) * of_row.reshape((-1, 1))
        return dy, ops.Concat(-1)(d_weights), row - row, token - token


class SparseMoe(nn.Cell):
    """Routed and shared experts.

    On the native kernels each expert computes the tokens that chose it, grouped into one product for all experts. Elsewhere (and with
    widths that are not multiples of 32) every expert computes every token and is weighted by the router, zero where it is not chosen.

    Inputs:
        x ``[B, T, D]``.

    Outputs:
        ``[B, T, D]``, the dtype of x.
    """

    def __init__(self, config: MoeConfig):
        super().__init__()
        self.num_experts, self.hidden_size = config.num_experts, config.hidden_size
        self.gate = Router(config)
        experts = [Expert(config.hidden_size, config.intermediate_size, config.initializer_range) for _ in range(config.num_experts)]
        self.experts = nn.CellList(experts)
        self.choices = config.num_experts_per_token
        self.whole_lanes = config.hidden_size % LANE == 0 and config.intermediate_size % LANE == 0
        self.dispatch, self.combine = _Dispatch(auto_prefix=False), _Combine(auto_prefix=False)
        self.has_shared = config.num_shared_experts > 0
        if self.has_shared:
            width = config.intermediate_size * config.num_shared_experts
            self.shared_experts = SwiGLU(config.hidden_size, width, config.initializer_range)

    def load(self, x):
        """``[E + 1]`` float32: the fraction of this rank's tokens that chose each expert, and the router's smallest margin."""
        flat = x.reshape((-1, self.hidden_size))
        return ops.concat((self.gate(flat)[1], self.gate.margin(flat)), 0)

    def construct(self, x):
        flat = x.reshape((-1, self.hidden_size))
        weights, chosen, index = self.gate.route(flat)
        y = self.shared_experts(flat) if self.has_shared else flat * 0.0
        if self.whole_lanes and serves(flat.shape):
            return (y + ops.cast(self._grouped(flat, weights, chosen, index), x.dtype)).reshape(x.shape)
        for e in range(self.num_experts):
            y = y + self.experts[e](flat) * ops.cast(weights[:, e : e + 1], x.dtype)
        return y.reshape(x.shape)

    def _grouped(self, flat, weights, chosen, index):
        choices = flat.shape[0] * self.choices
        num_rows = (choices + self.num_experts * (ROW_BLOCK - 1) + ROW_BLOCK - 1) // ROW_BLOCK * ROW_BLOCK
        row, token, ends = _rows_by_expert(chosen, index, num_rows)
        gates, ups, downs = (), (), ()
        for e in range(self.num_experts):
            gates, ups = gates + (self.experts[e].w1.weight,), ups + (self.experts[e].w3.weight,)
            downs = downs + (self.experts[e].w2.weight,)
        product = layer_cell("GroupedLinear", self.num_experts)
        rows = self.dispatch(ops.cast(flat, ms.float32), row, token)
        inner = layer_cell("Glu")(product(rows, ends, gates), product(rows, ends, ups))
        return self.combine(product(inner, ends, downs), ops.gather_d(weights, 1, index), row, token)
