"""Kimi-Linear: KDA and MLA layers, dense feed-forwards and mixtures of experts; Hugging Face checkpoints in and out."""

from kcp.models.kimi_linear.configuration import KimiLinearConfig
from kcp.models.kimi_linear.huggingface import config_from_hf, config_to_hf, load_hf
from kcp.models.kimi_linear.model import KimiLinearDecoderLayer, KimiLinearForCausalLM, KimiLinearModel

__all__ = [
    "KimiLinearConfig",
    "KimiLinearDecoderLayer",
    "KimiLinearForCausalLM",
    "KimiLinearModel",
    "config_from_hf",
    "config_to_hf",
    "load_hf",
]
