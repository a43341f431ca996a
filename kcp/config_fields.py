"""Reading one section of a configuration: typed values, one line for everything that is wrong with them.

Every problem is one line ``key = value: what is allowed``. Problems are collected, never raised one at a time, so that
a user sees all of them after one try.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_MISSING = object()
_MAX_SHOWN = 80


class ConfigError(ValueError):
    """The configuration can't be run. ``problems`` holds one line for each reason."""

    def __init__(self, problems: list[str] | tuple[str, ...]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def show(value: Any) -> str:
    """One-line text of a value, shortened when it is long."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def nearest(name: Any, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like ``name``, or None when none is near."""
    found = difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


class Problems:
    """Collects the problems of a configuration in the order in which they are found."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._values: dict[str, str] = {}

    def add(self, key: str, value: Any, allowed: str) -> None:
        """Record that ``key`` has ``value`` and say what is allowed instead.

        A key whose value was refused already goes on with its default; what that default breaks is not the user's fault
        and is not recorded.
        """
        if self._values.setdefault(key, show(value)) != show(value):
            return
        self.add_line(f"{key} = {show(value)}: {allowed}")

    def add_line(self, line: str) -> None:
        """Record a problem that is about no single value."""
        self.lines.append(" ".join(line.splitlines()))  # a key may hold line breaks


class Section:
    """One mapping of the file, read key by key; what was not read is unknown.

    Args:
        raw: the mapping, or None when the section is absent.
        path: dotted name of the section, used in messages; empty for the top level.
        problems: where problems go.
    """

    def __init__(self, raw: Any, path: str, problems: Problems) -> None:
        self.path = path
        self.problems = problems
        if raw is not None and not isinstance(raw, Mapping):
            problems.add(path, raw, "a mapping of keys to values is needed")
            raw = None
        self.present = raw is not None
        self.raw: Mapping[str, Any] = raw or {}
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        """Dotted name of a key of this section."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether the file gives this key a value other than null."""
        return self.raw.get(key) is not None

    def section(self, key: str) -> Section:
        """The section below ``key``."""
        return Section(self._take(key, None), self.name(key), self.problems)

    def integer(self, key: str, default: int, *, minimum: int = 1, maximum: int | None = None) -> int:
        """An integer within bounds (a bool is not an integer here)."""
        value = self._take(key, default)
        allowed = f"an integer >= {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"
        if isinstance(value, bool) or not isinstance(value, int):
            return self._refuse(key, value, f"{allowed} is needed", default)
        if value < minimum or (maximum is not None and value > maximum):
            return self._refuse(key, value, f"{allowed} is needed", default)
        return value

    def number(self, key: str, default: float, *, above: float | None = None, minimum: float | None = None) -> float:
        """A finite number, optionally with a lower bound that is exclusive (``above``) or inclusive (``minimum``)."""
        value = self._take(key, default)
        allowed = "a number"
        if above is not None:
            allowed += f" > {above:g}"
        if minimum is not None:
            allowed += f" >= {minimum:g}"
        if isinstance(value, str) and _is_number(value):
            hint = f"{allowed} is needed; YAML reads this as text, write it with a point and a sign as in 1.0e-3"
            return self._refuse(key, value, hint, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            return self._refuse(key, value, f"{allowed} is needed", default)
        if (above is not None and value <= above) or (minimum is not None and value < minimum):
            return self._refuse(key, value, f"{allowed} is needed", default)
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or False."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            return self._refuse(key, value, "True or False is needed", default)
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._take(key, default)
        if not isinstance(value, str):
            return self._refuse(key, value, "text is needed", default)
        return value

    def choice(self, key: str, default: Any, allowed: Sequence[Any]) -> Any:
        """One of a few values; a near miss is answered with the nearest one."""
        value = self._take(key, default)
        if any(type(value) is type(option) and value == option for option in allowed):
            return value
        line = f"one of {', '.join(str(option) for option in allowed)} is needed"
        near = nearest(value, [str(option) for option in allowed]) if isinstance(value, str) else None
        return self._refuse(key, value, line + (f"; did you mean {near}?" if near else ""), default)

    def texts(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """A list of strings; one string stands for a list of one."""
        value = self._take(key, default)
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            return self._refuse(key, value, "a text or a list of texts is needed", default)
        return tuple(value)

    def anything(self, key: str, default: Any = None) -> Any:
        """The raw value, marked as known."""
        return self._take(key, default)

    def unread(self) -> list[str]:
        """Keys of the file that nothing has asked for, in the order of the file."""
        return [key for key in self.raw if key not in self._read]

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Refuse every key that is not in ``known`` with the nearest name that is."""
        names = sorted(set(known) | self._read)
        for key, value in self.raw.items():
            if key in names:
                continue
            near = nearest(key, names)
            hint = f"did you mean {near}?" if near else f"known keys: {', '.join(names)}"
            self.problems.add(self.name(str(key)), value, f"unknown key; {hint}")

    def _take(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self.raw.get(key, _MISSING)
        return default if value is _MISSING or value is None else value

    def _refuse(self, key: str, value: Any, allowed: str, default: Any) -> Any:
        self.problems.add(self.name(key), value, allowed)
        return default


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
