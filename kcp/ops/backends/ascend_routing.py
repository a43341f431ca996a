"""What Hyper-Parallel's kernels take, and which way a call goes: the fused op, or the chain of six stages.

Limits are those of section 4.4 of the Hyper-Parallel document and of the kernels' own checks; the routes are section 3.3. Nothing here
touches a tensor or a device, so that ``kcp doctor --route`` can tell the route of a run file anywhere.
"""

from dataclasses import dataclass

WIDTH = 128
CHUNK = 64
FUSED, STAGES, OTHER = "fused", "stages", "other"


@dataclass(frozen=True)
class Traits:
    """What decides the way of a call.

    Attributes:
        key_width, value_width: K and V.
        dtype: of q, k and v, as MindSpore writes it (``"BFloat16"``).
        chunk_size, safe_gate, use_gate_in_kernel, disable_recompute, state_v_first: as in :func:`kcp.ops.chunk_kda`.
        has_initial_state: whether one is given.
        wants_final_state: whether the final state may be in the loss.
        opened: a context-parallel strategy exchanges states between the stages.
        compiled: the call is part of a graph.
    """

    key_width: int = WIDTH
    value_width: int = WIDTH
    dtype: str = "BFloat16"
    chunk_size: int = CHUNK
    safe_gate: bool = False
    use_gate_in_kernel: bool = True
    disable_recompute: bool = True
    state_v_first: bool = False
    has_initial_state: bool = False
    wants_final_state: bool = False
    opened: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Route:
    """``kind`` is ``"fused"``, ``"stages"`` or ``"other"`` (another backend); ``why`` says it in a few words."""

    kind: str
    why: str


def sizes_limit(key_width: int, value_width: int, chunk_size: int) -> str | None:
    """Which size the kernels do not take, or None."""
    for name, value in (("K", key_width), ("V", value_width)):
        if value != WIDTH:
            return f"{name} is {value}; the kernels take {WIDTH}"
    if chunk_size != CHUNK:
        return f"chunk_size is {chunk_size}; the kernels take {CHUNK}"
    return None


def dtype_limit(name: str, dtype) -> str | None:
    """Why a tensor of ``dtype`` is not for the kernels, or None."""
    return None if str(dtype) == "BFloat16" else f"the dtype of {name} is {dtype}; the kernels take BFloat16"


def finalize_limit(safe_gate: bool, use_gate_in_kernel: bool) -> str | None:
    """Why the last backward stage of the chain can't push a gradient through this gate, or None."""
    if not use_gate_in_kernel:
        return "the gate is pre-computed (use_gate_in_kernel=False); bwd_finalize takes raw gates with safe_gate=True"
    return None if safe_gate else "safe_gate is False; bwd_finalize takes safe_gate=True (the lower-bound gate)"


def op_limit(traits: Traits) -> str | None:
    """Why the whole op is not for the kernels, or None."""
    if traits.compiled:
        return "the call is part of a graph; Hyper-Parallel's functions run in PyNative mode"
    return dtype_limit("q, k and v", traits.dtype) or sizes_limit(traits.key_width, traits.value_width, traits.chunk_size)


def route(traits: Traits) -> Route:
    """The way of a call, and why (section 3.3 of the Hyper-Parallel document)."""
    limit = op_limit(traits)
    if limit is not None:
        return Route(OTHER, limit)
    if traits.opened:
        return Route(STAGES, "states are exchanged between the stages")
    if not traits.use_gate_in_kernel:
        return Route(STAGES, "the gate is pre-computed, and the fused backward takes raw gates")
    if traits.safe_gate:
        return Route(STAGES, "safe_gate with a raw gate")
    if traits.has_initial_state:
        return Route(STAGES, "an initial state is given")
    if not traits.disable_recompute:
        return Route(STAGES, "the backward recomputes its caches (disable_recompute=False)")
    if traits.state_v_first:
        return Route(STAGES, "states are V-first")
    if traits.wants_final_state:
        return Route(STAGES, "the final state may be in the loss, which the fused backward refuses")
    return Route(FUSED, "a raw softplus gate without states: FwdV2 and the fused backward")


def completed(traits: Traits) -> dict[str, str]:
    """Stages of the chain that another backend completes for these traits: ``{stage: limit}``."""
    limit = finalize_limit(traits.safe_gate, traits.use_gate_in_kernel)
    return {} if limit is None else {"bwd_finalize": limit}
