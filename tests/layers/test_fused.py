"""The layers on the native kernels against MindSpore's operators: sizes beyond one strip, ragged widths, documents, slices of none."""

import mindspore as ms
import numpy as np
import pytest
from layer_checks import relative
from mindspore import Tensor

from kcp.layers.mla import causal_attention
from kcp.layers.mlp import silu_times
from kcp.layers.norms import GatedRMSNorm, RMSNorm
from kcp.layers.short_conv import ShortConv, tokens_into_document
from kcp.ops import backends
from kcp.parallel import CpGroup

pytestmark = pytest.mark.skipif("native" not in backends.available(), reason="native kernels are not built")


@pytest.fixture(autouse=True)
def _device(cpu_device):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return cpu_device


def both(function, tensors, parameters=()):
    """Outputs and gradients of ``function(*tensors)`` on both backends, checked to agree."""
    weight = Tensor(np.random.default_rng(9).standard_normal(function(*tensors).shape).astype(np.float32))

    def loss(*x):
        return (function(*x) * weight).sum()

    results = []
    for name in ("native", "composite"):
        with backends.use(name):
            out = function(*tensors)
            grads = ms.grad(loss, tuple(range(len(tensors))), list(parameters) or None)(*tensors)
        of_inputs, of_weights = grads if parameters else (grads, ())
        of_inputs = of_inputs if isinstance(of_inputs, tuple) else (of_inputs,)
        results.append([out, *of_inputs, *of_weights])
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape
        assert relative(got.asnumpy(), want.asnumpy()) < 2e-6


def make(rng, *shape, scale=1.0):
    return Tensor((scale * rng.standard_normal(shape)).astype(np.float32))


@pytest.mark.parametrize("width", [7, 128, 300])
def test_norms_and_swiglu(width):
    rng = np.random.default_rng(width)
    x, gate = make(rng, 3, 67, width, scale=3.0), make(rng, 3, 67, width, scale=6.0)
    plain, gated = RMSNorm(width), GatedRMSNorm(width)
    for cell in (plain, gated):
        cell.weight.set_data(make(rng, width))
    both(plain, (x,), plain.trainable_params())
    both(gated, (x, gate), gated.trainable_params())
    both(silu_times, (gate, x))


@pytest.mark.parametrize(("size", "width", "tokens"), [(4, 300, 100), (2, 16, 33), (9, 5, 40), (4, 257, 3)])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_short_convolution(size, width, tokens, packed):
    rng = np.random.default_rng(size)
    conv = ShortConv(CpGroup.single(), size)
    boundaries = [[0, 1, 2, tokens], [0, tokens - 1, tokens]] if packed else None
    tensors = make(rng, 2, tokens, width), make(rng, width, 1, size), make(rng, width)
    both(lambda x, weight, bias: conv(x, weight, bias, boundaries), tensors)

    def after_others(x, halo, weight):
        return conv.convolve(x, halo, weight)

    both(after_others, (tensors[0], make(rng, 2, size - 1, width), tensors[1]))


@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_attention_over_several_blocks_of_queries(begin, packed):
    rng = np.random.default_rng(begin)
    queries = 300
    total = begin + queries
    q, k, v = make(rng, 1, queries, 2, 12), make(rng, 1, total, 2, 12), make(rng, 1, total, 2, 7)
    into = tokens_into_document(begin, total, [0, 3, 260, 261, total]) if packed else None
    both(lambda q, k, v: causal_attention(q, k, v, begin, into), (q, k, v))


def test_rows_of_large_scores_do_not_overflow():
    q = Tensor(np.full((1, 40, 1, 4), 60.0, np.float32))
    k = Tensor(np.random.default_rng(0).standard_normal((1, 40, 1, 4)).astype(np.float32))
    both(lambda q, k: causal_attention(q, k, k, 0, None), (q, k))


def test_a_slice_without_tokens():
    x = Tensor(np.zeros((1, 0, 8), np.float32))
    assert RMSNorm(8)(x).shape == GatedRMSNorm(8)(x, x).shape == silu_times(x, x).shape == (1, 0, 8)
