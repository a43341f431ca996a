"""KdaCore under Hyper-Parallel's own ``ContextParallel`` (section 3.5 of the Hyper-Parallel document), or under kcp's without it.

Hyper-Parallel's style hooks a module: before it, positional inputs go from sequence slices to head slices, after it the output goes back.
KDA needs all five token tensors exchanged (query, key, value, gate and beta); parameters stay whole and are sliced here.
"""

import importlib
from dataclasses import replace

from mindspore import nn

from kcp.layers.kda_core import KdaCore, KdaCoreConfig
from kcp.parallel.degrees import check_heads
from kcp.parallel.group import CpGroup

TOKEN_INPUTS = (0, 1, 2, 3, 4)  # query, key, value, gate, beta
_HOMES = ("hyper_parallel", "hyper_parallel.core.context_parallel.context_parallel")


def find_context_parallel() -> type | None:
    """Hyper-Parallel's ``ContextParallel``, None where it can't be imported."""
    for home in _HOMES:
        try:
            found = getattr(importlib.import_module(home), "ContextParallel", None)
        except ImportError:
            continue
        if found is not None:
            return found
    return None


def _local(x):
    """The local tensor of a distributed one (Hyper-Parallel's hooks hand over its DTensor)."""
    return x.to_local() if hasattr(x, "to_local") else x


class LocalHeads(nn.Cell):
    """KDA over all tokens and this rank's heads: what Hyper-Parallel's ``ContextParallel`` is put around.

    Args:
        config: of the whole core, all heads; ``strategy`` is not read.
        rank, size: this rank among those that share every sequence.

    Inputs:
        query, key, value, gate, beta ``[B, T, H / W, ...]``, plain or Hyper-Parallel's DTensor; a_log ``[Hv]`` and dt_bias ``[Hv, K]`` or
        ``[Hv*K]``, whole; cu_seqlens as :class:`KdaCore` takes them.

    Outputs:
        ``[B, T, Hv / W, V]``.

    Raises:
        ValueError: a head count is not divisible by ``size``.
    """

    def __init__(self, config: KdaCoreConfig, rank: int, size: int):
        super().__init__()
        check_heads(size, num_heads=config.num_heads, num_v_heads=config.num_v_heads)
        self.heads = config.num_v_heads // size
        self.begin = rank * self.heads
        local = {"num_heads": config.num_heads // size, "num_v_heads": self.heads, "strategy": "none", "ptp_head_groups": None}
        self.core = KdaCore(replace(config, **local), CpGroup.single())

    def construct(self, query, key, value, gate, beta, a_log=None, dt_bias=None, cu_seqlens=None):
        own = slice(self.begin, self.begin + self.heads)
        if a_log is not None:
            a_log = a_log[own]
        if dt_bias is not None:
            dt_bias = dt_bias.reshape((-1, query.shape[-1]))[own]
        tensors = [_local(x) for x in (query, key, value, gate, beta)]
        return self.core(*tensors, a_log, dt_bias, None, cu_seqlens, output_final_state=False)[0]


class OwnUlysses(nn.Cell):
    """The same interface over kcp's Ulysses."""

    def __init__(self, config: KdaCoreConfig, group: CpGroup):
        super().__init__()
        self.core = KdaCore(replace(config, strategy="ulysses" if group.size > 1 else "none"), group)

    def construct(self, query, key, value, gate, beta, a_log=None, dt_bias=None, cu_seqlens=None):
        return self.core(query, key, value, gate, beta, a_log, dt_bias, None, cu_seqlens, output_final_state=False)[0]


def context_parallel_core(config: KdaCoreConfig, group: CpGroup, device_mesh=None) -> nn.Cell:
    """KDA with Ulysses context parallelism, by Hyper-Parallel where that is asked for and there.

    Args:
        config: the whole core; its strategy is set here.
        group: the ranks that share every sequence.
        device_mesh: Hyper-Parallel's mesh of the same ranks in the same order; None: kcp's own exchange.

    Returns:
        A Cell of query, key, value, gate, beta (this rank's tokens, all heads), a_log, dt_bias and cu_seqlens, giving
        ``[B, T_local, Hv, V]``.

    Raises:
        ValueError: a head count is not divisible by the group's size.
    """
    style = None if device_mesh is None else find_context_parallel()
    if style is None:
        return OwnUlysses(config, group)
    core = LocalHeads(config, group.rank, group.size)
    wrapped = style(seq_dim=1, head_dim=2, qkv_indices=TOKEN_INPUTS).apply(core, device_mesh)
    return core if wrapped is None else wrapped
