"""Tensors of a safetensors folder: what is there, what should be there, and copying them without holding them.

Contents are raw bytes throughout: a bfloat16 tensor stays what it is, bit for bit. Only safetensors files are opened, never a pickle.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from kcp.hf.config_json import MLA, SPARSE, read_json
from kcp.hf.errors import CheckpointError
from kcp.hf.links import leads_outside, outside

INDEX = "model.safetensors.index.json"
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
SHARD_BYTES = 5_000_000_000
MAX_TENSORS = 1 << 22
_COPY_BYTES = 4 << 20


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        name: its name in the checkpoint.
        dtype: as safetensors spells it: ``F32``, ``BF16``, ``F16``.
        shape: its shape.
        file: the safetensors file.
        begin, end: its bytes in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.end - self.begin

    def chunks(self) -> Iterator[bytes]:
        """Its bytes, at most 4 MiB at a time."""
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            left = self.num_bytes
            while left:
                piece = stream.read(min(left, _COPY_BYTES))
                if not piece:
                    raise CheckpointError([f"{self.file}: ends within {self.name}"])
                left -= len(piece)
                yield piece

    def read(self) -> np.ndarray:
        """Its values as float32."""
        raw = b"".join(self.chunks())
        if self.dtype == "BF16":
            return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        kind = "<f4" if self.dtype == "F32" else "<f2"
        return np.frombuffer(raw, kind).astype(np.float32).reshape(self.shape)


def scan(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder: of the files that its index names, or of every ``*.safetensors`` without an index.

    Args:
        folder: the checkpoint.

    Returns:
        Tensors by name, in the order of the files.

    Raises:
        CheckpointError: one line for each fault of the index or a file.
    """
    if not folder.is_dir():
        raise CheckpointError([f"{folder}: no such folder"])
    problems: list[str] = [outside(path) for path in sorted(folder.glob("*.safetensors")) if leads_outside(path)]
    if problems:
        raise CheckpointError(problems)
    listed = _read_index(folder, problems) if os.path.lexists(folder / INDEX) else None
    names = sorted(set(listed.values())) if listed is not None else sorted(path.name for path in folder.glob("*.safetensors"))
    if not names and not problems:
        problems.append(f"{folder}: no *.safetensors file (pickled checkpoints are not read)")
    found: dict[str, StoredTensor] = {}
    for name in names:
        for tensor in _tensors_of_file(folder / name, problems):
            if tensor.name in found:
                problems.append(f"{tensor.name}: in {found[tensor.name].file.name} and again in {name}")
            elif listed is not None and listed.get(tensor.name) != name:
                problems.append(f"{tensor.name}: in {name}, which the index does not say")
            found.setdefault(tensor.name, tensor)
    if listed is not None and not problems:
        problems = [f"{name}: the index says {file}, which does not hold it" for name, file in listed.items() if name not in found]
    if problems:
        raise CheckpointError(problems)
    return found


def _read_index(folder: Path, problems: list[str]) -> dict[str, str]:
    """``weight_map`` of the index: file names by tensor; a name that is not a plain file name of this folder is refused."""
    path = folder / INDEX
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError([f"{path}: weight_map, a mapping of tensors to files, is needed"])
    for file in sorted(set(files.values())):
        if Path(file).name != file or "\\" in file or "\0" in file or not file.endswith(".safetensors"):
            problems.append(f"{path}: {file!r} is not the name of a *.safetensors file in this folder")
        elif not (folder / file).is_file():
            problems.append(f"{folder / file}: no such file, but the index names it")
    if problems:
        raise CheckpointError(problems)
    return files


def _tensors_of_file(path: Path, problems: list[str]) -> list[StoredTensor]:
    """Tensors of one file in the order of their bytes; safetensors itself checks the header first."""
    try:
        with safe_open(str(path), "np"):
            pass
        with path.open("rb") as stream:
            size = struct.unpack("<Q", stream.read(8))[0]
            header = json.loads(stream.read(size))
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        problems.append(f"{path}: not a safetensors file: {' '.join(str(error).split())[:160]}")
        return []
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in header.items():
        if entry["dtype"] not in DTYPE_BYTES:
            problems.append(f"{name}: dtype {entry['dtype']} in {path.name}; one of {', '.join(DTYPE_BYTES)} is needed")
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors.append(StoredTensor(name, entry["dtype"], tuple(entry["shape"]), path, begin, end))
    return sorted(tensors, key=lambda tensor: tensor.begin)


