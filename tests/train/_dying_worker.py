"""Worker of test_dead_ranks: ``_dying_worker.py FAULT RANK STEP MARK CONFIG ...`` trains until a fault is due on one rank.

FAULT: ``forward``, ``backward``: SIGKILL as the rank comes to that exchange of the step; ``stop``: SIGSTOP there; ``leave``: exit code
0 there; ``data``: an error while a batch is read; ``checkpoint``: SIGKILL with half of a checkpoint written. MARK: a file made then.
"""

import os
import signal
import sys
from pathlib import Path


def die(fault: str, mark: str) -> None:
    Path(mark).touch()
    if fault == "leave":
        sys.stdout.flush()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)


def install(fault: str, step: int, mark: str) -> None:
    """Put the fault where it is due; one exchange forward and one backward a step and layer (the run has one layer)."""
    import kcp.checkpoint
    from kcp.data.packing import EpochView
    from kcp.parallel.state_scan import StateScan

    method = "_exchange_backward" if fault == "backward" else "_exchange_forward"
    before, calls = getattr(StateScan, method), []

    def exchange(self, *arguments):
        calls.append(None)
        if len(calls) == step:
            die(fault, mark)
        return before(self, *arguments)

    if fault in ("forward", "backward", "stop", "leave"):
        setattr(StateScan, method, exchange)
    if fault == "data":
        read, read_before = [], EpochView.__getitem__

        def item(self, index):
            read.append(None)
            if len(read) == 2 * step:
                Path(mark).touch()
                raise ValueError("sample 7: the text is broken")
            return read_before(self, index)

        EpochView.__getitem__ = item
    if fault == "checkpoint":
        whole, written = kcp.checkpoint.save_file, []

        def half(tensors, path, *arguments):
            whole(tensors, path, *arguments)
            written.append(None)
            if len(written) == 4:  # the second checkpoint's optimizer
                os.truncate(path, os.path.getsize(path) // 2)
                die(fault, mark)

        kcp.checkpoint.save_file = half


if __name__ == "__main__":
    fault, rank, step, mark, *arguments = sys.argv[1:]
    import mindspore as ms

    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    if os.environ["RANK_ID"] == rank:
        install(fault, int(step), mark)
    from kcp.train import main

    sys.exit(main(arguments))
