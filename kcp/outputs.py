"""What a run can't write, said in one line: the file, the reason, and how much space is left where space is the reason."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class OutputError(RuntimeError):
    """A file of the output folder can't be written; one line that names it."""


def reason_of(error: Exception, place: Path) -> str:
    """Why a write failed.

    Args:
        error: an ``OSError``, or what safetensors raises with the system's message in its text.
        place: the file or folder that was written.
    """
    number = getattr(error, "errno", None)
    text = os.strerror(number) if number else " ".join(str(error).split())[:160]
    if number in _NO_SPACE or any(f"os error {code}" in text for code in _NO_SPACE):
        folder = next(folder for folder in (place, *place.parents) if folder.is_dir())
        text += f", {shutil.disk_usage(folder).free} bytes are free"
    return text


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around code that writes ``path``.

    Raises:
        OutputError: in place of any ``OSError``.
    """
    try:
        yield
    except OSError as error:
        place = Path(error.filename) if isinstance(error.filename, str) else path
        raise OutputError(f"{place}: can't be written: {reason_of(error, path)}") from None
