"""Layers: KdaCore (the op under context parallelism) and the blocks around it."""

from kcp.layers.kda_core import KdaCore, KdaCoreConfig

__all__ = ["KdaCore", "KdaCoreConfig"]
