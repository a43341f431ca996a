"""A step of a KDA layer on a sequence cut over several processes, at two degrees, by scripts/long_step.py."""

import subprocess
import sys

import pytest
from golden_cases import ROOT


def _step(*arguments):
    command = [sys.executable, str(ROOT / "scripts" / "long_step.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.once
def test_a_million_tokens_on_four_processes():
    """1,048,576 tokens, CP=4 against CP=2: within 20 GiB, results within the gates (the script's exit code)."""
    done = _step()
    assert done.returncode == 0, done.stdout + done.stderr


def test_bad_arguments_are_refused():
    done = _step("--tokens", 5000)
    assert done.returncode == 2
    assert "--tokens is 5000; allowed: a multiple of 16384" in done.stderr
