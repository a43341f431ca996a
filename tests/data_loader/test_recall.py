"""The associative-recall data: every question has one answer, lies where it says, and follows from the seed."""

import numpy as np
import pytest

from kcp.data.packing import EpochView
from kcp.data.recall import IGNORED, KEYS, QUERY, VALUES, VOCABULARY, RecallOptions, RecallSamples, document, evaluation_document


def answer(tokens, at):
    """What a reader says at position ``at``: the value behind the only other place of that key that is not a question."""
    places = [t for t in range(len(tokens)) if tokens[t] == tokens[at] and (t == 0 or tokens[t - 1] != QUERY)]
    assert len(places) == 1 and places[0] < at
    return tokens[places[0] + 1], at - places[0] - 1


@pytest.mark.parametrize("length", [16, 128, 1000])
def test_every_question_has_one_answer_before_it(length):
    for seed in range(5):
        tokens, labels = document(np.random.default_rng(seed), length, 24)
        asked = np.flatnonzero(labels != IGNORED)
        assert len(asked) > 0 and tokens.min() >= 0 and tokens.max() < VOCABULARY
        np.testing.assert_array_equal(np.flatnonzero(tokens == QUERY) + 1, asked)
        for at in asked:
            value, _ = answer(tokens, at)
            assert value == labels[at] and KEYS <= value < KEYS + VALUES


def test_distances_of_the_evaluation_cover_the_octaves():
    distances = []
    for seed in range(6):
        tokens, labels, places = evaluation_document(seed, 4352, 24, 4096)
        for at in np.flatnonzero(places):
            assert answer(tokens, at) == (labels[at], places[at])
        distances += places[places > 0].tolist()
    counts = np.histogram(np.log2(distances), bins=np.arange(2, 13))[0]
    assert counts.min() >= 6 and max(distances) <= 4096


def test_samples_are_packed_documents_that_grow_and_repeat_by_seed():
    options = RecallOptions(512, 40, shortest=64, whole=0.5, queries=8, max_documents=8, seed=3)
    samples = RecallSamples(options)
    lengths = []
    for index in range(len(samples)):
        tokens, labels, mask, boundaries = samples.sample(0, index)
        assert tokens.shape == labels.shape == mask.shape == (512,) and boundaries.shape == (9,)
        np.testing.assert_array_equal(mask, labels != IGNORED)
        used = np.unique(boundaries)
        lengths.append(used[1])
        for begin, end in zip(used[:-1], used[1:], strict=True):
            for at in np.flatnonzero(labels[begin:end] != IGNORED):
                assert answer(tokens[begin:end], at)[0] == labels[begin + at]
    assert lengths == sorted(lengths) and lengths[0] == 64 and lengths.count(512) == 20 and 128 in lengths and 256 in lengths
    again = RecallSamples(options).sample(0, 7)
    for got, want in zip(samples.sample(0, 7), again, strict=True):
        np.testing.assert_array_equal(got, want)
    assert not np.array_equal(samples.sample(0, 7)[0], samples.sample(1, 7)[0])
    assert len(EpochView(samples, 2, 1)) == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 0}, "num_samples = 0: an integer >= 1"),
        ({"shortest": 8}, "shortest = 8: from 16 to seq_length = 512"),
        ({"queries": 65}, "queries = 65: at most 64"),
        ({"whole": 0.0}, "whole = 0.0: a number above 0"),
        ({"max_documents": 3}, "max_documents = 3: at least 8"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        RecallOptions(**({"seq_length": 512, "num_samples": 4, "shortest": 64} | changes))


def test_loader_as_mindformers_builds_it():
    pytest.importorskip("mindformers")
    from mindformers.dataset.dataloader.build_dataloader import build_dataset_loader
    from mindformers.tools.register import MindFormerConfig

    import kcp.data.loader  # noqa: F401

    options = RecallOptions(256, 6, shortest=64, queries=4, max_documents=4, seed=5)

    def loader(**changes):
        config = {"seq_length": 256, "num_samples": 6, "shortest": 64, "queries": 4, "max_documents": 4, "seed": 5, "context_parallel": 2}
        return build_dataset_loader(
            MindFormerConfig(type="KcpRecallDataset", **(config | changes)), default_args={"num_shards": 4, "shard_id": 3}
        )

    rows = list(loader(position=[0, 2]).create_dict_iterator(num_epochs=1, output_numpy=True))
    for row, index in zip(rows, (3, 5), strict=False):
        names = ("input_ids", "labels", "loss_mask", "cu_seqlens")
        for got, want in zip((row[name] for name in names), RecallSamples(options).sample(0, index), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="vocab_size = 100: the task needs at least 144"):
        loader(vocab_size=100)
