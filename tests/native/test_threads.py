"""How many threads the kernels use: what the user said, and never what importing MindSpore left in the C environment."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import mindspore
from kcp.ops.backends.native_call import library
print(library().kcp_num_threads())
"""
CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("asked", "threads"),
    [
        ({}, CORES),
        pytest.param({"OMP_NUM_THREADS": "3"}, 3, marks=pytest.mark.ci),
        pytest.param({"OMP_NUM_THREADS": "5,2"}, 5, marks=pytest.mark.ci),
        pytest.param({"OMP_NUM_THREADS": "3", "KCP_NUM_THREADS": "2"}, 2, marks=pytest.mark.ci),
        pytest.param({"OMP_NUM_THREADS": "many", "KCP_NUM_THREADS": ""}, CORES, marks=pytest.mark.ci),
    ],
)
def test_threads_are_what_the_user_asked_for(native, asked, threads):
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "KCP_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env={**environment, **asked}, capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-1:] == [str(threads)], done.stderr
