"""Marks and the device of the tests.

``fast`` is the mark of every test without another one, and what runs by default. ``ci`` tests join when ``CI`` is set
to a true value; ``once`` tests are long and run on request alone. ``-m`` or the node id of a test overrides the choice.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
from golden_cases import ROOT

LEVELS = ("fast", "ci", "once")

# Last on the path: the repository's configs/ must not shadow the package of that name that MindFormers reads.
if importlib.util.find_spec("kcp") is None:
    sys.path.append(str(ROOT))


def _in_ci() -> bool:
    return os.environ.get("CI", "").strip().lower() not in ("", "0", "false", "no")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(level) for level in LEVELS):
            item.add_marker(pytest.mark.fast)
    if config.option.markexpr or any("::" in str(argument) for argument in config.args):
        return
    wanted = ("fast", "ci") if _in_ci() else ("fast",)
    chosen, left = [], []
    for item in items:
        (chosen if any(item.get_closest_marker(level) for level in wanted) else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = chosen


@pytest.fixture(scope="session")
def cpu_device() -> str:
    """MindSpore on the device of the tests (``KCP_TEST_DEVICE``, default CPU), synchronous on the CPU."""
    import mindspore as ms

    device = os.environ.get("KCP_TEST_DEVICE", "CPU")
    ms.set_device(device)
    if device == "CPU":
        ms.runtime.launch_blocking()
    return device
