"""Worker of test_skipped_steps: ``_poison_worker.py CONFIG ...`` trains; rank 1 has one bad gradient in some steps (PyNative)."""

import os
import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor

BAD = {3: np.nan, 4: -np.inf, 6: np.inf, 7: np.nan, 8: np.inf}


def install() -> None:
    """Let one number of one gradient of rank 1 be what ``BAD`` says, step by step."""
    from kcp.train_step import KcpTrainOneStepCell

    original, step = KcpTrainOneStepCell._fuse, [0]

    def fuse(self, gradients, loss_sum, count):
        step[0] += 1
        if os.environ["RANK_ID"] == "1" and step[0] in BAD:
            number = len(gradients) // 2
            bad = np.zeros(gradients[number].shape, np.float32)
            bad.flat[0] = BAD[step[0]]
            gradients = (*gradients[:number], gradients[number] + Tensor(bad), *gradients[number + 1 :])
        return original(self, gradients, loss_sum, count)

    KcpTrainOneStepCell._fuse = fuse


if __name__ == "__main__":
    ms.set_device("CPU")
    ms.runtime.launch_blocking()

    from _synthetic import install_loader

    install_loader()
    install()
    from kcp.train import run_worker

    run_worker(sys.argv[1:])
