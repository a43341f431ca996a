"""Counters of the device collectives among real processes: what was meant, what its emulation moved, and silence in graphs."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))
from _msrun import run_workers  # noqa: E402

WORKER = """
import mindspore as ms
ms.set_device("CPU")
ms.runtime.launch_blocking()
from mindspore.communication import init
init()
from mindspore import Tensor, ops
from kcp.parallel import CpGroup

group = CpGroup.world()
c, x = group.collectives, ops.ones((4, 6), ms.float32)

def all_kinds(x):
    y = c.all_gather(x, "state")[0]
    y = c.all_to_all(ops.depend(x, y), "heads")
    y = c.round(ops.depend(y, y), (group.rank - 1) % 4, "halo")
    return c.all_reduce(y, "final_state")

def report(label):
    for purpose, r in group.traffic.read().items():
        print("counted", label, purpose, r.exchanges, r.logical, r.physical)

all_kinds(x)
report("world")
group.traffic.reset()
ms.jit(all_kinds)(x)
report("graph")
group.traffic.reset()
half = c.subgroup(range(group.rank // 2 * 2, group.rank // 2 * 2 + 2))
half.all_gather(ops.cast(x, ms.float16), "state")
report("half")
"""


@pytest.mark.ci
def test_device_collectives_count_in_pynative(tmp_path):
    for output in run_workers(WORKER, workers=4, timeout=200):
        lines = [line.split()[1:] for line in output.splitlines() if line.startswith("counted")]
        counted = {(label, purpose): tuple(map(int, numbers)) for label, purpose, *numbers in lines}
        payload = 4 * 6 * 4
        assert counted["world", "state"] == (1, 3 * payload, 3 * payload)
        assert counted["world", "heads"] == (1, 3 * payload // 4, 3 * payload)
        assert counted["world", "halo"] == (1, payload, 3 * payload)
        assert counted["world", "final_state"] == (1, payload, payload)
        assert all(counts == (0, 0, 0) for (label, _), counts in counted.items() if label == "graph")
        assert counted["half", "state"] == (1, payload // 2, 2 * payload)
