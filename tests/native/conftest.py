"""The native library under test: the installed one, or ``KCP_NATIVE_LIBRARY``."""

import os
from pathlib import Path

import pytest
from native_driver import Native

BUILT = Path(__file__).resolve().parents[2] / "kcp" / "ops" / "backends" / "native" / "libkcp_native.so"


@pytest.fixture(scope="session")
def native():
    path = Path(os.environ.get("KCP_NATIVE_LIBRARY", BUILT))
    if not path.exists():
        pytest.skip("the native kernels are not built")
    return Native(path)
