"""``kcp doctor`` on Ascend: what of Hyper-Parallel is there, and which way the KDA layers of a run file go (``--route``)."""

from __future__ import annotations

from dataclasses import replace

OPENED = ("state_scan", "ptp_chain", "ptp_tree", "hybrid", "auto")
DTYPES = {"bfloat16": "BFloat16", "float16": "Float16", "float32": "Float32"}


def ascend_rows() -> list[tuple[str, str]]:
    """``(name, state)`` of Hyper-Parallel, its symbols and kcp's switches on it."""
    from kcp.ops.backends import ascend, ascend_correction, ascend_stages
    from kcp.ops.backends.ascend_symbols import find, name_of, version

    rows = [("hyper_parallel", version() or str(find("chunk_kda")))]
    if version() is not None:
        for stage, what in ascend.describe():
            rows.append((name_of(stage), "there" if what == name_of(stage) else what))
    rows.append(("final-state correction", f"{ascend_correction.mode()} ({ascend_correction.VARIABLE}: auto, always, off)"))
    state_type = str(ascend_stages.state_dtype()).lower()
    rows.append(("states handed over as", f"{state_type} ({ascend_stages.STATE_DTYPE_VARIABLE}: float32, bfloat16)"))
    return rows


def traits_of(run):
    """What decides the way of the KDA layers of a :class:`kcp.config.RunConfig`."""
    from kcp.ops.backends.ascend_routing import Traits

    model, parallel = run.model, run.parallel
    return Traits(
        key_width=model.linear_head_dim,
        value_width=model.linear_value_head_dim,
        dtype=DTYPES[model.compute_dtype],
        chunk_size=model.kda_chunk_size,
        safe_gate=model.kda_safe_gate,
        disable_recompute=model.kda_disable_recompute,
        opened=parallel.context_parallel > 1 and model.kda_cp_strategy in OPENED,
        compiled=run.training.mode == 0,
    )


def route_lines(run) -> list[str]:
    """Which way the KDA layers of a run take on Ascend, stage by stage, and why."""
    from kcp.ops.backends import ascend
    from kcp.ops.backends.ascend_routing import FUSED, OTHER, completed, route
    from kcp.ops.backends.ascend_symbols import find, name_of

    traits = traits_of(run)
    way = route(traits)
    device = run.training.device_target
    lines = [f"KDA layers of {run.path}" + ("" if device == "Ascend" else f" (device_target {device}; this is what Ascend would do)")]
    if way.kind == OTHER:
        lines.append(f"  route       composite, in MindSpore operators: {way.why}")
        if traits.compiled:
            eager = route(replace(traits, compiled=False))
            lines.append(f"  in PyNative (context.mode 1, or kcp train --mode pynative) it is {eager.kind}: {eager.why}")
            if eager.kind == OTHER:
                return lines
            way, traits = eager, replace(traits, compiled=False)
        else:
            return lines
    else:
        lines.append(f"  route       {way.kind}: {way.why}")
    between = ("pre_process_fwd", "merge_fwd_bwd") if traits.opened else ()
    stages = ("chunk_kda",) if way.kind == FUSED else (*ascend.CHAIN, *between)
    others = {} if way.kind == FUSED else completed(traits)
    lines += [_stage_line(stage, find(stage), name_of(stage), others.get(stage)) for stage in stages]
    reasons = dict.fromkeys(reason for stage in stages if isinstance(reason := find(stage), str))
    return [*lines, *(f"  here: {reason}" for reason in reasons)]


def _stage_line(stage: str, found, name: str, limit: str | None) -> str:
    if limit is not None:
        return f"  {stage:<16}composite: {limit}"
    return f"  {stage:<16}{name}" + (" (not here)" if isinstance(found, str) else "")
