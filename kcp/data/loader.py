"""The data loader that MindFormers builds from ``train_dataset.data_loader``; importing this module registers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import dataset as ds

from kcp.config_checks import COLUMNS
from kcp.data.packing import EpochView, PackedSamples
from kcp.data.recall import VOCABULARY, RecallOptions, RecallSamples
from kcp.data.text import STDLIB, DataError, TextCorpus
from kcp.data.tokenizer import FileTokenizer


def _place(column_names: Sequence[str], context_parallel: int, num_shards: int | None, shard_id: int | None) -> tuple[int, int]:
    """``(workers, rank)`` of this process, the columns and the degree checked."""
    if tuple(column_names) != COLUMNS:
        raise ValueError(f"train_dataset.input_columns = {list(column_names)}: {list(COLUMNS)} is needed")
    workers, rank = num_shards or 1, shard_id or 0
    if context_parallel < 1 or workers % context_parallel:
        raise ValueError(f"context_parallel = {context_parallel}: a divisor of the {workers} workers is needed")
    return workers, rank


@MindFormerRegister.register(MindFormerModuleType.DATASET_LOADER)
class KcpTextDataset:
    """Packed text for `CausalLanguageModelDataset`: each context parallel group reads the same samples.

    Args:
        dataset_dir: "stdlib", a file, a folder, or a list of them; None is "stdlib".
        seq_length: T, tokens of a whole sample (a rank takes its slice in the model).
        context_parallel: ranks that read the same sample. Ranks r with equal r // context_parallel are one group.
        seed, shuffle, num_samples, max_documents: see `PackedSamples`.
        tokenizer: a tokenizer.json or a folder that transformers reads; empty: one token a byte.
        vocab_size: of the model, given by kcp; every token must be below it. 0: not checked.
        position: epoch and sample that come first, given by kcp when a run is resumed.
        hold: every pass gives the same samples, given by kcp for an evaluation.
        column_names: the columns, given by MindFormers from `input_columns`.
        num_shards: number of workers, given by MindFormers; None is 1.
        shard_id: rank, given by MindFormers; None is 0.
        batch_size: samples of a step on a replica, given by MindFormers.
        python_multiprocessing, num_parallel_workers: given by MindFormers; without effect, one thread reads the samples in order.

    Returns:
        A MindSpore dataset of single samples: input_ids int32 [T], labels int32 [T] (shifted, -100 on padding),
        loss_mask float32 [T], cu_seqlens int32 [max_documents + 1].

    Raises:
        ValueError: an argument does not fit; `DataError` when the text can't be read.
    """

    def __new__(
        cls,
        dataset_dir: str | Sequence[str] | None = None,
        seq_length: int = 512,
        context_parallel: int = 1,
        seed: int = 42,
        shuffle: bool = True,
        num_samples: int = 0,
        max_documents: int = 64,
        tokenizer: str = "",
        vocab_size: int = 0,
        position: Sequence[int] = (0, 0),
        hold: bool = False,
        column_names: Sequence[str] = COLUMNS,
        num_shards: int | None = None,
        shard_id: int | None = None,
        python_multiprocessing: bool = False,
        num_parallel_workers: int = 1,
        batch_size: int = 1,
    ) -> Any:
        workers, rank = _place(column_names, context_parallel, num_shards, shard_id)
        corpus = TextCorpus(dataset_dir if dataset_dir is not None else STDLIB)
        of_files = FileTokenizer(tokenizer) if tokenizer else None
        if of_files is not None and vocab_size and of_files.vocab_size > vocab_size:
            raise DataError(
                f"tokenizer = {tokenizer}: has {of_files.vocab_size} tokens, model.model_config.vocab_size = {vocab_size} allows fewer"
            )
        samples = PackedSamples(
            corpus.documents,
            seq_length,
            max_documents=max_documents,
            seed=seed,
            shuffle=shuffle,
            num_samples=num_samples,
            tokenizer=of_files,
        )
        identity = {"seq_length": seq_length, "seed": seed, "shuffle": shuffle, "num_samples": num_samples, "max_documents": max_documents}
        view = EpochView(
            samples,
            workers // context_parallel,
            rank // context_parallel,
            batch_size,
            (int(position[0]), int(position[1])),
            hold,
            identity | {"text": corpus.digest(), "tokenizer": tokenizer},
        )
        return ds.GeneratorDataset(view, list(COLUMNS), shuffle=False, num_parallel_workers=1, python_multiprocessing=False)


@MindFormerRegister.register(MindFormerModuleType.DATASET_LOADER)
class KcpRecallDataset:
    """Associative recall with the columns of `KcpTextDataset`; the samples come in order, short documents first.

    Args:
        seq_length, num_samples, shortest, whole, queries, max_documents, seed: see `kcp.data.recall.RecallOptions`.
        context_parallel, vocab_size, position, hold, column_names, num_shards, shard_id, python_multiprocessing, num_parallel_workers,
            batch_size: as in `KcpTextDataset`.

    Raises:
        ValueError: an argument does not fit.
    """

    def __new__(
        cls,
        seq_length: int = 4352,
        num_samples: int = 1024,
        context_parallel: int = 1,
        shortest: int = 128,
        whole: float = 0.5,
        queries: int = 24,
        max_documents: int = 64,
        seed: int = 0,
        vocab_size: int = 0,
        position: Sequence[int] = (0, 0),
        hold: bool = False,
        column_names: Sequence[str] = COLUMNS,
        num_shards: int | None = None,
        shard_id: int | None = None,
        python_multiprocessing: bool = False,
        num_parallel_workers: int = 1,
        batch_size: int = 1,
    ) -> Any:
        workers, rank = _place(column_names, context_parallel, num_shards, shard_id)
        if vocab_size and vocab_size < VOCABULARY:
            raise ValueError(f"model.model_config.vocab_size = {vocab_size}: the task needs at least {VOCABULARY}")
        options = RecallOptions(seq_length, num_samples, shortest, whole, queries, max_documents, seed)
        view = EpochView(
            RecallSamples(options),
            workers // context_parallel,
            rank // context_parallel,
            batch_size,
            (int(position[0]), int(position[1])),
            hold,
            asdict(options),
        )
        return ds.GeneratorDataset(view, list(COLUMNS), shuffle=False, num_parallel_workers=1, python_multiprocessing=False)
