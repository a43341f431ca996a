"""Worker of the training tests: ``_worker.py CONFIG ...`` runs kcp.train with synthetic samples."""

import mindspore as ms

if __name__ == "__main__":
    ms.set_device("CPU")
    ms.runtime.launch_blocking()

    from _synthetic import install_loader

    install_loader()
    from kcp.train import run_worker

    run_worker()
