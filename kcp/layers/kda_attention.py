"""The KDA layer of Kimi-Linear: projections, ShortConv, gates, KdaCore, gated norm (Kimi Linear report, section 4).

q, k, v = ShortConv(x W_q), ShortConv(x W_k), ShortConv(x W_v)
g = x W_fa W_fb                raw forget gate; a_log, dt_bias and the gate function act inside the core
beta = x W_b                   write strength before its sigmoid
y = W_o [ RMSNorm(core(q, k, v, g, beta)) * sigmoid(x W_ga W_gb) ]
"""

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.common.initializer import initializer

from kcp.layers.kda_core import KdaCore, KdaCoreConfig
from kcp.layers.kda_health import HealthMeter
from kcp.layers.linear import Linear, side_by_side
from kcp.layers.norms import GatedRMSNorm
from kcp.layers.short_conv import ShortConv
from kcp.parallel.group import CpGroup


@dataclass(frozen=True)
class KdaAttentionConfig:
    """Configuration of :class:`KdaAttention`; what it shares with the core is checked by :class:`KdaCoreConfig`.

    Attributes:
        hidden_size: width D of the residual stream.
        num_heads, num_v_heads, head_dim, v_head_dim: as in :class:`KdaCoreConfig`.
        conv_size: taps of the short convolutions.
        conv_bias: whether they have a bias.
        gate_bias: whether the output gate's second projection has a bias (FLA's layer has, Kimi-Linear's checkpoints have not).
        safe_gate, lower_bound, allow_neg_eigval, chunk_size, disable_recompute, strategy, keep_transitions, reduce_replicated_grads,
            ptp_head_groups, hybrid_ulysses_degree, plan_tokens, plan_packed: as in :class:`KdaCoreConfig`.
        norm_eps: epsilon of the output's RMSNorm.
        initializer_range: standard deviation of the projections' start.
    """

    hidden_size: int
    num_heads: int
    num_v_heads: int | None = None
    head_dim: int = 128
    v_head_dim: int | None = None
    conv_size: int = 4
    conv_bias: bool = False
    gate_bias: bool = False
    safe_gate: bool = False
    lower_bound: float = -5.0
    allow_neg_eigval: bool = False
    norm_eps: float = 1e-5
    strategy: str = "none"
    disable_recompute: bool = True
    chunk_size: int = 64
    initializer_range: float = 0.02
    keep_transitions: bool = True
    reduce_replicated_grads: str = "trainer"
    ptp_head_groups: int | None = None
    hybrid_ulysses_degree: int | None = None
    plan_tokens: int | None = None
    plan_packed: bool = False

    def __post_init__(self):
        for name in ("hidden_size", "conv_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; allowed: an integer >= 1")
        core = self.core()
        object.__setattr__(self, "num_v_heads", core.num_v_heads)
        object.__setattr__(self, "v_head_dim", core.v_head_dim)

    def core(self) -> KdaCoreConfig:
        """The core's part: in-kernel norm, sigmoid and gate."""
        return KdaCoreConfig(
            num_heads=self.num_heads,
            num_v_heads=self.num_v_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            strategy=self.strategy,
            safe_gate=self.safe_gate,
            lower_bound=self.lower_bound,
            allow_neg_eigval=self.allow_neg_eigval,
            chunk_size=self.chunk_size,
            disable_recompute=self.disable_recompute,
            keep_transitions=self.keep_transitions,
            reduce_replicated_grads=self.reduce_replicated_grads,
            ptp_head_groups=self.ptp_head_groups,
            hybrid_ulysses_degree=self.hybrid_ulysses_degree,
            plan_tokens=self.plan_tokens,
            plan_packed=self.plan_packed,
        )


class _ConvTaps(nn.Cell):
    """Weight (and bias) of one short convolution, named as on disk."""

    def __init__(self, width: int, size: int, has_bias: bool):
        super().__init__()
        bound = size**-0.5
        taps = np.random.uniform(-bound, bound, (width, 1, size)).astype(np.float32)
        self.weight = ms.Parameter(ms.Tensor(taps), name="weight")
        self.bias = ms.Parameter(initializer("zeros", (width,), ms.float32), name="bias") if has_bias else None


