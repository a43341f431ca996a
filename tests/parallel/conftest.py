"""Every test here needs MindSpore on its device."""

import pytest


@pytest.fixture(autouse=True)
def _device(cpu_device):
    return cpu_device
