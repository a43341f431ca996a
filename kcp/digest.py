"""One digest of what all ranks must share before the first step: configuration, versions and initial parameters."""

import hashlib
import json
import platform
from collections.abc import Iterable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

import kcp

_BYTES = 16


class RankMismatchError(RuntimeError):
    """The ranks of a launch do not run the same configuration, versions or initial parameters."""


def digests(config: Any, parameters: Iterable[ms.Parameter]) -> dict[str, str]:
    """Digest of each thing that the ranks must share.

    Args:
        config: Plain dicts, lists and scalars, without anything that differs between ranks by right.
        parameters: Initial parameters; names, shapes, dtypes and every bit of their values count.

    Returns:
        Hexadecimal digests of 16 bytes, by ``configuration``, ``versions`` and ``initial parameters``.
    """
    import mindformers

    versions = (kcp.__version__, ms.__version__, mindformers.__version__, np.__version__, platform.python_version())
    of_parameters = hashlib.sha256()
    for parameter in parameters:
        value = np.ascontiguousarray(parameter.asnumpy())
        of_parameters.update(f"{parameter.name} {value.shape} {value.dtype};".encode())
        of_parameters.update(value.tobytes())
    texts = {
        "configuration": json.dumps(config, sort_keys=True, default=str).encode(),
        "versions": " ".join(versions).encode(),
    }
    found = {name: hashlib.sha256(text).hexdigest()[: 2 * _BYTES] for name, text in texts.items()}
    return found | {"initial parameters": of_parameters.hexdigest()[: 2 * _BYTES]}


def check_same_on_all_ranks(own: dict[str, str]) -> None:
    """Gather every rank's digests and refuse a difference. Collective over the world.

    Args:
        own: This rank's digests, from :func:`digests`.

    Raises:
        RankMismatchError: On every rank alike, naming what differs, the ranks and both values.
    """
    # Bytes as float32: exact, and a dtype that the CPU's AllGather has.
    numbers = np.frombuffer(bytes.fromhex("".join(own.values())), np.uint8).astype(np.float32)
    gathered = ops.AllGather()(Tensor(numbers)).asnumpy().astype(np.uint8).reshape(-1, len(own), _BYTES)
    differences = []
    for part, name in enumerate(own):
        values = [rank[part].tobytes().hex() for rank in gathered]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            differences.append(f"{name} differ: rank 0 has {values[0]}, rank {other} has {values[other]}")
    if differences:
        raise RankMismatchError("; ".join(differences))
