"""``kcp convert``: a Hugging Face ``kimi_linear`` checkpoint into one that a MindFormers YAML of kcp loads, and back.

Both hold the same tensors under the same names, so a conversion checks every name and shape and copies bytes. kcp's side is

    OUT/kcp-00001-of-00002.safetensors ...    load_checkpoint: OUT, load_ckpt_format: safetensors
    OUT/model_config.yaml                     the section model.model_config of a run's YAML
    OUT/tokenizer.json ...                    carried along

Nothing is left behind by a conversion that fails: all is written to a temporary folder that is renamed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from kcp.config import ConfigError, model_options
from kcp.config_fields import Problems, Section
from kcp.config_yaml import read_yaml
from kcp.hf.config_json import model_options_from_json, model_options_to_json, read_json
from kcp.hf.errors import CheckpointError
from kcp.hf.links import leads_outside, outside
from kcp.hf.tensors import DTYPE_NAMES, SHARD_BYTES, StoredTensor, check_tensors, expected_shapes, scan, write_shards
from kcp.outputs import reason_of

MODEL_CONFIG = "model_config.yaml"
_COMPANIONS = (
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json tokenizer.model tiktoken.model vocab.json "
    "merges.txt chat_template.jinja"
).split()


def read_hf(folder: Path) -> tuple[dict[str, Any], dict[str, StoredTensor], tuple[str, ...]]:
    """Model options and tensors of a Hugging Face folder, checked against each other.

    Returns:
        ``(options, tensors, unused)``; see :func:`kcp.hf.config_json.model_options_from_json`.

    Raises:
        CheckpointError: one line for each reason why it is not a checkpoint of a model that kcp has.
    """
    if not folder.is_dir():
        raise CheckpointError([f"{folder}: no such folder"])
    options, unused = model_options_from_json(read_json(folder / "config.json"))
    tensors = scan(folder)
    check_tensors(tensors, expected_shapes(options))
    return options, tensors, unused


def hf_to_kcp(source: str | Path, target: str | Path, shard_bytes: int = SHARD_BYTES) -> tuple[str, ...]:
    """Convert a Hugging Face folder.

    Args:
        source: folder with ``config.json`` and safetensors, sharded with an index or not.
        target: folder to make; it must not exist, or be empty.
        shard_bytes: size that a file is closed at.

    Returns:
        Keys of ``config.json`` that kcp does not know, and does not carry over.

    Raises:
        CheckpointError: one line a reason; then nothing is written.
    """
    source, target = Path(source), Path(target)
    _check_target(target)
    options, tensors, unused = read_hf(source)
    text = yaml.safe_dump({"model": {"model_config": {"model_type": "kimi_linear", **options}}}, sort_keys=False, default_flow_style=None)

    def write(folder: Path) -> None:
        write_shards(folder, "kcp", tensors.values(), shard_bytes, index=False)
        (folder / MODEL_CONFIG).write_text(text, encoding="utf-8")

    _write_whole(source, target, tensors, write)
    return unused


def kcp_to_hf(
    source: str | Path,
    target: str | Path,
    config: str | Path | None = None,
    spelling: str = "transformers5",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Convert a folder of kcp's safetensors.

    Args:
        source: folder with ``*.safetensors``.
        target: folder to make; it must not exist, or be empty.
        config: YAML with ``model.model_config``: a run's, or by default ``model_config.yaml`` of ``source``.
        spelling: of ``config.json``, one of :data:`kcp.hf.config_json.SPELLINGS`.
        shard_bytes: size that a file is closed at.

    Raises:
        CheckpointError: one line a reason; then nothing is written.
    """
    source, target = Path(source), Path(target)
    _check_target(target)
    if not source.is_dir():
        raise CheckpointError([f"{source}: no such folder"])
    options = options_of_yaml(Path(config) if config else source / MODEL_CONFIG)
    tensors = scan(source)
    check_tensors(tensors, expected_shapes(options))
    sizes = {dtype: sum(t.num_bytes for t in tensors.values() if t.dtype == dtype) for dtype in DTYPE_NAMES}
    content = model_options_to_json(options, DTYPE_NAMES[max(sizes, key=lambda dtype: sizes[dtype])], spelling)

    def write(folder: Path) -> None:
        write_shards(folder, "model", tensors.values(), shard_bytes)
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    _write_whole(source, target, tensors, write)


def options_of_yaml(path: Path) -> dict[str, Any]:
    """Options of ``model.model_config``, checked, with the keys that only Hugging Face uses."""
    try:
        problems = Problems()
        section = Section(read_yaml(path), "", problems).section("model").section("model_config")
        options = asdict(model_options(section))
        if problems.lines:
            raise ConfigError(problems.lines)
    except ConfigError as error:
        raise CheckpointError([line if str(path) in line else f"{path}: {line}" for line in error.problems]) from None
    return {**section.raw, **options}


def _check_target(target: Path) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError([f"{target}: exists and is not a folder"])
    if target.is_dir() and any(target.iterdir()):
        raise CheckpointError([f"{target}: is not empty; a new folder is needed"])
    if not target.absolute().parent.is_dir():
        raise CheckpointError([f"{target.absolute().parent}: no such folder"])


def _write_whole(source: Path, target: Path, tensors: Mapping[str, StoredTensor], write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary folder beside ``target``, add what both sides carry, and give it its name."""
    left = [outside(source / name) for name in _COMPANIONS if (source / name).exists() and leads_outside(source / name)]
    if left:
        raise CheckpointError(left)
    parent = target.absolute().parent
    needed, free = sum(tensor.num_bytes for tensor in tensors.values()), shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError([f"{target}: {needed} bytes are needed, {free} are free"])
    temporary = None
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=parent))
        write(temporary)
        for name in _COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, temporary / name)
        temporary.chmod(0o777 & ~_umask())
        if target.is_dir():
            target.rmdir()
        os.replace(temporary, target)
    except OSError as error:
        raise CheckpointError([f"{target}: can't be written: {reason_of(error, parent)}"]) from None
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current
