"""Models registered with MindFormers; importing this package registers them (and imports MindFormers)."""

from kcp.models.kimi_linear import KimiLinearConfig, KimiLinearForCausalLM, KimiLinearModel, load_hf

__all__ = ["KimiLinearConfig", "KimiLinearForCausalLM", "KimiLinearModel", "load_hf"]
