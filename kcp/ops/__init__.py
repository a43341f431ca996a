"""Local mathematics of KDA, no communication: the differentiable op and its nine explicit stages."""

from kcp.ops.chunk_kda import chunk_kda
from kcp.ops.stages import (
    chunk_kda_bwd_dhu,
    chunk_kda_bwd_finalize,
    chunk_kda_bwd_prepare,
    chunk_kda_fwd_finalize,
    chunk_kda_fwd_h,
    chunk_kda_fwd_prepare,
    chunk_kda_merge_fwd_bwd,
    chunk_kda_pre_process_bwd,
    chunk_kda_pre_process_fwd,
)

__all__ = [
    "chunk_kda",
    "chunk_kda_bwd_dhu",
    "chunk_kda_bwd_finalize",
    "chunk_kda_bwd_prepare",
    "chunk_kda_fwd_finalize",
    "chunk_kda_fwd_h",
    "chunk_kda_fwd_prepare",
    "chunk_kda_merge_fwd_bwd",
    "chunk_kda_pre_process_bwd",
    "chunk_kda_pre_process_fwd",
]
