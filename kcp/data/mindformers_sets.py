"""MindFormers' own datasets as kcp's samples: Megatron's binary format and Hugging Face ``datasets``.

MindFormers builds and reads them; kcp takes the place of its data loaders, which share samples among all workers (the ranks of a context
parallel group need the same one), hand dummy samples to most ranks in graph mode, and meet in a Barrier, which the CPU lacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindformers.dataset.blended_datasets import blended_megatron_dataset_builder as builder
from mindformers.dataset.blended_datasets.gpt_dataset import GPTDataset
from mindformers.dataset.blended_datasets.utils import compile_helpers
from mindformers.dataset.dataloader.blended_megatron_dataloader import MegatronDatasetBuilder
from mindformers.dataset.dataloader.hf_dataloader import HFDataLoader, HFDataLoaderConfig
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank
from mindspore import Tensor, ops
from mindspore import dataset as ds

from kcp.config_checks import COLUMNS
from kcp.data.packing import IGNORED_LABEL, EpochView
from kcp.data.text import DataError


class IndexedSamples:
    """Rows of a random-access dataset as samples, in the order of a seed.

    Args:
        rows: ``rows[i]`` is a mapping or tuple that ``convert`` takes.
        count: number of rows.
        convert: gives input_ids, labels, loss_mask and cu_seqlens of a row.
        seed, shuffle: the order, anew for every epoch.
    """

    def __init__(self, rows: Any, count: int, convert: Any, seed: int = 0, shuffle: bool = False) -> None:
        self.rows = rows
        self.count = count
        self.convert = convert
        self.seed = seed
        self.shuffle = shuffle

    def __len__(self) -> int:
        return self.count

    def sample(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """One sample, as :meth:`kcp.data.packing.PackedSamples.sample` gives it."""
        order = np.random.default_rng([self.seed, epoch]).permutation(self.count) if self.shuffle else range(self.count)
        return self.convert(self.rows[int(order[index])])


def as_sample(
    input_ids: Sequence[int], labels: Sequence[int], loss_mask: Sequence[float] | None, ends: Sequence[int], length: int, documents: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Columns of one sample.

    Args:
        input_ids, labels: ``[T]``; labels are shifted already.
        loss_mask: ``[T]``, or None: every label that is not negative counts.
        ends: ends of the packed documents; what comes after the last one is a document of its own.
        length: T; documents: most documents in a sample.

    Raises:
        DataError: the row has another length, or more documents.
    """
    ids, target = np.asarray(input_ids, np.int32), np.asarray(labels, np.int32)
    if ids.shape != (length,) or target.shape != (length,):
        raise DataError(f"a row has {ids.size} input_ids and {target.size} labels, seq_length = {length} of each are needed")
    bounds = [0, *sorted({int(end) for end in ends if 0 < end < length}), length]
    if len(bounds) > documents + 1:
        raise DataError(f"a row has {len(bounds) - 1} documents, max_documents = {documents} allows fewer")
    cu_seqlens = np.full(documents + 1, length, np.int32)
    cu_seqlens[: len(bounds)] = bounds
    mask = (target >= 0) if loss_mask is None else np.asarray(loss_mask) * (target >= 0)
    return ids, np.where(mask > 0, target, IGNORED_LABEL).astype(np.int32), mask.astype(np.float32), cu_seqlens


def _dataset(samples: IndexedSamples, identity: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """The MindSpore dataset of this rank; ``given`` are the arguments that kcp and MindFormers add."""
    workers, rank, shared = given["num_shards"] or 1, given["shard_id"] or 0, given["context_parallel"]
    position = (int(given["position"][0]), int(given["position"][1]))
    view = EpochView(samples, workers // shared, rank // shared, given["batch_size"], position, given["hold"], identity)
    return ds.GeneratorDataset(view, list(COLUMNS), shuffle=False, num_parallel_workers=1, python_multiprocessing=False)


@MindFormerRegister.register(MindFormerModuleType.DATASET_LOADER)
class KcpMegatronDataset:
    """Megatron's ``PREFIX.bin`` and ``PREFIX.idx``, built by MindFormers' ``BlendedMegatronDatasetBuilder`` and ``GPTDataset``.

    Args:
        data_path: prefixes, or weights and prefixes in turn, as MindFormers takes them.
        num_samples: samples of an epoch.
        seed: of the order.
        split: shares of training, validation and test, e.g. ``"99,1,0"``; training is taken.
        eod_token_id: token that ends a document: state, convolutions and attention start anew after it. -1: a sample is one document.
        pad_token_id: token that counts for nothing; -1: there is none.
        max_documents: most documents in a sample.
        path_to_cache: folder of the indices; by default beside the data.
        seq_length, context_parallel, position, hold, num_shards, shard_id, batch_size: given by kcp and MindFormers.
        **given: the other arguments that MindFormers hands to every loader; without effect.

    Raises:
        DataError: the data is not there, or MindFormers' helpers can't be built.
    """

    def __new__(
        cls,
        data_path: Sequence[str],
        num_samples: int,
        seed: int = 42,
        split: str = "1,0,0",
        eod_token_id: int = -1,
        pad_token_id: int = -1,
        max_documents: int = 64,
        path_to_cache: str | None = None,
        seq_length: int = 512,
        context_parallel: int = 1,
        position: Sequence[int] = (0, 0),
        hold: bool = False,
        num_shards: int | None = None,
        shard_id: int | None = None,
        batch_size: int = 1,
        **given: Any,
    ) -> Any:
        paths = [data_path] if isinstance(data_path, str) else [str(path) for path in data_path]
        options = {"data_path": paths, "seq_length": seq_length, "seed": seed, "split": split, "path_to_cache": path_to_cache}
        options |= {"create_attention_mask": False, "eod": eod_token_id, "pad": pad_token_id, "mmap_bin_files": True}
        _build_helpers()
        config = MegatronDatasetBuilder("GPTDataset", options).init_gpt_dataset_config()
        try:
            with _barrier_of_sums():
                rows = builder.BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 0, 0], lambda: True, config).build()[0]
        except (OSError, AssertionError, ValueError) as error:
            raise DataError(f"data_path = {paths}: can't be used as Megatron data: {error}") from None

        def convert(row: tuple) -> tuple[np.ndarray, ...]:
            ids, labels, mask = row[:3]
            ends = np.flatnonzero(ids == eod_token_id) + 1 if eod_token_id >= 0 else ()
            return as_sample(ids, labels, mask, ends, seq_length, max_documents)

        identity = {**options, "num_samples": num_samples, "max_documents": max_documents}
        arguments = {"num_shards": num_shards, "shard_id": shard_id, "context_parallel": context_parallel}
        arguments |= {"position": position, "hold": hold, "batch_size": batch_size}
        return _dataset(IndexedSamples(rows, num_samples, convert), identity, arguments)


