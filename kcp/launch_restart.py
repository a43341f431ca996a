"""Starting a run again after a failure, from the last checkpoint that it wrote itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kcp.checkpoint import STATE, checkpoints_in
from kcp.launch import LaunchOptions, launch

FAILED = 1


def launch_with_restarts(target: Sequence[str], options: LaunchOptions, checkpoints: Path, resumed: Path | None, restarts: int) -> int:
    """:func:`kcp.launch.launch`, again after each failure.

    Wrong input (exit code 2) and an interrupt (130) end the run at once: they would come again, or were meant. What the attempts before
    left in ``logs`` stays; attempt n writes to ``logs/restart_n``.

    Args:
        target: what every worker runs; ``--resume`` and a checkpoint's folder are added.
        options: how it is launched.
        checkpoints: where the run writes its checkpoints; only those written since now count.
        resumed: the checkpoint that the first attempt continues; None: it starts anew.
        restarts: how many further attempts there may be.

    Returns:
        Exit code of the last attempt.
    """
    begin = time.time()
    for attempt in range(restarts + 1):
        chosen = options if attempt == 0 else replace(options, log_dir=options.log_dir / f"restart_{attempt}")
        code = launch([*target, *(["--resume", str(resumed.resolve())] if resumed else [])], chosen)
        if code != FAILED or attempt == restarts:
            return code
        resumed = _newest(checkpoints, begin) or resumed
        where = f"from {resumed}" if resumed else "from the beginning, there is no checkpoint yet"
        print(f"kcp: restart {attempt + 1} of {restarts}, {where}", file=sys.stderr, flush=True)
    return FAILED


def _newest(checkpoints: Path, begin: float) -> Path | None:
    written = [path for path in checkpoints_in(checkpoints) if (path / STATE).is_file() and (path / STATE).stat().st_mtime >= begin - 1.0]
    return written[-1] if written else None
