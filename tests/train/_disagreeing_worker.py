"""Worker of test_disagreeing_ranks: ``_disagreeing_worker.py WHAT CONFIG ...`` trains, but rank 1 has its own idea of WHAT.

WHAT: ``boundaries`` or ``length`` of its samples, ``seed`` of its initial parameters, ``mode`` of execution.
"""

import os
import sys


def install(what: str) -> None:
    """Make this rank differ."""
    import numpy as np
    from mindspore import Parameter, Tensor

    from kcp.data.packing import EpochView
    from kcp.models.kimi_linear.model import KimiLinearForCausalLM

    read = EpochView.__getitem__
    build = KimiLinearForCausalLM.__init__

    def item(self, index):
        input_ids, labels, loss_mask, cu_seqlens = read(self, index)
        if what == "length":
            return input_ids[:40], labels[:40], loss_mask[:40], np.minimum(cu_seqlens, 40)
        return input_ids, labels, loss_mask, np.array([0, 11, *[80] * (len(cu_seqlens) - 2)], np.int32)

    def model(self, *arguments, **keywords):
        build(self, *arguments, **keywords)
        parameter: Parameter = self.trainable_params()[0]
        parameter.set_data(Tensor(parameter.asnumpy() + 1))

    if what in ("boundaries", "length"):
        EpochView.__getitem__ = item
    if what == "seed":
        KimiLinearForCausalLM.__init__ = model


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    import mindspore as ms

    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    if os.environ["RANK_ID"] == "1":
        install(what)
        arguments += ["--mode", "pynative"] if what == "mode" else []
    from kcp.train import main

    sys.exit(main(arguments))
