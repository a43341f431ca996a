"""The ShortConv halo: tokens before a slice from one or several earlier ranks, and the gradient back to the owners."""

import numpy as np
import pytest
from mindspore import Tensor, ops

from kcp.parallel import Halo, lockstep

SLICES = [(5, 5), (8, 3, 1), (1, 1, 1, 1), (2, 1, 0, 3, 1), (0, 4, 0, 0, 2), (2, 2, 2, 2)]


@pytest.mark.parametrize(
    ("lengths", "declared"), [*((lengths, True) for lengths in SLICES), *(((n,) * 4, False) for n in (1, 2, 3, 4))], ids=str
)
def test_halo_and_its_adjoint(lengths, declared):
    """``declared``: the group knows its slices' lengths; else they are equal."""
    halo, ranks, tokens = 3, len(lengths), sum(lengths)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, tokens, 5)).astype(np.float32)
    d_halo = rng.standard_normal((ranks, 2, halo, 5)).astype(np.float32)
    begin = np.concatenate([[0], np.cumsum(lengths)])
    padded = np.concatenate([np.zeros((2, halo, 5), np.float32), x], 1)
    d_padded = np.zeros_like(padded)
    for r in range(ranks):
        d_padded[:, begin[r] : begin[r] + halo] += d_halo[r]

    def body(group):
        local = x[:, begin[group.rank] : begin[group.rank + 1]]
        local = Tensor(local.copy()) if local.size else ops.zeros((2, 0, 5))
        cell = Halo(group, halo)
        out = cell.construct(local)
        return out.asnumpy(), cell.bprop(local, out, Tensor(d_halo[group.rank]))[0].asnumpy()

    results = lockstep.run(ranks, body, lengths if declared else None)
    for r in range(ranks):
        np.testing.assert_array_equal(results[r][0], padded[:, begin[r] : begin[r] + halo])
    np.testing.assert_allclose(np.concatenate([grad for _, grad in results], 1), d_padded[:, halo:], rtol=1e-6, atol=1e-6)
