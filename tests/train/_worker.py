"""Worker of the training tests: ``_worker.py [--stand-in] CONFIG ...`` runs kcp.train with synthetic samples."""

import sys

import _stand_in

if __name__ == "__main__":
    arguments = sys.argv[1:]
    import mindspore as ms

    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    if "--stand-in" in arguments:
        arguments.remove("--stand-in")
        _stand_in.install_layer()
    _stand_in.install_loader()
    from kcp.train import run_worker

    run_worker(arguments)
