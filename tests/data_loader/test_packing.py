"""Samples of packed documents: nothing lost, no label across documents, deterministic, the same on each rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcp.data import ByteTokenizer, EpochView, PackedSamples

DOCUMENTS = [b"alpha", b"be", b"gamma ray", b"d", b"epsilon and more", b"zeta zeta zeta zeta zeta"]


def all_samples(samples, epoch=0):
    return [samples.sample(epoch, index) for index in range(len(samples))]


def pairs_of_documents(documents):
    """Every (input, label) pair that the documents hold, by the definition: consecutive tokens of one document."""
    tokenizer, pairs = ByteTokenizer(), []
    for document in documents:
        tokens = [tokenizer.bos_token_id, *document, tokenizer.eos_token_id]
        pairs += list(zip(tokens[:-1], tokens[1:], strict=True))
    return pairs


def test_tokenizer_round_trip_and_special_tokens():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé").tolist() == [257, 97, 0xC3, 0xA9, 258]
    assert tokenizer.encode("aé").dtype == np.int32
    assert tokenizer.decode([257, 97, 0xC3, 0xA9, 258, 256]) == "aé"
    with pytest.raises(ValueError, match="259"):
        tokenizer.decode([259])


def test_a_sample_by_hand():
    samples = PackedSamples([b"ab", b"c"], 8, max_documents=4, shuffle=False)
    input_ids, labels, loss_mask, cu_seqlens = samples.sample(0, 0)
    assert input_ids.tolist() == [257, 97, 98, 257, 99, 256, 256, 256]
    assert labels.tolist() == [97, 98, 258, 99, 258, -100, -100, -100]
    assert loss_mask.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert cu_seqlens.tolist() == [0, 3, 8, 8, 8]
    assert (input_ids.dtype, labels.dtype, loss_mask.dtype, cu_seqlens.dtype) == (
        np.int32,
        np.int32,
        np.float32,
        np.int32,
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8),
    st.integers(1, 30),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 3),
)
def test_one_pass_holds_every_pair_once_and_boundaries_are_legal(documents, length, most, shuffle, seed):
    samples = PackedSamples(documents, length, max_documents=most, shuffle=shuffle, seed=seed)
    found = []
    for input_ids, labels, loss_mask, cu_seqlens in all_samples(samples):
        assert cu_seqlens.shape == (most + 1,)
        assert cu_seqlens[0] == 0 and cu_seqlens[-1] == length and (np.diff(cu_seqlens) >= 0).all()
        valid = loss_mask == 1
        assert np.array_equal(valid, labels >= 0) and np.array_equal(valid, input_ids != 256)
        found += list(zip(input_ids[valid].tolist(), labels[valid].tolist(), strict=True))
        for begin, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
            inside = slice(begin, end)
            count = int(valid[inside].sum())
            # Inside a document the next input is this label; bos is only ever a document's first token.
            assert np.array_equal(labels[inside][: count - 1], input_ids[inside][1:count])
            assert (input_ids[inside][1:] != 257).all()
    assert sorted(found) == sorted(pairs_of_documents(documents))


def test_epochs_and_seeds_give_other_orders_and_the_same_ones_again():
    def stream(seed, epoch):
        samples = PackedSamples(DOCUMENTS, 16, seed=seed)
        return np.concatenate([sample[0] for sample in all_samples(samples, epoch)]).tolist()

    assert stream(1, 0) == stream(1, 0)
    assert stream(1, 0) != stream(1, 1)
    assert stream(1, 0) != stream(2, 0)


def test_num_samples_cuts_and_goes_on_with_another_pass():
    assert len(PackedSamples(DOCUMENTS, 8, num_samples=3)) == 3
    short = all_samples(PackedSamples(DOCUMENTS, 8, num_samples=3, seed=5))
    whole = all_samples(PackedSamples(DOCUMENTS, 8, seed=5))
    assert all(np.array_equal(a, b) for x, y in zip(short, whole, strict=False) for a, b in zip(x, y, strict=True))
    many = PackedSamples(DOCUMENTS, 8, num_samples=40)
    assert len(all_samples(many)) == 40
    assert min(sample[2].sum() for sample in all_samples(many)) == 8


def test_replicas_share_the_samples_without_overlap():
    samples = PackedSamples(DOCUMENTS, 8, seed=3)
    views = [EpochView(samples, 2, shard) for shard in range(2)]
    assert len(views[0]) == len(views[1]) == len(samples) // 2
    for index in range(len(views[0])):
        for shard in range(2):
            assert np.array_equal(views[shard][index][0], samples.sample(0, 2 * index + shard)[0])


def test_epoch_goes_on_after_a_complete_pass_only():
    view = EpochView(PackedSamples(DOCUMENTS, 8, seed=3))
    first = [view[index][0] for index in (0, 1)]
    again = [view[index][0] for index in range(len(view))]
    second = [view[index][0] for index in range(len(view))]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=False))
    assert view.passes == 1
    assert not np.array_equal(np.concatenate(again), np.concatenate(second))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_length": 0}, "seq_length = 0"),
        ({"max_documents": 0}, "max_documents = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"num_samples": True}, "num_samples = True"),
        ({"documents": []}, "documents is empty"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PackedSamples(**{"documents": DOCUMENTS, "seq_length": 8, **arguments})


def test_view_refuses_a_shard_out_of_range_and_too_few_samples():
    samples = PackedSamples([b"a"], 8)
    with pytest.raises(ValueError, match="shard_id = 2"):
        EpochView(samples, 2, 2)
    with pytest.raises(ValueError, match="at least 1 for each of 3 replicas"):
        EpochView(samples, 3, 0)
    with pytest.raises(IndexError, match="index 1 is out of range"):
        samples.sample(0, 1)
