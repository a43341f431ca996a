"""``merge_fwd_bwd``, and a state scan over several slices made of stages and merges alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mindspore import Tensor
from op_cases import STORED, check, make_problem, relative
from stage_chain import Chain

from kcp.ops import chunk_kda_merge_fwd_bwd

pytestmark = pytest.mark.usefixtures("backend")

RANKS, BATCH, HEADS, K, V = 4, 2, 3, 6, 5


def random_summaries(batch: int | None, seed: int = 0) -> np.ndarray:
    shape = (RANKS, HEADS, K, V + K) if batch is None else (RANKS, batch, HEADS, K, V + K)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def folded(summaries: np.ndarray, order) -> np.ndarray:
    """State zero sent through the maps of the ranks in ``order``, in float64."""
    state = np.zeros((*summaries.shape[1:-1], V))
    for rank in order:
        e, m = summaries[rank][..., :V].astype(np.float64), summaries[rank][..., V:].astype(np.float64)
        state = m @ state + e
    return state


def merge(summaries: np.ndarray, n: int, rank: int, **options) -> np.ndarray:
    """The stage on an old state of NaN, which it must not read."""
    shape = (*summaries.shape[1:-2], V, K) if options.get("state_v_first") else (*summaries.shape[1:-1], V)
    state = Tensor(np.full(shape, np.nan, np.float32))
    result = chunk_kda_merge_fwd_bwd(state, Tensor(summaries), n, rank, **options).asnumpy()
    assert result.shape == shape and result.dtype == np.float32
    return result


@pytest.mark.parametrize("batch", [None, BATCH])
@pytest.mark.parametrize("rank", range(RANKS))
def test_forward_takes_the_ranks_before_in_time_order(rank, batch):
    summaries = random_summaries(batch)
    for n in range(rank + 1):
        assert relative(merge(summaries, n, rank) + 1, folded(summaries, range(rank - n, rank)) + 1) <= 1e-5


@pytest.mark.parametrize("batch", [None, BATCH])
@pytest.mark.parametrize("rank", range(RANKS))
def test_backward_takes_the_ranks_after_farthest_first(rank, batch):
    summaries = random_summaries(batch)
    for n in range(RANKS - rank):
        want = folded(summaries, range(rank + n, rank, -1))
        assert relative(merge(summaries, n, rank, forward=False) + 1, want + 1) <= 1e-5


@pytest.mark.parametrize("forward", [True, False])
def test_no_rank_to_merge_yields_zeros(forward):
    got = merge(random_summaries(BATCH), 0, 2, forward=forward)
    assert not np.any(got)


@pytest.mark.parametrize("forward", [True, False])
def test_v_first_is_the_transpose(forward):
    summaries = random_summaries(BATCH)
    turned = merge(summaries, 1, 1, forward=forward, state_v_first=True)
    assert np.array_equal(np.swapaxes(turned, -1, -2), merge(summaries, 1, 1, forward=forward))


WRONG = {
    "more_ranks_than_before": ({"n": 2, "rank": 1}, ValueError, ["pre_or_post_num_ranks", "2", "1"]),
    "more_ranks_than_after": ({"n": 2, "rank": 2, "forward": False}, ValueError, ["pre_or_post_num_ranks", "2", "1"]),
    "negative_ranks": ({"n": -1, "rank": 1}, ValueError, ["pre_or_post_num_ranks", "-1"]),
    "rank_outside": ({"n": 0, "rank": RANKS}, ValueError, ["rank", "4", "3"]),
    "rank_negative": ({"n": 0, "rank": -1}, ValueError, ["rank", "-1"]),
    "rank_text": ({"n": 0, "rank": "1"}, TypeError, ["rank", "str"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_call(case):
    arguments, kind, words = WRONG[case]
    with pytest.raises(kind) as caught:
        merge(random_summaries(BATCH), **arguments)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize("summaries", [(RANKS, BATCH, HEADS, K, V + K + 1), (RANKS, HEADS + 1, K, V + K), (K, V + K)])
def test_summaries_that_do_not_fit_the_state(summaries):
    state = Tensor(np.zeros((BATCH, HEADS, K, V), np.float32))
    with pytest.raises(ValueError, match="summaries has shape"):
        chunk_kda_merge_fwd_bwd(state, Tensor(np.zeros(summaries, np.float32)), 1, 1)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_state_scan_over_three_slices(gate, state_v_first):
    """Unequal slices, slow decay, three ranks (with two, or fast decay, a wrong M goes unseen)."""
    whole = make_problem(1, T=150, B=2, K=12, V=20, Hv=4, gate=gate, shift=-7.0, state_v_first=state_v_first)
    want, cuts = whole.truth(), (0, 37, 101, 150)
    chains = []
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        part = slice(begin, end)
        inputs = {n: x[:, part] if n in STORED else x for n, x in whole.inputs.items()}
        chains.append(Chain(replace(whole, inputs=inputs, d_out=whole.d_out[:, part])))
    shape = (2, 4, 20, 12) if state_v_first else (2, 4, 12, 20)
    empty = Tensor(np.zeros(shape, np.float32))

    caches = [chain.prepare() for chain in chains]
    summaries = np.stack([chain.summary(c).asnumpy() for chain, c in zip(chains, caches, strict=True)])
    results = []
    for rank, (chain, c) in enumerate(zip(chains, caches, strict=True)):
        h0 = chunk_kda_merge_fwd_bwd(empty, Tensor(summaries), rank, rank, state_v_first=state_v_first)
        h, v_new, final_state = chain.states(c, h0)
        results.append({"h0": h0, "h": h, "v_new": v_new, "final_state": final_state, "out": chain.output(c, v_new, h)})

    local = [chain.local(c, r["v_new"], r["h"]) for chain, c, r in zip(chains, caches, results, strict=True)]
    back = np.stack([ch.back_summary(c, x[1]).asnumpy() for ch, c, x in zip(chains, caches, local, strict=True)])
    for rank, (chain, c, r) in enumerate(zip(chains, caches, results, strict=True)):
        d_aqk, dv_local, dq_raw = local[rank]
        dht = chunk_kda_merge_fwd_bwd(empty, Tensor(back), len(chains) - 1 - rank, rank, forward=False, state_v_first=state_v_first)
        dh, _, dv_scan = chain.state_gradients(c, dv_local, r["h0"], dht)
        r.update(chain.input_gradients(c, r["v_new"], r["h"], dh, dv_scan, d_aqk, dq_raw))

    got = {n: np.concatenate([r[n].asnumpy() for r in results], 1) for n in ("out", *STORED)}
    got |= {n: sum(r[n].asnumpy().reshape(whole.inputs[n].shape) for r in results) for n in ("a_log", "dt_bias")}
    got["final_state"] = results[-1]["final_state"].asnumpy()
    check(got, want)
