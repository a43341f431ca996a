"""Every test that asks for ``backend`` runs on each backend that this machine offers."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _device(cpu_device):
    return cpu_device


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        from kcp.ops import backends

        metafunc.parametrize("backend", list(backends.available()), indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest):
    """Name of the backend that serves the op during the test."""
    from kcp.ops import backends

    with backends.use(request.param):
        yield request.param
