"""Checkpoints of a training run: written whole or not at all, checked before a single value is used. NumPy alone, never a pickle.

    OUTPUT/checkpoints/step_00000120/
        model.safetensors               the weights, under their names in a Hugging Face checkpoint
        model.safetensors.index.json    names the file above: the folder serves as `load_checkpoint: DIR` and for `kcp convert` too
        model_config.yaml               the section model.model_config
        optimizer.safetensors           everything else that training changes: both moments, the optimizer's step
        state.json                      step, data position, loader, random numbers, counters; size and SHA-256 of the other files

A checkpoint is written under a hidden temporary name, flushed to the disk and then renamed. Ranks hold the same parameters, so rank 0
writes for all and every rank reads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kcp.hf.convert import MODEL_CONFIG
from kcp.hf.errors import CheckpointError
from kcp.hf.tensors import INDEX
from kcp.outputs import reason_of

if TYPE_CHECKING:
    from kcp.config import RunConfig

FORMAT = 1
FOLDER = "checkpoints"
STATE, MODEL, OPTIMIZER = "state.json", "model.safetensors", "optimizer.safetensors"
FILES = (MODEL, OPTIMIZER, INDEX, MODEL_CONFIG)
_NAME = re.compile(r"step_(\d{8,})")
_LEFT_OVER = re.compile(r"\.(step_\d{8,})\.(new|old)")
_BLOCK = 4 << 20
_MAX_STATE_BYTES = 16 << 20
_STATE_KEYS = {"format", "step", "samples", "data", "random", "counters", "run", "files"}
_DTYPES = {"F32": "float32", "I32": "int32", "I64": "int64", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "BOOL": "bool"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are all there and whose bytes are those that were written.

    Attributes:
        folder: where it is.
        state: ``state.json``: step, samples, data, random, counters, run.
        tensors: ``(file, dtype, shape)`` of every tensor.
    """

    folder: Path
    state: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, str, tuple[int, ...]]]

    @property
    def step(self) -> int:
        """Steps that were done."""
        return self.state["step"]

    def check(self, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Refuse a checkpoint that is not exactly what is trained.

        Args:
            wanted: dtype and shape of every parameter, optimizer's included.

        Raises:
            CheckpointError: one line for each tensor that is missing, too many, or of another shape or dtype.
        """
        problems = []
        for name, (dtype, shape) in wanted.items():
            if name not in self.tensors:
                problems.append(f"{name}: missing in {self.folder}, {dtype} {list(shape)} is needed")
                continue
            file, found_dtype, found_shape = self.tensors[name]
            if found_shape != tuple(shape):
                problems.append(f"{name}: has shape {list(found_shape)} in {file}, {list(shape)} is needed")
            if found_dtype != dtype:
                problems.append(f"{name}: is {found_dtype} in {file}, {dtype} is needed")
        extra = sorted(self.tensors.keys() - wanted.keys())
        problems += [f"{name}: in {self.tensors[name][0]}, but nothing of this run has that name" for name in extra]
        if problems:
            raise CheckpointError(problems)

    def read(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor, one at a time."""
        for file in (MODEL, OPTIMIZER):
            with safe_open(str(self.folder / file), "np") as opened:
                for name in opened.keys():
                    yield name, opened.get_tensor(name)


def name_of(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the oldest first; left-overs of interrupted writes have other names."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found)]


def find_checkpoint(place: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest one in it or in its ``checkpoints``.

    Raises:
        CheckpointError: there is none.
    """
    if (place / STATE).is_file():
        return place
    found = checkpoints_in(place) or checkpoints_in(place / FOLDER)
    if not found:
        raise CheckpointError([f"{place}: no checkpoint to resume from (a folder {name_of(0)[:5]}NNNNNNNN with {STATE} is needed)"])
    return found[-1]


def resume_place(run: RunConfig, folder: Path, resume: str | None) -> Path | None:
    """Where the checkpoint is that a run continues; None when it starts anew.

    Args:
        run: the configuration; ``resume_training: True`` with ``load_checkpoint`` asks for a resume too.
        folder: the run's output folder.
        resume: what ``--resume`` says: None without it, "" without a folder.
    """
    if resume is not None:
        return Path(resume).expanduser() if resume else folder
    wanted = run.raw.get("load_checkpoint") if run.raw.get("resume_training") else None
    return Path(wanted).expanduser() if isinstance(wanted, str) and wanted else None


def write_checkpoint(
    folder: Path,
    model: Mapping[str, np.ndarray],
    optimizer: Mapping[str, np.ndarray],
    state: Mapping[str, Any],
    model_config: Mapping[str, Any],
    keep_last: int,
) -> Path:
    """Write a checkpoint and remove the oldest ones.

    Args:
        folder: where the run's checkpoints are; made if missing.
        model, optimizer: tensors by name.
        state: content of ``state.json`` but ``format`` and ``files``.
        model_config: the section ``model.model_config``.
        keep_last: how many checkpoints stay; 0: all.

    Returns:
        The checkpoint's folder. Whenever this process dies, a folder of that name is complete or not there.

    Raises:
        CheckpointError: it can't be written; no part of it is left, earlier ones are.
    """
    final = folder / name_of(state["step"])
    new, old = folder / f".{final.name}.new", folder / f".{final.name}.old"
    index = {"metadata": {"total_size": sum(a.nbytes for a in model.values())}, "weight_map": dict.fromkeys(sorted(model), MODEL)}
    needed = sum(array.nbytes for array in (*model.values(), *optimizer.values()))
    at = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new, ignore_errors=True)
        if needed > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        new.mkdir()
        contents = {
            MODEL: lambda path: save_file(dict(model), str(path), {"format": "pt"}),
            OPTIMIZER: lambda path: save_file(dict(optimizer), str(path)),
            INDEX: lambda path: path.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8"),
            MODEL_CONFIG: lambda path: path.write_text(yaml.safe_dump({"model": {"model_config": dict(model_config)}}), encoding="utf-8"),
        }
        files = {}
        for name, write in contents.items():
            at = new / name
            write(at)
            files[name] = {"bytes": at.stat().st_size, "sha256": _digest_of_file(at)}
        at = new / STATE
        at.write_text(json.dumps(_sealed({"format": FORMAT, **state, "files": files})) + "\n", encoding="utf-8")
        for name in (*FILES, STATE):
            at = new / name
            _flush(at)
        at = final
        _flush(new)
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        new.rename(final)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not final.exists():
            old.rename(final)
        file = f"{at.name}, " if at.parent == new else ""
        raise CheckpointError(
            [f"{final}: the checkpoint can't be written: {file}{needed} bytes in all: {reason_of(error, folder)}"]
        ) from None
    shutil.rmtree(old, ignore_errors=True)
    for path in checkpoints_in(folder)[:-keep_last] if keep_last else ():
        _remove(path)
    return final


def set_aside(folder: Path, after: int) -> Path | None:
    """Move checkpoints of steps later than ``after`` to a folder beside this one: they belong to a course that the run leaves.

    Returns:
        That folder, ``checkpoints.old-1`` and so on; None when there was nothing to move.
    """
    later = [path for path in checkpoints_in(folder) if int(_NAME.fullmatch(path.name)[1]) > after]
    if not later:
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
    return aside


def remove_left_overs(folder: Path) -> None:
    """Remove what interrupted writes left under temporary names; a checkpoint that was about to be replaced comes back."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _LEFT_OVER.fullmatch(path.name)
        if match and match[2] == "old" and not (folder / match[1]).exists():
            path.rename(folder / match[1])
        elif match:
            shutil.rmtree(path, ignore_errors=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Check every byte of a checkpoint.

    Raises:
        CheckpointError: one line for each file that is missing, truncated or changed.
    """
    state = _read_state(folder / STATE)
    problems = []
    for name in FILES:
        path, entry = folder / name, state["files"][name]
        try:
            size = path.stat().st_size if not path.is_symlink() else None
            if size is None:
                problems.append(f"{path}: a link, a file of this folder is needed")
            elif size != entry["bytes"]:
                problems.append(f"{path}: has {size} bytes, {entry['bytes']} were written; it is incomplete or changed")
            elif _digest_of_file(path) != entry["sha256"]:
                problems.append(f"{path}: its checksum is not the one of what was written; its content has changed")
        except OSError as error:
            problems.append(f"{path}: can't be read: {error.strerror}")
    tensors: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    for file in (MODEL, OPTIMIZER) if not problems else ():
        try:
            with safe_open(str(folder / file), "np") as opened:
                for name in opened.keys():
                    piece = opened.get_slice(name)
                    tensors[name] = (file, _DTYPES.get(piece.get_dtype(), piece.get_dtype()), tuple(piece.get_shape()))
        except (SafetensorError, OSError) as error:
            problems.append(f"{folder / file}: not a safetensors file: {' '.join(str(error).split())[:160]}")
    if problems:
        others = [path.name for path in checkpoints_in(folder.parent) if path.name != folder.name]
        if others:
            problems.append(f"{folder.parent}: other checkpoints to resume from: {', '.join(others)}")
        raise CheckpointError(problems)
    return Checkpoint(folder, state, tensors)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        if path.is_symlink():
            raise CheckpointError([f"{path}: a link, a file of this folder is needed"])
        if path.stat().st_size > _MAX_STATE_BYTES:
            raise CheckpointError([f"{path}: {path.stat().st_size} bytes, a checkpoint's state has at most {_MAX_STATE_BYTES}"])
        content = json.loads(path.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError([f"{path}: can't be read: {error.strerror}"]) from None
    except (ValueError, RecursionError):
        raise CheckpointError([f"{path}: not JSON; it is incomplete or changed"]) from None
    if not isinstance(content, dict) or content != _sealed({key: value for key, value in content.items() if key != "sha256"}):
        raise CheckpointError([f"{path}: its checksum is not the one of what was written; its content has changed"])
    if content.get("format") != FORMAT or not _STATE_KEYS <= content.keys() or set(content["files"]) != set(FILES):
        raise CheckpointError([f"{path}: format {content.get('format')!r}, {FORMAT} is needed"])
    return content


def _sealed(state: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(state, sort_keys=True)
    return state | {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def _digest_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(_BLOCK):
            digest.update(piece)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Remove a checkpoint; while its files go, none of them is under its final name."""
    hidden = path.with_name(f".{path.name}.new")
    with contextlib.suppress(OSError):
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
