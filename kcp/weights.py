"""Weights that a run starts from: a folder of safetensors written by ``kcp convert`` (``load_checkpoint: DIR``).

MindFormers' own loading of a complete checkpoint needs a barrier that the CPU lacks as soon as there are several processes, and it
passes over tensors that do not match. Here every rank reads the folder, tensor by tensor, and the checkpoint is exactly the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kcp.config import RunConfig
from kcp.hf.tensors import StoredTensor, check_tensors, expected_shapes, scan


def weights_of_run(run: RunConfig) -> dict[str, StoredTensor] | None:
    """The tensors that a run starts from, checked against its model.

    Args:
        run: the configuration.

    Returns:
        Tensors by name; None when ``load_checkpoint`` is not a folder with safetensors directly in it (then the key is MindFormers'), or
        training is resumed (then it is :func:`kcp.checkpoint.resume_place`'s).

    Raises:
        kcp.hf.CheckpointError: one line for each tensor that is missing, extra or mis-shaped.
    """
    path = run.raw.get("load_checkpoint")
    if not isinstance(path, str) or not path or run.raw.get("resume_training"):
        return None
    folder = Path(path).expanduser()
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return None
    tensors = scan(folder)
    check_tensors(tensors, expected_shapes(asdict(run.model)))
    return tensors


def load_weights(network: Any, tensors: Mapping[str, StoredTensor]) -> None:
    """Put tensors into the parameters of the same names, in the parameters' dtypes.

    Args:
        network: a cell whose parameters include all of ``tensors``; what else it has (an optimizer's state) is left alone.
        tensors: as :func:`weights_of_run` returns them.

    Raises:
        RuntimeError: a tensor has no parameter.
    """
    from mindspore import Tensor

    parameters = {parameter.name: parameter for parameter in network.get_parameters()}
    left = sorted(tensors.keys() - parameters.keys())
    if left:
        raise RuntimeError(f"no parameter in the network for {', '.join(left)}")
    for name, tensor in tensors.items():
        parameters[name].set_data(Tensor(tensor.read(), parameters[name].dtype))
