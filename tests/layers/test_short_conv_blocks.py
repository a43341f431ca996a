"""ShortConv in blocks of tokens (PyNative, long inputs) against the same layer in one piece."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from kcp.layers.short_conv import ShortConv
from kcp.ops import backends
from kcp.parallel import CpGroup


@pytest.mark.parametrize("tokens", [24, 26, 27, 31])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_blocks_change_nothing(tokens, packed):
    """Outputs keep their bits; gradients are summed in another order."""
    rng = np.random.default_rng(tokens)
    width, size, batch = 3, 4, 2
    x, d_out = (Tensor(rng.standard_normal((batch, tokens, width)).astype(np.float32)) for _ in range(2))
    weight, bias = Tensor(rng.standard_normal((width, 1, size)).astype(np.float32)), Tensor(rng.standard_normal(width).astype(np.float32))
    boundaries = [[0, 7, 8, 17, tokens], [0, 9, tokens]] if packed else None
    whole, blocks = ShortConv(CpGroup.single(), size), ShortConv(CpGroup.single(), size)
    blocks.block = 8 * width
    results = []
    for conv in (whole, blocks):

        def loss(x, weight, bias, conv=conv):
            y = conv(x, weight, bias, boundaries)
            return (y * d_out).sum(), y

        with backends.use("composite"):  # the native kernels need no blocks
            (_, y), grads = ms.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weight, bias)
        results.append([y.asnumpy(), *(g.asnumpy() for g in grads)])
    np.testing.assert_array_equal(results[1][0], results[0][0])
    for got, expected in zip(results[1][1:], results[0][1:], strict=True):
        assert np.linalg.norm(got - expected) <= 1e-6 * np.linalg.norm(expected)
