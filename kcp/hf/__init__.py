"""Hugging Face ``kimi_linear`` checkpoints: configuration, tensors and conversion, without MindSpore."""

from kcp.hf.config_json import model_options_from_json, model_options_to_json
from kcp.hf.convert import hf_to_kcp, kcp_to_hf
from kcp.hf.errors import CheckpointError
from kcp.hf.tensors import expected_shapes, scan

__all__ = [
    "CheckpointError",
    "expected_shapes",
    "hf_to_kcp",
    "kcp_to_hf",
    "model_options_from_json",
    "model_options_to_json",
    "scan",
]
