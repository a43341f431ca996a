"""Layers: KdaCore (the op under context parallelism), the KDA layer of Kimi-Linear, and the plain cells around it."""

from kcp.layers.kda_attention import KdaAttention, KdaAttentionConfig
from kcp.layers.kda_core import KdaCore, KdaCoreConfig
from kcp.layers.short_conv import ShortConv

__all__ = ["KdaAttention", "KdaAttentionConfig", "KdaCore", "KdaCoreConfig", "ShortConv"]
