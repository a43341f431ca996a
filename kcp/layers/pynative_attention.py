"""KDA as a self-attention of MindFormers 2.x's PyNative layers, which build it by ``(config, submodules, layer_number)`` and call it with
sequence-first tensors. Importable without MindFormers 2.x and without hyper_parallel: it needs neither."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from kcp.layers.hyper_parallel import context_parallel_core, find_context_parallel
from kcp.layers.kda_attention import KdaAttention, KdaAttentionConfig
from kcp.layers.kda_core import KdaCore
from kcp.layers.short_conv import ShortConv
from kcp.parallel.group import CpGroup
from kcp.parallel.subgroups import part

# field of KdaAttentionConfig -> attributes of MindFormers' TransformerConfig, the first that is there and not None
_CONFIG = {
    "hidden_size": ("hidden_size",),
    "num_heads": ("linear_num_key_heads", "linear_num_heads", "num_attention_heads"),
    "num_v_heads": ("linear_num_value_heads",),
    "head_dim": ("linear_key_head_dim", "linear_head_dim", "kv_channels"),
    "v_head_dim": ("linear_value_head_dim",),
    "conv_size": ("linear_conv_kernel_dim",),
    "norm_eps": ("layernorm_epsilon", "rms_norm_eps"),
    "initializer_range": ("init_method_std", "initializer_range"),
    "safe_gate": ("kda_safe_gate",),
    "lower_bound": ("kda_lower_bound",),
    "allow_neg_eigval": ("kda_allow_neg_eigval",),
    "chunk_size": ("kda_chunk_size",),
    "disable_recompute": ("kda_disable_recompute",),
}


def attention_config(config: Any) -> KdaAttentionConfig:
    """A :class:`KdaAttentionConfig` of MindFormers' ``TransformerConfig`` (or anything with its attributes).

    Raises:
        ValueError: hidden_size or the heads are missing, or a value is not allowed.
    """
    fields = {}
    for field, names in _CONFIG.items():
        value = next((v for v in (getattr(config, name, None) for name in names) if v is not None), None)
        if value is not None:
            fields[field] = value
    for field in ("hidden_size", "num_heads", "head_dim"):
        if field not in fields:
            raise ValueError(f"config has none of {', '.join(_CONFIG[field])}; allowed: a TransformerConfig with one of them")
    return KdaAttentionConfig(**fields)


@dataclass
class PynativeKdaSelfAttentionSubmodules:
    """What a layer specification may put in place of kcp's own parts.

    Attributes:
        attention: built with ``(KdaAttentionConfig, CpGroup)``; batch-first ``[B, T, D]`` in and out. A class, a function, or MindFormers'
            ``ModuleSpec`` of one.
    """

    attention: Any = KdaAttention


class PynativeKdaSelfAttention(nn.Cell):
    """One KDA layer where MindFormers' ``TransformerLayer`` expects a self-attention.

    Args:
        config: MindFormers' ``TransformerConfig``.
        submodules: a :class:`PynativeKdaSelfAttentionSubmodules`; None: its defaults.
        layer_number: number of the layer in its block, from 1.

    Inputs:
        hidden_states ``[S, B, H]``. actual_seq_len: where packed documents end, cumulative ``[M]`` (B = 1), or None. attention_mask and
        rotary_pos_emb are taken and not read: KDA is causal by itself and has no positions.

    Outputs:
        ``[S, B, H]`` in the dtype of hidden_states; there is no bias left to add.

    Raises:
        ValueError: key_value_states or prefix_keys_values is given (KDA is a self-attention and keeps no keys), or actual_seq_len with
            B > 1.
    """

    def __init__(self, config: Any, submodules: PynativeKdaSelfAttentionSubmodules | None = None, layer_number: int = 1):
        super().__init__()
        submodules = PynativeKdaSelfAttentionSubmodules() if submodules is None else submodules
        self.config = config
        self.layer_number = max(1, layer_number)
        self.kda_config = attention_config(config)
        self.compute_dtype = _dtype(getattr(config, "compute_dtype", None))
        self.build = _builder(submodules.attention)
        self.attention = self.build(self.kda_config, CpGroup.single())

    def construct(
        self, hidden_states, attention_mask=None, key_value_states=None, rotary_pos_emb=None, prefix_keys_values=None, actual_seq_len=None
    ):
        for name, value in (("key_value_states", key_value_states), ("prefix_keys_values", prefix_keys_values)):
            if value is not None:
                raise ValueError(f"{name} is given; allowed: None, KDA is a self-attention without keys to prepend")
        dtype = hidden_states.dtype
        x = ops.cast(ops.swapaxes(hidden_states, 0, 1), self.compute_dtype or dtype)
        out = self.attention(x, self._boundaries(actual_seq_len, x.shape[0]))
        return ops.cast(ops.swapaxes(out, 0, 1), dtype)

    def _boundaries(self, actual_seq_len, batch):
        if actual_seq_len is None:
            return None
        if batch != 1:
            raise ValueError(f"actual_seq_len is given with B={batch}; allowed: B=1 (flatten the batch into one pack)")
        if isinstance(actual_seq_len, ms.Tensor):
            return ops.concat((ops.zeros((1,), ms.int32), ops.cast(actual_seq_len.reshape((-1,)), ms.int32)), 0)
        return (0, *(int(n) for n in actual_seq_len))

    def reset_parameter(self) -> None:
        """Give every parameter a new start, as MindFormers does after a deferred construction."""
        fresh = dict(self.build(self.kda_config, CpGroup.single()).parameters_and_names())
        for name, parameter in self.attention.parameters_and_names():
            parameter.set_data(fresh[name].value())


def _builder(spec: Any) -> Callable[..., nn.Cell]:
    """What builds the module of a class, a function or a ``ModuleSpec`` (which has ``module`` and ``params``)."""
    return partial(getattr(spec, "module", spec), **(getattr(spec, "params", None) or {}))


def _dtype(value):
    """A MindSpore dtype of a dtype or its name; None of None."""
    return getattr(ms, value) if isinstance(value, str) else value


def _group_of(device_mesh) -> CpGroup:
    """The ranks of a Hyper-Parallel mesh, in its order, which is the order of time."""
    ranks = [int(r) for r in device_mesh.rank_list]
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step < 1 or ranks != list(range(ranks[0], ranks[0] + step * len(ranks), step)):
        raise ValueError(f"device_mesh has ranks {ranks}; allowed: evenly spaced ranks in rising order")
    return part(CpGroup.world(), range(ranks[0], ranks[0] + step * len(ranks), step))


def parallelize_kda_self_attention(
    module: PynativeKdaSelfAttention, device_mesh=None, *, group: CpGroup | None = None, strategy: str = "ulysses"
) -> PynativeKdaSelfAttention:
    """Share the sequences of a layer among ranks.

    Args:
        module: a layer built on one rank; it is changed and returned, its parameters stay.
        device_mesh: Hyper-Parallel's mesh of the context-parallel ranks; with ``strategy="ulysses"`` its own ``ContextParallel`` makes the
            exchange where it can be imported.
        group: the ranks, in place of a mesh.
        strategy: as in :class:`~kcp.layers.kda_core.KdaCoreConfig`.

    Raises:
        ValueError: neither mesh nor group is given, or the strategy can't serve the heads.
    """
    if device_mesh is None and group is None:
        raise ValueError("device_mesh and group are None; allowed: one of them")
    group = _group_of(device_mesh) if group is None else group
    attention = module.attention
    config = replace(module.kda_config.core(), strategy=strategy if group.size > 1 else "none")
    attention.short_conv = ShortConv(group, module.kda_config.conv_size)
    if strategy == "ulysses" and device_mesh is not None and find_context_parallel() is not None:
        attention.core = _WithState(context_parallel_core(config, group, device_mesh))
    else:
        attention.core = KdaCore(config, group)
    return module


class _WithState(nn.Cell):
    """A core without states under the interface of :class:`KdaCore`."""

    def __init__(self, core: nn.Cell):
        super().__init__()
        self.core = core

    def construct(
        self, query, key, value, gate, beta, a_log=None, dt_bias=None, initial_state=None, cu_seqlens=None, output_final_state=False
    ):
        if initial_state is not None or output_final_state:
            raise ValueError("initial_state or output_final_state is given; allowed under Hyper-Parallel's ContextParallel: neither")
        return self.core(query, key, value, gate, beta, a_log, dt_bias, cu_seqlens), None
