"""The strategies by name: what they allow, and how each is built for a call whose shapes are known."""

from dataclasses import dataclass, replace

import mindspore as ms

from kcp.ops.options import KdaOptions
from kcp.parallel import plan
from kcp.parallel.boundaries import flat_rows
from kcp.parallel.chain_units import RowParts
from kcp.parallel.degrees import check_heads, head_groups, hybrid_degree
from kcp.parallel.documents import HostDocuments, TensorDocuments
from kcp.parallel.group import CpGroup
from kcp.parallel.hybrid import Hybrid, split_group
from kcp.parallel.ptp_chain import PtpChain
from kcp.parallel.ptp_tree import PtpTree
from kcp.parallel.state_scan import StateScan
from kcp.parallel.ulysses import Ulysses

STRATEGIES = ("none", "ulysses", "state_scan", "ptp_chain", "ptp_tree", "hybrid", "auto")
PLAN_TOKENS = 4096  # a rank's, where auto is not told


@dataclass(frozen=True)
class Call:
    """One call of a sliced KdaCore.

    Attributes:
        batch: B.
        num_tokens: of every row, all ranks together.
        local_tokens: of this rank's slice.
        rows: boundaries of every row as integers; None: dense, or a Tensor holds them.
        documents_per_row: M of a boundary Tensor; 0: there is none.
        has_initial_state: whether initial states are given.
        compiled: whether the call is part of a graph.
    """

    batch: int
    num_tokens: int
    local_tokens: int
    rows: tuple | None
    documents_per_row: int
    has_initial_state: bool
    compiled: bool


def resolve_auto(config, group: CpGroup):
    """The configuration with ``"auto"`` replaced by what :func:`kcp.parallel.plan.choose` takes; the same on every rank.

    Sizes are ``config.plan_tokens`` and the heads, the machine is MindSpore's device and execution mode as they are now (under ``ms.jit``
    in PyNative mode the strategy is planned for PyNative).
    """
    if config.strategy != "auto":
        return config
    sizes = plan.Sizes(
        group.size, 1, config.plan_tokens or PLAN_TOKENS * group.size, config.num_heads, config.num_v_heads, config.head_dim,
        config.v_head_dim, packed=config.plan_packed, chunk_size=config.chunk_size, disable_recompute=config.disable_recompute,
        keep_transitions=config.keep_transitions, ptp_head_groups=config.ptp_head_groups,
        hybrid_ulysses_degree=config.hybrid_ulysses_degree,
    )  # fmt: skip
    machine = plan.machine_of(ms.get_context("device_target"), ms.get_context("mode") == ms.GRAPH_MODE)
    return replace(config, strategy=plan.choose(sizes, machine).strategy)


def check_strategy(config, group: CpGroup) -> None:
    """Refuse a configuration that can't serve the group.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    heads = {"num_heads": config.num_heads, "num_v_heads": config.num_v_heads}
    if config.strategy == "none" and group.size > 1:
        allowed = ", ".join(repr(name) for name in STRATEGIES[1:])
        raise ValueError(f"strategy is 'none' with a group of {group.size} ranks; allowed: {allowed}")
    if config.strategy == "ulysses":
        check_heads(group.size, **heads)
    if config.strategy == "hybrid":
        hybrid_degree(group.size, config.hybrid_ulysses_degree, **heads)


def split_for(config, group: CpGroup) -> tuple[CpGroup, CpGroup] | None:
    """The hybrid's inner and outer groups, made once a core and before any graph; None for other strategies."""
    if config.strategy != "hybrid":
        return None
    heads = {"num_heads": config.num_heads, "num_v_heads": config.num_v_heads}
    return split_group(group, hybrid_degree(group.size, config.hybrid_ulysses_degree, **heads))


def build(config, group: CpGroup, parts, backend, fields: dict, call: Call):
    """The strategy object, with explicit ``forward`` and ``backward``.

    Args:
        config: a :class:`~kcp.layers.kda_core.KdaCoreConfig`.
        group: all ranks; parts: the result of :func:`split_for`.
        backend: serves the local op.
        fields: fields of :class:`~kcp.ops.options.KdaOptions` but boundaries and states.
        call: the shapes.
    """
    reduced_by, is_tensor = config.reduce_replicated_grads, call.documents_per_row > 0
    if config.strategy == "ulysses":
        cu = "tensor" if is_tensor else None if call.rows is None else flat_rows(call.rows, call.num_tokens)
        opts = KdaOptions(cu_seqlens=cu, has_initial_state=call.has_initial_state, state_v_first=config.state_v_first, **fields)
        return Ulysses(opts, backend, group, reduced_by, call.batch)
    if config.strategy == "ptp_chain":
        return _chain(config, group, backend, fields, call)
    if config.strategy == "hybrid":
        inner, outer = parts
        tokens = sum(inner.lengths(call.local_tokens))
        scan = _scan(StateScan, config, outer, backend, fields, call, tokens, "trainer")
        opts = KdaOptions(has_initial_state=call.has_initial_state, state_v_first=config.state_v_first, **fields)
        return Hybrid(opts, group, inner, scan, reduced_by, call.batch)
    kind = PtpTree if config.strategy == "ptp_tree" else StateScan
    return _scan(kind, config, group, backend, fields, call, call.local_tokens, reduced_by)


def _dense_rows(call: Call) -> tuple:
    return call.rows or ((0, call.num_tokens),) * call.batch


def _scan(kind, config, group, backend, fields, call, local_tokens, reduced_by):
    begin = sum(group.lengths(local_tokens)[: group.rank])
    end, is_first = begin + local_tokens, group.rank == 0
    if call.documents_per_row:
        documents = TensorDocuments(call.batch, call.documents_per_row, begin, end, is_first)
        cu = "tensor"
    else:
        documents = HostDocuments(_dense_rows(call), begin, end, is_first)
        cu = documents.local_boundaries
    opts = KdaOptions(cu_seqlens=cu, has_initial_state=True, **fields)
    arguments = (opts, backend, group, documents, reduced_by, call.has_initial_state, config.state_v_first, config.keep_transitions)
    return kind(*arguments, group.collectives.has_point_to_point(call.compiled)) if kind is PtpTree else kind(*arguments)


def _chain(config, group, backend, fields, call):
    begin = sum(group.lengths(call.local_tokens)[: group.rank])
    end, is_first, is_last = begin + call.local_tokens, group.rank == 0, group.rank == group.size - 1
    if call.documents_per_row:
        rows = RowParts.from_tensor(call.batch, call.documents_per_row, begin, end, is_first, is_last)
    else:
        rows = RowParts.from_rows(_dense_rows(call), begin, end, is_first)
    opts = KdaOptions(cu_seqlens="tensor" if call.documents_per_row else None, has_initial_state=True, **fields)
    groups = head_groups(config.num_heads, config.ptp_head_groups, group.size)
    direct = group.collectives.has_point_to_point(call.compiled)
    reduced_by = config.reduce_replicated_grads
    return PtpChain(opts, backend, group, rows, groups, reduced_by, call.has_initial_state, config.state_v_first, direct)
