"""Documents packed into samples of a fixed length, with their boundaries.

A document of n tokens (bos and eos included) gives n - 1 positions: position i has input t_i and label t_(i+1), so a
label never comes from another document and cutting a sample anywhere, into context parallel slices too, moves no label.
Documents follow each other without gaps; one that does not fit goes on in the next sample, as a document of its own
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kcp.data.tokenizer import ByteTokenizer, FileTokenizer

IGNORED_LABEL = -100

Piece = tuple[int, int, int]
"""(document, first position, end position)."""


class PackedSamples:
    """Samples of packed documents; the same seed gives the same samples on every machine.

    Args:
        documents: bytes of each document, none empty.
        seq_length: T, tokens of a sample.
        max_documents: D, most documents in one sample. A sample that reaches it is padded; its padding belongs to its
            last document, behind that document's own tokens, and has no labels.
        seed: seed of the order.
        shuffle: whether documents are shuffled, anew for every epoch.
        num_samples: samples of an epoch; 0 takes the text once. More than the text gives go on with another pass over
            it, shuffled again.
        tokenizer: None: one token a byte; else all documents are tokenized at once, and kept as 4 bytes a token.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        documents: Sequence[bytes],
        seq_length: int,
        *,
        max_documents: int = 64,
        seed: int = 0,
        shuffle: bool = True,
        num_samples: int = 0,
        tokenizer: FileTokenizer | None = None,
    ) -> None:
        for name, value, least in (
            ("seq_length", seq_length, 1),
            ("max_documents", max_documents, 1),
            ("seed", seed, 0),
            ("num_samples", num_samples, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} = {value!r}: an integer >= {least} is needed")
        if not documents:
            raise ValueError("documents is empty: at least one document is needed")
        self.documents = documents
        self.seq_length = seq_length
        self.max_documents = max_documents
        self.seed = seed
        self.shuffle = shuffle
        self.tokenizer = tokenizer or ByteTokenizer()
        self.encoded = None if tokenizer is None else [tokens for d in documents if len(tokens := tokenizer.encode(d)) > 1]
        self.sizes = [len(d) + 2 for d in documents] if self.encoded is None else [len(tokens) for tokens in self.encoded]
        if not self.sizes:
            raise ValueError("documents have fewer than two tokens each: nothing can be predicted")
        self._plan_epoch = -1
        self._plan: list[list[Piece]] = []
        # With max_documents the order decides how many samples one pass fills; epoch 0 decides for every epoch.
        self._flush = num_samples == 0
        self._num_samples = num_samples or len(self._pack(0, 0))

    def __len__(self) -> int:
        return self._num_samples

    def sample(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """One sample.

        Args:
            epoch: 0, 1, ...; decides the order of the documents.
            index: 0 <= index < len(self).

        Returns:
            input_ids int32 ``[T]``, labels int32 ``[T]`` (-100 on padding), loss_mask float32 ``[T]`` (0 on padding),
            cu_seqlens int32 ``[D + 1]``: 0, the documents' ends, then T up to the end.

        Raises:
            IndexError: index is out of range.
        """
        plan = self._plan_of(epoch)
        if not 0 <= index < len(plan):
            raise IndexError(f"index {index} is out of range, the epoch has {len(plan)} samples")
        length = self.seq_length
        input_ids = np.full(length, self.tokenizer.pad_token_id, np.int32)
        labels = np.full(length, IGNORED_LABEL, np.int32)
        cu_seqlens = np.full(self.max_documents + 1, length, np.int32)
        cu_seqlens[0] = 0
        filled = 0
        for number, (document, begin, end) in enumerate(plan[index]):
            tokens = self._tokens(document, begin, end + 1)
            cu_seqlens[number] = filled
            input_ids[filled : filled + end - begin] = tokens[:-1]
            labels[filled : filled + end - begin] = tokens[1:]
            filled += end - begin
        loss_mask = (labels != IGNORED_LABEL).astype(np.float32)
        return input_ids, labels, loss_mask, cu_seqlens

    def _tokens(self, document: int, begin: int, end: int) -> np.ndarray:
        """Tokens begin..end-1 of a document: of bytes, token 0 is bos, token i byte i - 1, the last one eos."""
        if self.encoded is not None:
            return self.encoded[document][begin:end]
        data = self.documents[document]
        tokens = self.tokenizer.encode(data[max(begin - 1, 0) : end - 1], add_special_tokens=False)
        head = [self.tokenizer.bos_token_id] if begin == 0 else []
        tail = [self.tokenizer.eos_token_id] if end == len(data) + 2 else []
        return np.concatenate((head, tokens, tail)).astype(np.int32)

    def _order(self, epoch: int, turn: int) -> np.ndarray:
        count = len(self.sizes)
        if not self.shuffle:
            return np.arange(count)
        return np.random.default_rng([self.seed, epoch, turn]).permutation(count)

    def _plan_of(self, epoch: int) -> list[list[Piece]]:
        if epoch != self._plan_epoch:
            self._plan, self._plan_epoch = self._pack(epoch, self._num_samples), epoch
        return self._plan

    def _pack(self, epoch: int, limit: int) -> list[list[Piece]]:
        """Pieces of each sample: one pass over the text, or passes until ``limit`` samples are full (0: no limit)."""
        samples: list[list[Piece]] = []
        current: list[Piece] = []
        room, turn = self.seq_length, 0
        while turn == 0 or len(samples) < limit:
            for document in self._order(epoch, turn).tolist():
                begin, last = 0, self.sizes[document] - 1
                while begin < last:
                    end = min(last, begin + room)
                    current.append((document, begin, end))
                    room -= end - begin
                    begin = end
                    if room == 0 or len(current) == self.max_documents:
                        samples.append(current)
                        current, room = [], self.seq_length
                        if len(samples) == limit:
                            return samples
            if self._flush and current:
                samples.append(current)
                current, room = [], self.seq_length
            turn += 1
        return samples


class EpochView:
    """One replica's samples as a random-access source; the epoch goes on by itself after each complete pass.

    MindSpore reads a few samples ahead of training to learn their shapes. Only a pass that reached the last sample
    counts, so this look-ahead moves nothing.

    Args:
        samples: all samples.
        num_shards: data parallel replicas.
        shard_id: this replica; it reads samples shard_id, shard_id + num_shards, ... Every replica has equally many.
        batch_size: samples of a step on a replica; what is left of an epoch after its last whole step is passed over.
        position: where the first pass starts: an epoch, and a sample of it counted over all replicas.
        hold: every pass reads the first one's samples, for an evaluation.
        identity: what decides the samples and their order, for who resumes.

    Raises:
        ValueError: shard_id is not in 0..num_shards-1, there are fewer samples than replicas need for a step, or the position is
            negative.
    """

    def __init__(
        self,
        samples: PackedSamples,
        num_shards: int = 1,
        shard_id: int = 0,
        batch_size: int = 1,
        position: tuple[int, int] = (0, 0),
        hold: bool = False,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        if not 0 <= shard_id < num_shards:
            raise ValueError(f"shard_id = {shard_id}: 0 <= shard_id < num_shards = {num_shards} is needed")
        if len(samples) < num_shards * batch_size:
            raise ValueError(f"num_samples = {len(samples)}: at least {batch_size} for each of {num_shards} replicas are needed")
        if min(position) < 0:
            raise ValueError(f"position = {position}: an epoch >= 0 and a sample >= 0 are needed")
        self.samples = samples
        self.num_shards = num_shards
        self.shard_id = shard_id
        self.batch_size = batch_size
        self.length = len(samples) // num_shards // batch_size * batch_size
        self.start = position[0] * self.length + position[1] // num_shards
        self.hold = hold
        self.identity = dict(identity or {})
        self.passes = 0
        self._complete = False

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        index = int(index)
        if index == 0 and self._complete:
            self.passes += 1
            self._complete = False
        if index == self.length - 1:
            self._complete = not self.hold
        epoch, local = divmod(self.start + self.passes * self.length + index, self.length)
        return self.samples.sample(epoch, local * self.num_shards + self.shard_id)

    def position(self, steps: int) -> tuple[int, int]:
        """Epoch, and sample over all replicas, that come next after ``steps`` steps of this view."""
        epoch, local = divmod(self.start + steps * self.batch_size, self.length)
        return epoch, local * self.num_shards
