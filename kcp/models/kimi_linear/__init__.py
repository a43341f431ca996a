"""Kimi-Linear: the subset whose layers are KDA with a dense SwiGLU feed-forward."""

from kcp.models.kimi_linear.configuration import KimiLinearConfig
from kcp.models.kimi_linear.model import KimiLinearDecoderLayer, KimiLinearForCausalLM, KimiLinearModel

__all__ = ["KimiLinearConfig", "KimiLinearDecoderLayer", "KimiLinearForCausalLM", "KimiLinearModel"]
