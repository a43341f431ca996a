"""A frozen KDA layer with trained low-rank weights before it: gradients over two ranks add up to those of one device."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _msrun import run_workers  # noqa: E402

WORKER = """
import sys
import mindspore as ms
import numpy as np
ms.set_device("CPU")
ms.runtime.launch_blocking()
from mindspore.communication import init
init()
from mindspore import Tensor, nn
from kcp.layers import KdaAttention, KdaAttentionConfig
from kcp.parallel import CpGroup

LENGTHS, HIDDEN, RANK = (11, 9), 16, 2

class Adapted(nn.Cell):
    def __init__(self, group, strategy):
        super().__init__()
        np.random.seed(0)
        self.layer = KdaAttention(KdaAttentionConfig(HIDDEN, 2, head_dim=8, conv_size=4, strategy=strategy, chunk_size=16), group)
        for parameter in self.layer.get_parameters():
            parameter.requires_grad = False
        rng = np.random.default_rng(1)
        self.down = ms.Parameter(Tensor(rng.standard_normal((HIDDEN, RANK)).astype(np.float32)), name="down")
        self.up = ms.Parameter(Tensor(rng.standard_normal((RANK, HIDDEN)).astype(np.float32) * 0.1), name="up")

    def construct(self, x, d_out):
        return (self.layer(x + (x @ self.down) @ self.up) * d_out).sum()

rng = np.random.default_rng(2)
x, d_out = (rng.standard_normal((1, sum(LENGTHS), HIDDEN)).astype(np.float32) for _ in range(2))
world = CpGroup.world(LENGTHS)
begin, end = world.slice_bounds(sum(LENGTHS))

def grads(cell, x, d_out, jit):
    weights = [p for p in cell.get_parameters() if p.requires_grad]
    assert len(weights) == 2
    grad = ms.grad(cell, None, weights)
    return [g.asnumpy() for g in (ms.jit(grad) if jit else grad)(Tensor(x.copy()), Tensor(d_out.copy()))]

out = {}
for strategy in ("state_scan", "ulysses"):
    for jit in (False, True):
        mine = grads(Adapted(world, strategy), x[:, begin:end], d_out[:, begin:end], jit)
        out[f"{strategy}_{jit}"] = np.concatenate([g.reshape(-1) for g in mine])
out["whole"] = np.concatenate([g.reshape(-1) for g in grads(Adapted(CpGroup.single(), "none"), x, d_out, False)])
np.savez(sys.argv[1] + f"/{world.rank}.npz", **out)
"""


@pytest.mark.ci
def test_gradients_of_adapters_on_a_frozen_layer(tmp_path):
    run_workers(WORKER, workers=2, args=[str(tmp_path)], timeout=240)
    first, second = (dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2))
    for name in set(first) - {"whole"}:
        whole = first["whole"]
        assert np.linalg.norm(first[name] + second[name] - whole) <= 5e-5 * np.linalg.norm(whole), name
