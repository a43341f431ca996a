"""The helper that starts worker processes: outputs in rank order, failures shown, nothing left behind."""

import os

import pytest
from _msrun import WorkerError, processes_of, run_workers

SUM = """
import sys
import numpy as np
import mindspore as ms
from mindspore import ops, Tensor
from mindspore.communication import init, get_rank
ms.set_device("CPU")
ms.runtime.launch_blocking()
init()
total = ops.AllReduce()(Tensor(np.array([get_rank() + 1.0], np.float32)))
print("rank", get_rank(), "sum", float(total[0]), "argument", sys.argv[1])
"""

FAIL = """
import sys, time
import mindspore as ms
from mindspore.communication import init, get_rank
ms.set_device("CPU")
init()
if get_rank() == 1:
    raise ValueError("this worker has a wrong value")
time.sleep(60)
"""


@pytest.mark.ci
def test_outputs_come_in_rank_order():
    outputs = run_workers(SUM, 2, ["hello"], timeout=90)
    for rank, text in enumerate(outputs):
        assert f"rank {rank} sum 3.0 argument hello" in text


@pytest.mark.ci
def test_a_failing_worker_is_named_and_no_process_stays():
    with pytest.raises(WorkerError, match="worker 1 failed(.|\n)*this worker has a wrong value") as caught:
        run_workers(FAIL, 2, timeout=90)
    assert caught.value.rank == 1
    assert processes_of(f"{os.getpid()}-") == []
