"""Tests of the Ascend backend on the CPU, through the emulation of Hyper-Parallel's functions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in ("ops", "parallel"):  # their problems serve here too
    sys.path.append(str(Path(__file__).resolve().parents[1] / folder))


@pytest.fixture(autouse=True, scope="session")
def _device(cpu_device):
    return cpu_device


@pytest.fixture(autouse=True)
def _unforced(monkeypatch):
    """A backend that ``KCP_BACKEND`` forces on the other tests is none of these tests' concern."""
    monkeypatch.delenv("KCP_BACKEND", raising=False)


@pytest.fixture(autouse=True)
def _no_unfinished_gradient():
    """An error in the middle of ``ms.grad`` leaves MindSpore's executor there; the next test must not begin inside it."""
    yield
    from mindspore.graph.api import _pynative_executor

    _pynative_executor.clear_res()


@pytest.fixture
def emulated():
    """Hyper-Parallel as if it were installed, complete and of the document's version."""
    import emulator

    with emulator.installed():
        yield emulator
