"""Affine summaries against float64 matrices: composition is associative and equals application one after the other."""

import numpy as np
from mindspore import Tensor

from kcp.parallel import summary


def _random(seed, ranks, heads=2, k=6, v=4):
    rng = np.random.default_rng(seed)
    m = np.eye(k) + 0.3 * rng.standard_normal((ranks, 1, heads, k, k))
    return rng.standard_normal((ranks, 1, heads, k, v)), m, rng.standard_normal((1, heads, k, v))


def _pack(e, m):
    return Tensor(np.concatenate([e, m], -1).astype(np.float32))


def test_compose_equals_one_after_the_other():
    e, m, state = _random(0, 3)
    whole = summary.compose(_pack(e[2], m[2]), summary.compose(_pack(e[1], m[1]), _pack(e[0], m[0])))
    other = summary.compose(summary.compose(_pack(e[2], m[2]), _pack(e[1], m[1])), _pack(e[0], m[0]))
    expected = state
    for r in range(3):
        expected = m[r] @ expected + e[r]
    np.testing.assert_allclose(summary.apply(whole, Tensor(state.astype(np.float32))).asnumpy(), expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(whole.asnumpy(), other.asnumpy(), rtol=2e-5, atol=2e-5)


def test_prefix_and_suffix_go_in_their_own_directions():
    e, m, state = _random(1, 4)
    summaries = _pack(e, m)
    boundary = Tensor(state.astype(np.float32))
    forward = state
    for r in range(4):
        got = summary.prefix(summaries, r, boundary).asnumpy()
        np.testing.assert_allclose(got, forward, rtol=2e-5, atol=2e-5)
        forward = m[r] @ forward + e[r]
    backward = state
    d_m = np.swapaxes(m, -1, -2)
    for r in reversed(range(4)):
        got = summary.suffix(Tensor(e.astype(np.float32)), Tensor(d_m.astype(np.float32)), r, boundary).asnumpy()
        np.testing.assert_allclose(got, backward, rtol=2e-5, atol=2e-5)
        backward = d_m[r] @ backward + e[r]