def _gate_start(config: KdaAttentionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Starting values ``(A_log [1, 1, Hv, 1], dt_bias [Hv*K])``: decay rates dt log-uniform in [1e-3, 0.1] a token.

    Softplus gate: A uniform in [1, 16] as in Mamba, softplus(dt_bias) = dt. Lower-bound gate: A = 1, |lower_bound| sigmoid(dt_bias) = dt.
    """
    heads, width = config.num_v_heads, config.num_v_heads * config.head_dim
    dt = np.exp(np.random.uniform(np.log(1e-3), np.log(0.1), width))
    if config.safe_gate:
        return np.zeros((1, 1, heads, 1), np.float32), np.log(dt / (-config.lower_bound - dt)).astype(np.float32)
    a_log = np.log(np.random.uniform(1.0, 16.0, (1, 1, heads, 1)))
    return a_log.astype(np.float32), (dt + np.log(-np.expm1(-dt))).astype(np.float32)


class KdaAttention(nn.Cell):
    """One KDA layer over this rank's slice of every sequence.

    Args:
        config: a :class:`KdaAttentionConfig`.
        group: the ranks that share every sequence; None: one rank.

    Inputs:
        hidden_states ``[B, T_local, D]``; cu_seqlens: global boundaries of packed documents as :class:`KdaCore` takes them, or None.

    Outputs:
        ``[B, T_local, D]``, the dtype of hidden_states.

    Parameters, named and shaped as in a Hugging Face ``kimi_linear`` checkpoint: ``{q,k,v}_proj.weight``, ``{q,k,v}_conv1d.weight``
    ``[width, 1, conv_size]``, ``A_log [1, 1, Hv, 1]``, ``dt_bias [Hv*K]``, ``f_a_proj``, ``f_b_proj``, ``b_proj``, ``g_a_proj``,
    ``g_b_proj``, ``o_norm``, ``o_proj``.
    """

    def __init__(self, config: KdaAttentionConfig, group: CpGroup | None = None):
        super().__init__()
        group = CpGroup.single() if group is None else group
        std, hidden = config.initializer_range, config.hidden_size
        self.num_heads, self.num_v_heads = config.num_heads, config.num_v_heads
        self.head_dim, self.v_head_dim = config.head_dim, config.v_head_dim
        self.key_width, self.value_width = config.num_heads * config.head_dim, config.num_v_heads * config.v_head_dim
        gate_width = config.num_v_heads * config.head_dim
        self.q_proj = Linear(hidden, self.key_width, init_std=std)
        self.k_proj = Linear(hidden, self.key_width, init_std=std)
        self.v_proj = Linear(hidden, self.value_width, init_std=std)
        self.q_conv1d = _ConvTaps(self.key_width, config.conv_size, config.conv_bias)
        self.k_conv1d = _ConvTaps(self.key_width, config.conv_size, config.conv_bias)
        self.v_conv1d = _ConvTaps(self.value_width, config.conv_size, config.conv_bias)
        self.conv_bias = config.conv_bias
        a_log, dt_bias = _gate_start(config)
        self.A_log = ms.Parameter(ms.Tensor(a_log), name="A_log")
        self.dt_bias = ms.Parameter(ms.Tensor(dt_bias), name="dt_bias")
        self.f_a_proj = Linear(hidden, config.v_head_dim, init_std=std)
        self.f_b_proj = Linear(config.v_head_dim, gate_width, init_std=std)
        self.b_proj = Linear(hidden, config.num_v_heads, init_std=std)
        self.g_a_proj = Linear(hidden, config.v_head_dim, init_std=std)
        self.g_b_proj = Linear(config.v_head_dim, self.value_width, has_bias=config.gate_bias, init_std=std)
        self.o_norm = GatedRMSNorm(config.v_head_dim, config.norm_eps)
        self.o_proj = Linear(self.value_width, hidden, init_std=std)
        self.short_conv = ShortConv(group, config.conv_size)
        self.core = KdaCore(config.core(), group)
        self.meter = HealthMeter(self.core.config, self.core.local_options(True, True))

    def construct(self, hidden_states, cu_seqlens=None):
        x = hidden_states
        taps, bias = self.taps()
        out, _ = self.attend(x, self.short_conv(self.project(x), taps, bias, cu_seqlens), None, cu_seqlens, False)
        return self.close(x, out)

    def health(self, hidden_states, cu_seqlens=None):
        """``[7]`` float32, the figures of :mod:`kcp.layers.kda_health` over this rank's slice; inputs as ``construct``'s."""
        x = hidden_states
        taps, bias = self.taps()
        q, k, v, g, beta = self.core_inputs(x, self.short_conv(self.project(x), taps, bias, cu_seqlens))
        gate = self.g_b_proj(self.g_a_proj(x)).reshape(v.shape)
        return self.meter.measure(q, k, v, g, beta, self.A_log.reshape((-1,)), self.dt_bias, gate)

    def project(self, x):
        """q, k and v before the convolutions, side by side ``[B, T, widths]``."""
        return side_by_side(x, self.q_proj, self.k_proj, self.v_proj)

    def taps(self):
        """Weights ``[widths, 1, size]`` of the three convolutions, and their biases or None."""
        taps = ops.concat((self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight), 0)
        bias = None
        if self.conv_bias:
            bias = ops.concat((self.q_conv1d.bias, self.k_conv1d.bias, self.v_conv1d.bias), 0)
        return taps, bias

    def core_inputs(self, x, qkv):
        """The core's q, k, v, g and beta from convolved ``qkv`` and x."""
        tokens = x.shape[:2]
        q, k, v = ops.split(qkv, (self.key_width, self.key_width, self.value_width), -1)
        q = q.reshape(tokens + (self.num_heads, self.head_dim))
        k = k.reshape(tokens + (self.num_heads, self.head_dim))
        v = v.reshape(tokens + (self.num_v_heads, self.v_head_dim))
        g = self.f_b_proj(self.f_a_proj(x)).reshape(tokens + (self.num_v_heads, self.head_dim))
        return q, k, v, g, self.b_proj(x)

    def attend(self, x, qkv, initial_state, cu_seqlens, output_final_state):
        """The core on convolved ``qkv``, with the gates of x: ``(out [B, T, Hv, V], final state or None)``."""
        q, k, v, g, beta = self.core_inputs(x, qkv)
        return self.core(q, k, v, g, beta, self.A_log.reshape((-1,)), self.dt_bias, initial_state, cu_seqlens, output_final_state)

    def close(self, x, out):
        """Gated norm and output projection."""
        gate = self.g_b_proj(self.g_a_proj(x)).reshape(out.shape)
        return self.o_proj(self.o_norm(out, gate).reshape(x.shape[:2] + (self.value_width,)))
