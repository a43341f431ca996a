"""Ulysses' exchange around any core, and the sequence gathered whole: what each rank sees, what comes back, backwards as adjoints."""

import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from kcp.parallel import ContextParallel, lockstep
from kcp.parallel.gather import GatherSequence
from kcp.parallel.ulysses import HeadsToSequence, SequenceToHeads

SLICES = [None, (3, 4, 1), (0, 5, 3)]
CASES = list(itertools.product((1, 2), SLICES, ((6, 5), (3,))))  # rows, slices, heads and what follows


def tokens_of(slices):
    return (4, 4, 4) if slices is None else slices


def cut(x, slices, rank):
    begin = sum(tokens_of(slices)[:rank])
    local = x[:, begin : begin + tokens_of(slices)[rank]]
    return Tensor(local.copy()) if local.size else ops.zeros(local.shape)


def integers(seed, *shape):
    """Small integers: sums of products are exact, in any order."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


@pytest.mark.parametrize(("batch", "slices", "heads"), CASES, ids=str)
def test_there_and_back(batch, slices, heads):
    """Rank r holds heads r H / W on of all tokens in between; gradients are those of a permutation."""
    total, share = sum(tokens_of(slices)), heads[0] // 3
    x, d_whole, d_local = (integers(seed, batch, total, *heads) for seed in range(3))

    def body(group):
        mine = slice(group.rank * share, (group.rank + 1) * share)
        there, back = SequenceToHeads(group), HeadsToSequence(group)
        local = cut(x, slices, group.rank)
        whole = there.construct(local)
        again = back.construct(whole, local)
        grad = there.bprop(local, whole, Tensor(d_whole[:, :, mine].copy()))[0]
        grad_back, none = back.bprop(whole, local, again, cut(d_local, slices, group.rank))
        assert none.shape == local.shape and not none.asnumpy().any()
        return tuple(y.asnumpy() for y in (whole, again, grad, grad_back))

    for rank, (whole, again, grad, grad_back) in enumerate(lockstep.run(3, body, slices)):
        mine = slice(rank * share, (rank + 1) * share)
        np.testing.assert_array_equal(whole, x[:, :, mine])
        np.testing.assert_array_equal(again, cut(x, slices, rank).asnumpy())
        np.testing.assert_array_equal(grad, cut(d_whole, slices, rank).asnumpy())
        np.testing.assert_array_equal(grad_back, d_local[:, :, mine])


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16], ids=str)
@pytest.mark.parametrize("slices", SLICES, ids=str)
def test_a_gathered_sequence_and_its_adjoint(slices, dtype):
    """Every rank has a gradient of the whole sequence of its own; they are summed in float32."""
    total = sum(tokens_of(slices))
    x, d_whole = integers(0, 2, total, 5), [integers(1 + rank, 2, total, 5) for rank in range(3)]

    def body(group):
        cell, local = GatherSequence(group), cut(x, slices, group.rank).astype(dtype)
        whole = cell.construct(local)
        grad = cell.bprop(local, whole, Tensor(d_whole[group.rank]).astype(dtype))[0]
        assert whole.dtype == grad.dtype == dtype
        assert group.traffic.read()["tokens"].exchanges == 2
        return whole.astype(ms.float32).asnumpy(), grad.astype(ms.float32).asnumpy()

    results = lockstep.run(3, body, slices)
    assert all(np.array_equal(whole, x) for whole, _ in results)
    np.testing.assert_array_equal(np.concatenate([grad for _, grad in results], 1), sum(d_whole))


class Reversed(nn.Cell):
    """A core that looks at all tokens and keeps to its heads: values from the other end, weighted by what has no features."""

    def construct(self, value, weight, factor):
        return ops.flip(value, (1,)) * ops.expand_dims(weight, -1) * factor


@pytest.mark.parametrize("slices", SLICES, ids=str)
def test_a_core_sees_all_tokens_of_its_heads(slices):
    total = sum(tokens_of(slices))
    value, weight, factor = integers(0, 2, total, 6, 5), integers(1, 2, total, 6), Tensor(integers(2, 5))

    def body(group):
        return ContextParallel(Reversed(), group, 2)(cut(value, slices, group.rank), cut(weight, slices, group.rank), factor).asnumpy()

    expected = value[:, ::-1] * weight[..., None] * factor.asnumpy()
    np.testing.assert_array_equal(np.concatenate(lockstep.run(3, body, slices), 1), expected)


@pytest.mark.parametrize("shape", [(2, 4, 4, 5), (2, 4, 4), (4, 3), (1, 2, 4, 3, 5)], ids=str)
def test_what_is_no_token_tensor(shape):
    def body(group):
        with pytest.raises(ValueError, match=r"input 1 has shape .*; allowed: \[B, T_local, H, D\].*multiple of 3"):
            ContextParallel(Reversed(), group, 2)(ops.zeros((2, 4, 3, 5)), ops.zeros(shape), ops.zeros((5,)))

    lockstep.run(3, body)
