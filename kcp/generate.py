"""What ``kcp generate`` runs: find the weights and the tokenizer of a folder, continue a prompt, print as tokens come."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kcp.checkpoint import FOLDER, find_checkpoint
from kcp.data.text import DataError
from kcp.data.tokenizer import ByteTokenizer, FileTokenizer
from kcp.hf.convert import MODEL_CONFIG, options_of_yaml
from kcp.hf.errors import CheckpointError
from kcp.hf.tensors import StoredTensor, check_tensors, expected_shapes, scan


def read_model(folder: Path, config: Path | None) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Model options and tensors of a folder that holds a Hugging Face checkpoint, kcp's safetensors, or a run.

    Args:
        folder: with ``config.json``, or with ``model_config.yaml`` (as ``kcp convert`` and a run's checkpoints have it), or the output
            folder of a run, whose newest checkpoint is taken.
        config: a run's YAML in place of these.

    Raises:
        CheckpointError: one line for each reason why it is not a checkpoint of a model that kcp has.
    """
    if not folder.is_dir():
        raise CheckpointError([f"{folder}: no such folder"])
    if (folder / FOLDER).is_dir():
        folder = find_checkpoint(folder)
    if config is None and (folder / "config.json").exists():
        from kcp.hf.convert import read_hf

        options, tensors, _ = read_hf(folder)
        return options, tensors
    source = config or folder / MODEL_CONFIG
    if not source.is_file():
        allowed = f"config.json or {MODEL_CONFIG} beside the tensors, or --config with a run's YAML, is needed"
        raise CheckpointError([f"{folder}: does not say what model it is; {allowed}"])
    options, tensors = options_of_yaml(source), scan(folder)
    check_tensors(tensors, expected_shapes(options))
    return options, tensors


def tokenizer_of(folder: Path, vocab_size: int) -> FileTokenizer | ByteTokenizer:
    """``tokenizer.json`` of the folder, else bytes.

    Raises:
        CheckpointError: neither fits the vocabulary.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return FileTokenizer(path)
        except DataError as error:
            raise CheckpointError([str(error)]) from None
    if vocab_size < ByteTokenizer.vocab_size:
        raise CheckpointError([f"{path}: no such file, and a vocabulary of {vocab_size} is too small for bytes"])
    return ByteTokenizer()


def prompt_tokens(tokenizer: FileTokenizer | ByteTokenizer, prompt: str) -> np.ndarray:
    """``[1, T]`` of a document that begins with the prompt: its bos token, where there is one, and the text's."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return np.concatenate((np.array(begin, np.int32), tokenizer.encode(prompt, add_special_tokens=False)))[None]


def run(
    folder: Path,
    prompt: str,
    num_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    config: Path | None = None,
    stream: TextIO | None = None,
) -> str:
    """Continue a prompt and write it to ``stream`` as it grows.

    Args:
        folder, config: as in :func:`read_model`.
        prompt: the text that comes first.
        num_tokens, temperature, top_k, seed: as in :func:`kcp.models.kimi_linear.generation.generate`.
        stream: where the text goes, by default stdout.

    Returns:
        The continuation.

    Raises:
        CheckpointError: there is no model or no tokenizer.
        ValueError: an option out of range.
    """
    stream = stream or sys.stdout
    options, tensors = read_model(folder, config)
    tokenizer = tokenizer_of(folder, options["vocab_size"])

    import mindspore as ms

    from kcp.models import KimiLinearConfig, KimiLinearForCausalLM
    from kcp.models.kimi_linear.generation import generate
    from kcp.weights import load_weights

    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    one_rank = {"context_parallel_size": 1, "kda_cp_strategy": "none", "mla_cp_strategy": "none"}
    model = KimiLinearForCausalLM(KimiLinearConfig(**(options | one_rank)))
    load_weights(model, tensors)
    tokens: list[int] = []
    written = ""
    for chosen in generate(model, prompt_tokens(tokenizer, prompt), num_tokens, temperature, top_k, seed, tokenizer.eos_token_id):
        tokens.append(int(chosen[0]))
        text = tokenizer.decode(tokens)
        if not text.endswith("\ufffd"):  # a character whose bytes are not all there yet
            stream.write(text[len(written) :])
            stream.flush()
            written = text
    text = tokenizer.decode(tokens)
    stream.write(text[len(written) :] + "\n")
    return text
