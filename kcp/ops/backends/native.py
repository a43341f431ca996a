"""The native backend: fused C++ kernels for CPUs (``native/*.cc``), called as MindSpore "aot" custom operators.

``native_fused`` holds the differentiable op and the fused summaries, ``native_stages`` the explicit stages. Merging a few gathered
summaries is not worth a kernel: that stage is the composite backend's.
"""

import mindspore as ms

from kcp.ops.backends.composite import merge_fwd_bwd
from kcp.ops.backends.native_call import LIBRARY
from kcp.ops.backends.native_exchange import (
    backward_close,
    backward_end,
    backward_open,
    backward_summary,
    forward_close,
    forward_end,
    forward_open,
    forward_summary,
)
from kcp.ops.backends.native_fused import (
    op_backward,
    op_backward_into,
    op_forward,
    op_forward_into,
    op_state_gradient,
    op_summary,
)
from kcp.ops.backends.native_stages import (
    bwd_dhu,
    bwd_finalize,
    bwd_prepare,
    fwd_finalize,
    fwd_h,
    fwd_prepare,
    pre_process_bwd,
    pre_process_fwd,
)

__all__ = [
    "backward_close",
    "backward_end",
    "backward_open",
    "backward_summary",
    "bwd_dhu",
    "bwd_finalize",
    "bwd_prepare",
    "forward_close",
    "forward_end",
    "forward_open",
    "forward_summary",
    "fwd_finalize",
    "fwd_h",
    "fwd_prepare",
    "merge_fwd_bwd",
    "op_backward",
    "op_backward_into",
    "op_forward",
    "op_forward_into",
    "op_state_gradient",
    "op_summary",
    "pre_process_bwd",
    "pre_process_fwd",
    "unavailable",
]


def unavailable(stage: str) -> str | None:
    """Why ``stage`` (or ``"chunk_kda"``) can't be served here; None: it can."""
    if ms.get_context("device_target") != "CPU":
        return f"it serves CPUs, and the device target is {ms.get_context('device_target')}"
    if not LIBRARY.exists():
        return "the native kernels are not built; install kcp where a C++ compiler (g++) is found"
    return None