@MindFormerRegister.register(MindFormerModuleType.DATASET_LOADER)
class KcpHuggingFaceDataset:
    """A Hugging Face dataset, loaded and processed by MindFormers' ``HFDataLoader``.

    Rows need ``input_ids`` and ``labels`` of seq_length tokens, labels shifted already; ``loss_mask`` and ``actual_seq_len`` (ends of
    packed documents, as MindFormers' PackingHandler writes them) are used where they are.

    Args:
        load: arguments of ``datasets.load_dataset``, or of the function that ``load_func`` names.
        handler: MindFormers' list of processing steps.
        seed, shuffle: the order, anew for every epoch.
        max_documents: most documents in a sample.
        seq_length, context_parallel, position, hold, num_shards, shard_id, batch_size: given by kcp and MindFormers.
        **given: the other arguments that MindFormers hands to every loader; without effect.

    Raises:
        DataError: the dataset can't be loaded, or its rows lack a column.
    """

    def __new__(
        cls,
        load: Mapping[str, Any],
        handler: Sequence[Mapping[str, Any]] | None = None,
        seed: int = 42,
        shuffle: bool = True,
        max_documents: int = 64,
        seq_length: int = 512,
        context_parallel: int = 1,
        position: Sequence[int] = (0, 0),
        hold: bool = False,
        num_shards: int | None = None,
        shard_id: int | None = None,
        batch_size: int = 1,
        **given: Any,
    ) -> Any:
        steps = [MindFormerConfig(**step) for step in handler or ()] or None
        config = HFDataLoaderConfig(load=dict(load), process=steps, use_broadcast_data=False)
        try:
            rows = HFDataLoader.load_dataset(config)
            if steps:
                rows, config = HFDataLoader.process_dataset(config, rows)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"load = {dict(load)}: can't be loaded: {' '.join(str(error).split())[:200]}") from None
        missing = {"input_ids", "labels"} - set(rows.column_names)
        if missing:
            raise DataError(f"load = {dict(load)}: rows have no {', '.join(sorted(missing))}, only {', '.join(rows.column_names)}")

        def convert(row: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
            ends = row.get("actual_seq_len") or ()
            return as_sample(row["input_ids"], row["labels"], row.get("loss_mask"), ends, seq_length, max_documents)

        identity = {"load": str(dict(load)), "rows": len(rows), "seed": seed, "shuffle": shuffle, "seq_length": seq_length}
        arguments = {"num_shards": num_shards, "shard_id": shard_id, "context_parallel": context_parallel}
        arguments |= {"position": position, "hold": hold, "batch_size": batch_size}
        return _dataset(IndexedSamples(rows, len(rows), convert, seed, shuffle), identity, arguments)


def _meet(*_: Any, **__: Any) -> None:
    """All ranks meet: an all-reduce of one number, which every device has."""
    if get_real_group_size() > 1:
        ops.AllReduce()(Tensor([1.0], ms.float32)).asnumpy()


@contextlib.contextmanager
def _barrier_of_sums() -> Iterator[None]:
    """MindFormers' builder lets rank 0 write the indices first and waits in a Barrier; here the ranks meet in a sum instead."""
    before = builder.skip_barrier_controller
    builder.skip_barrier_controller = _meet
    try:
        yield
    finally:
        builder.skip_barrier_controller = before


def _build_helpers() -> None:
    """MindFormers compiles the helpers of its Megatron datasets when they are first needed, in its own folder."""
    try:
        from mindformers.dataset.blended_datasets import helpers  # noqa: F401
    except ImportError:
        pass
    else:
        return
    failed = None
    if get_real_rank() == 0:
        try:
            compile_helpers()
        except (SystemExit, OSError) as error:
            failed = error
    _meet()
    if failed is not None:
        raise DataError(
            "MindFormers' Megatron helpers can't be compiled: make, g++, pybind11 and write access to its folder "
            "dataset/blended_datasets are needed"
        ) from None
