"""What the commands share: refusals of one line, and argument types whose errors say what is needed."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable


def refuse(*lines: str) -> int:
    """Print ``kcp: error: LINE`` for each; returns the exit code of a user's error."""
    for line in lines:
        print(f"kcp: error: {line}", file=sys.stderr)
    return 2


def integer_from(least: int) -> Callable[[str], int]:
    """Argument type: an integer of at least ``least``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: an integer >= {least} is needed")
        return value

    return parse


positive = integer_from(1)
count = integer_from(0)


def number(text: str) -> float:
    """Argument type: a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text}: a number >= 0 is needed")
    return value
