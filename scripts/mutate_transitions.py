"""Break the transitions M of the state scan in known ways and show that the tests of tests/parallel fail for each.

    python scripts/mutate_transitions.py [--only NAME]

A mutant patches kcp.parallel.summary or the state scan in a process of its own that then runs the state scan's lockstep tests up to the
first failure; no file is changed. A mutant that no test sees, or an unbroken run that fails, ends the script with exit code 1.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/parallel/test_lockstep_core.py", "tests/parallel/test_lockstep_packed.py"]
STRATEGY = "state_scan or transition"


def _rounded(m):
    import mindspore as ms
    from mindspore import ops

    return ops.cast(ops.cast(m, ms.bfloat16), ms.float32)


def _transposed(m):
    from mindspore import ops

    return ops.swapaxes(m, -1, -2)


def _identity(m):
    import mindspore as ms
    from mindspore import ops

    return m * 0.0 + ops.eye(m.shape[-1], m.shape[-1], ms.float32)


def _dropped(m):
    return m * 0.0


def _break_forward(change: Callable) -> None:
    """The prefix and every composition use ``change(M)``."""
    from kcp.parallel import summary

    split = summary.split
    summary.split = lambda s: (split(s)[0], change(split(s)[1]))


def _break_backward(change: Callable) -> None:
    """The suffix uses ``change(dM)``."""
    from kcp.parallel import summary

    suffix = summary.suffix
    summary.suffix = lambda d_e, d_m, rank, d_final: suffix(d_e, change(d_m), rank, d_final)


def _ignore_boundaries() -> None:
    """Ranks where a document starts send M = I instead of zero."""
    import mindspore as ms
    from mindspore import ops

    from kcp.parallel.state_scan import THROUGH, StateScan

    send = StateScan._send_forward

    def broken(self, q, k, v, g, beta, a_log, dt_bias, index, h0, opened):
        own, width = send(self, q, k, v, g, beta, a_log, dt_bias, index, h0, opened), v.shape[3]
        if self.is_last or self.no_tokens or self.documents.all_through:
            return own
        eye = ops.eye(q.shape[3], q.shape[3], ms.float32)
        return ops.concat((own[..., :width], own[..., width:] + eye * (1.0 - index[THROUGH])), -1)

    StateScan._send_forward = broken


MUTANTS = {
    "unbroken": ("nothing is changed", lambda: None),
    "forward-transposed": ("the prefix applies M^T", lambda: _break_forward(_transposed)),
    "forward-dropped": ("the prefix forgets all but the nearest rank (M = 0)", lambda: _break_forward(_dropped)),
    "forward-identity": ("the prefix adds local states up, as for plain linear attention (M = I)", lambda: _break_forward(_identity)),
    "forward-bf16": ("M is rounded to bfloat16", lambda: _break_forward(_rounded)),
    "backward-transposed": ("the suffix applies M where M^T belongs", lambda: _break_backward(_transposed)),
    "backward-dropped": ("the suffix forgets all but the nearest rank (dM = 0)", lambda: _break_backward(_dropped)),
    "backward-bf16": ("dM is rounded to bfloat16", lambda: _break_backward(_rounded)),
    "boundary-ignored": ("M = I where a document starts", _ignore_boundaries),
}


def run_broken(name: str) -> int:
    """Apply a mutant to this process and run the tests in it; pytest's exit code."""
    import pytest

    sys.path.append(str(ROOT))
    os.chdir(ROOT)
    MUTANTS[name][1]()
    return pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-k", STRATEGY, *TESTS])


def judge(name: str) -> bool:
    """Run a mutant in a process of its own, print what became of it; whether that is as it should be."""
    start = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "--apply", name]
    done = subprocess.run(command, env={**os.environ, "GLOG_v": "3"}, capture_output=True, text=True, timeout=1800)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [line.split(" - ")[0].removeprefix("FAILED ") for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    verdict = "the tests pass" if done.returncode == 0 else f"fails in {failed[0]}"
    right = (done.returncode == 0) == (name == "unbroken")
    print(f"{'ok' if right else 'WRONG':6}{name:20} {MUTANTS[name][0]}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
    return right


def main() -> int:
    """Run the mutants; exit code 1 if one survives or the unbroken code fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MUTANTS, help="one of them")
    parser.add_argument("--apply", choices=MUTANTS, help="run the tests here, with this mutant")
    options = parser.parse_args()
    if options.apply:
        return run_broken(options.apply)
    return 0 if all([judge(name) for name in MUTANTS if options.only in (None, name)]) else 1


if __name__ == "__main__":
    sys.exit(main())
