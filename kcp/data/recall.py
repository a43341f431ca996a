"""Associative recall: a synthetic task that a state must solve and a window can't.

A document is filler tokens among which pairs ``KEY VALUE`` and, a distance later, queries ``? KEY`` are placed; at the queried key the
model is to say the value, and nothing else counts. Distances (tokens from value to queried key) are log-uniform, so that near and far
ones are equally many per octave. A sample holds documents of one length, which grows over the samples: the curriculum of one run with
one sample length. Everything follows from the seed and the number of the sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

KEYS, VALUES, FILLERS = 64, 64, 15
QUERY = KEYS + VALUES + FILLERS
VOCABULARY = QUERY + 1
IGNORED = -100
SHORTEST = 4  # tokens from value to queried key, at least


@dataclass(frozen=True)
class RecallOptions:
    """Options of the samples.

    Attributes:
        seq_length: T, tokens of a sample; a multiple of 64 is not needed.
        num_samples: samples of the run, over which documents grow.
        shortest: tokens of the first documents; they double as samples go on until one fills the sample.
        whole: fraction of the samples, at the end, that one document fills.
        queries: most queries of a document.
        max_documents: boundaries of a sample are padded to this many documents.
        seed: of everything.
    """

    seq_length: int
    num_samples: int
    shortest: int = 128
    whole: float = 0.5
    queries: int = 24
    max_documents: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("seq_length", "num_samples", "shortest", "queries", "max_documents"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value!r}: an integer >= 1 is needed")
        if not 16 <= self.shortest <= self.seq_length:
            raise ValueError(f"shortest = {self.shortest}: from 16 to seq_length = {self.seq_length} is needed")
        if self.queries > KEYS:
            raise ValueError(f"queries = {self.queries}: at most {KEYS}, a key for each, is needed")
        if not 0 < self.whole <= 1:
            raise ValueError(f"whole = {self.whole}: a number above 0 and at most 1 is needed")
        if -(-self.seq_length // self.shortest) > self.max_documents:
            raise ValueError(f"max_documents = {self.max_documents}: at least {-(-self.seq_length // self.shortest)} is needed")

    def document_length(self, index: int) -> int:
        """Tokens of the documents of sample ``index``."""
        growing = (1 - self.whole) * self.num_samples
        if index >= growing:
            return self.seq_length
        stages = int(np.ceil(np.log2(self.seq_length / self.shortest)))
        return min(self.shortest * 2 ** int(index / growing * stages), self.seq_length)


def document(rng: np.random.Generator, length: int, queries: int, distances: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels of one document.

    Args:
        rng: where chance comes from.
        length: its tokens.
        queries: most queries; as many as find room are placed.
        distances: a distance for each query, in place of log-uniform ones.

    Returns:
        ``(tokens, labels)``, each int32 ``[length]``; labels are :data:`IGNORED` but at queried keys.
    """
    tokens = rng.integers(KEYS + VALUES, QUERY, length).astype(np.int32)
    labels = np.full(length, IGNORED, np.int32)
    free = np.ones(length, bool)
    keys = rng.permutation(KEYS)
    longest = length - 3
    queries = min(queries, max(1, length // 16))
    if distances is None:
        distances = np.exp(rng.uniform(np.log(SHORTEST), np.log(longest + 1), queries)).astype(int)
    for key, distance in zip(keys[: len(distances)], distances, strict=True):
        distance = int(np.clip(distance, SHORTEST, longest))
        for _ in range(30):
            at = int(rng.integers(distance + 1, length))  # the queried key; its value lies `distance` before
            if at >= 1 and free[[at - 1, at, at - distance - 1, at - distance]].all():
                value = KEYS + int(rng.integers(VALUES))
                tokens[[at - distance - 1, at - distance, at - 1, at]] = key, value, QUERY, key
                labels[at] = value
                free[[at - 1, at, at - distance - 1, at - distance]] = False
                break
    return tokens, labels


class RecallSamples:
    """The samples of a run, as :class:`kcp.data.packing.EpochView` reads them.

    Args:
        options: see :class:`RecallOptions`.
    """

    def __init__(self, options: RecallOptions):
        self.options = options

    def __len__(self) -> int:
        return self.options.num_samples

    def sample(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Sample ``index``: input_ids, labels, loss_mask ``[T]`` and cu_seqlens ``[max_documents + 1]``."""
        o = self.options
        rng = np.random.default_rng((o.seed, epoch, index))
        length = o.document_length(index)
        boundaries = [*range(0, o.seq_length, length), o.seq_length]
        if len(boundaries) > 2 and boundaries[-1] - boundaries[-2] < 16:
            del boundaries[-2]
        parts = [document(rng, end - begin, o.queries) for begin, end in zip(boundaries[:-1], boundaries[1:], strict=True)]
        tokens, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        padded = np.full(o.max_documents + 1, o.seq_length, np.int32)
        padded[: len(boundaries)] = boundaries
        return tokens, labels, (labels != IGNORED).astype(np.float32), padded


def evaluation_document(seed: int, length: int, queries: int, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A document to evaluate on, its distances spread evenly over the octaves up to ``longest``.

    Returns:
        ``(tokens [length], labels [length], distance [length] of the queried keys, 0 elsewhere)``.
    """
    rng = np.random.default_rng((seed, 1 << 30))
    distances = np.exp(np.linspace(np.log(SHORTEST), np.log(longest), queries)).round().astype(int)
    tokens, labels = document(rng, length, queries, rng.permutation(distances))
    places = np.zeros(length, np.int32)
    for at in np.flatnonzero(labels != IGNORED):
        value = next(t for t in range(1, at) if tokens[t - 1] == tokens[at] and KEYS <= tokens[t] < KEYS + VALUES)
        places[at] = at - value
    return tokens, labels, places