def expected_shapes(options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor of a model, as on disk.

    Args:
        options: keys of ``model.model_config``, complete for the layers that the model has.

    Returns:
        Shapes by name, layer by layer.

    Raises:
        CheckpointError: there would be more than ``MAX_TENSORS``.
    """
    experts = 3 * options["num_experts"] if SPARSE in options["mlp_layer_types"] else 0
    if len(options["layer_types"]) * (experts + 20) > MAX_TENSORS:
        given = f"num_hidden_layers = {len(options['layer_types'])} with num_experts = {options['num_experts']}"
        raise CheckpointError([f"{given}: that is more than {MAX_TENSORS} tensors, the most that a checkpoint may have"])
    hidden, vocabulary = options["hidden_size"], options["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer, (kind, feed_forward) in enumerate(zip(options["layer_types"], options["mlp_layer_types"], strict=True)):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,)}
        attention = _mla_shapes(options) if kind == MLA else _kda_shapes(options)
        shapes |= {f"{at}self_attn.{name}": shape for name, shape in attention.items()}
        inner = _moe_shapes(options) if feed_forward == SPARSE else _swiglu_shapes(hidden, options["intermediate_size"])
        shapes |= {f"{at}block_sparse_moe.{name}": shape for name, shape in inner.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not options.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _kda_shapes(options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, key = options["hidden_size"], options["linear_num_heads"], options["linear_head_dim"]
    value_heads, value = options.get("linear_num_value_heads") or heads, options.get("linear_value_head_dim") or key
    taps, q, v, gate = options["linear_conv_kernel_dim"], heads * key, value_heads * value, value_heads * key
    shapes: dict[str, tuple[int, ...]] = {f"{name}_proj.weight": (width, hidden) for name, width in (("q", q), ("k", q), ("v", v))}
    shapes |= {f"{name}_conv1d.weight": (width, 1, taps) for name, width in (("q", q), ("k", q), ("v", v))}
    shapes |= {"A_log": (1, 1, value_heads, 1), "dt_bias": (gate,), "b_proj.weight": (value_heads, hidden)}
    shapes |= {"f_a_proj.weight": (value, hidden), "f_b_proj.weight": (gate, value)}
    shapes |= {"g_a_proj.weight": (value, hidden), "g_b_proj.weight": (v, value)}
    return shapes | {"o_norm.weight": (value,), "o_proj.weight": (hidden, v)}


def _mla_shapes(options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, latent = options["hidden_size"], options["num_attention_heads"], options["kv_lora_rank"]
    nope, rope, value = options["qk_nope_head_dim"], options["qk_rope_head_dim"], options["v_head_dim"]
    return {
        "q_proj.weight": (heads * (nope + rope), hidden),
        "kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * (nope + value), latent),
        "o_proj.weight": (hidden, heads * value),
    }


def _swiglu_shapes(hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {"gate_proj.weight": (inner, hidden), "up_proj.weight": (inner, hidden), "down_proj.weight": (hidden, inner)}


def _moe_shapes(options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, experts = options["hidden_size"], options["moe_intermediate_size"], options["num_experts"]
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (experts, hidden), "gate.e_score_correction_bias": (experts,)}
    for expert in range(experts):
        at = f"experts.{expert}."
        shapes |= {at + "w1.weight": (inner, hidden), at + "w2.weight": (hidden, inner), at + "w3.weight": (inner, hidden)}
    if options["num_shared_experts"]:
        shared = _swiglu_shapes(hidden, inner * options["num_shared_experts"])
        shapes |= {f"shared_experts.{name}": shape for name, shape in shared.items()}
    return shapes


def check_tensors(tensors: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint that is not exactly the model's.

    Raises:
        CheckpointError: one line for each tensor that is missing, mis-shaped or too many.
    """
    problems = [f"{name}: missing, shape {list(shape)} is needed" for name, shape in shapes.items() if name not in tensors]
    for name, tensor in tensors.items():
        if name not in shapes:
            problems.append(f"{name}: not a tensor of this model (shape {list(tensor.shape)}, in {tensor.file.name})")
        elif tensor.shape != shapes[name]:
            problems.append(f"{name}: has shape {list(tensor.shape)}, {list(shapes[name])} is needed")
    if problems:
        raise CheckpointError(problems)


def write_shards(folder: Path, stem: str, tensors: Iterable[StoredTensor], shard_bytes: int = SHARD_BYTES, index: bool = True) -> None:
    """Copy tensors into safetensors files of about ``shard_bytes``, ``{stem}-00001-of-00002.safetensors`` and so on, one piece at a time.

    Args:
        folder: an existing folder.
        stem: begin of the files' names.
        tensors: in the order in which they are written.
        shard_bytes: a file is closed before it would grow larger; a larger tensor has a file of its own.
        index: write the index too; a single file is then called ``{stem}.safetensors`` and needs none.
    """
    shards: list[list[StoredTensor]] = []
    filled = 0
    for tensor in tensors:
        if not shards or filled + tensor.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 or not index else f"{stem}.safetensors"
        with (folder / name).open("wb") as stream:
            _write_file(stream, shard)
        files |= {tensor.name: name for tensor in shard}
    if index and len(shards) > 1:
        total = sum(tensor.num_bytes for shard in shards for tensor in shard)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_file(stream: BinaryIO, tensors: list[StoredTensor]) -> None:
    # Wide types first, as the format asks for aligned tensors.
    tensors = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, begin + tensor.num_bytes]}
        begin += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors:
        for piece in tensor.chunks():
            stream.write(piece)
    stream.flush()
    os.fsync(stream.fileno())
