"""Local mathematics of KDA, no communication: the differentiable op and its nine explicit stages."""

from kcp.ops.chunk_kda import chunk_kda

__all__ = ["chunk_kda"]
