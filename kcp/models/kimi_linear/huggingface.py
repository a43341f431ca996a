"""A Hugging Face ``kimi_linear`` folder as a kcp model; reading, checks and conversion are in :mod:`kcp.hf`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspore import Tensor

from kcp.hf.config_json import model_options_from_json, model_options_to_json, read_json
from kcp.hf.convert import read_hf
from kcp.models.kimi_linear.configuration import KimiLinearConfig
from kcp.models.kimi_linear.model import KimiLinearForCausalLM
from kcp.parallel.group import CpGroup


def config_from_hf(source: str | Path | Mapping[str, Any], **options: Any) -> KimiLinearConfig:
    """The configuration that a ``config.json`` describes.

    Args:
        source: a checkpoint folder, or the parsed JSON; in either spelling.
        options: kcp's own options beside it, such as ``seq_length`` or ``kda_cp_strategy``.

    Raises:
        kcp.hf.CheckpointError: one line for every key that is missing, ill-typed or asks for another model.
    """
    content = source if isinstance(source, Mapping) else read_json(Path(source) / "config.json")
    found, unused = model_options_from_json(content)
    _say_unused(unused)
    return KimiLinearConfig(**(found | options))


def config_to_hf(config: KimiLinearConfig, dtype: str = "float32", spelling: str = "transformers5") -> dict[str, Any]:
    """``config.json`` of a configuration, as :func:`kcp.hf.config_json.model_options_to_json` writes it."""
    return model_options_to_json(vars(config), dtype, spelling)


def load_hf(folder: str | Path, group: CpGroup | None = None, **options: Any) -> KimiLinearForCausalLM:
    """Build the model of a Hugging Face folder and load its tensors, one after the other, into float32 parameters.

    Args:
        folder: ``config.json`` and safetensors, sharded with an index or not.
        group: the ranks that share a sample; by default all of ``context_parallel_size``.
        options: kcp's own options, such as ``seq_length``, ``kda_cp_strategy`` or ``context_parallel_size``.

    Returns:
        The model; ``model.logits(input_ids)`` are its logits ``[B, T, vocab]`` (this rank's slice of T).

    Raises:
        kcp.hf.CheckpointError: the folder is not a checkpoint of a model that kcp has, one line a reason.
    """
    found, tensors, unused = read_hf(Path(folder))
    _say_unused(unused)
    model = KimiLinearForCausalLM(KimiLinearConfig(**(found | options)), group)
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(tensors[parameter.name].read()))
    return model


def _say_unused(unused: tuple[str, ...]) -> None:
    if unused:
        warnings.warn(f"config.json: keys that kcp does not know are not used: {', '.join(unused)}", stacklevel=3)
