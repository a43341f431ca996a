"""Which backend serves which stage.

A backend is a module with ``unavailable(stage) -> str | None`` and one function a stage (``fwd_prepare`` ...), plus ``op_forward`` and
``op_backward`` for the differentiable op (stage name ``"chunk_kda"``). Picked per call: ``KCP_BACKEND`` or :func:`use` if set, else the
first of ``ascend``, ``native``, ``composite`` that serves the stage on this device. Optional: ``COMPILES = False`` where it can't become
part of a graph, ``op_direct`` (the op with a gradient of its own, or None for a call that it leaves to ``op_forward``),
``op_stateless_forward`` (``op_forward`` where nobody reads the final state), ``prefix`` and ``suffix`` (in place of those of
:mod:`kcp.parallel.summary`).
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType

STAGES = (
    "fwd_prepare",
    "pre_process_fwd",
    "fwd_h",
    "fwd_finalize",
    "bwd_prepare",
    "pre_process_bwd",
    "bwd_dhu",
    "bwd_finalize",
    "merge_fwd_bwd",
)
SERVED = ("chunk_kda",) + STAGES
NAMES = ("ascend", "native", "composite")
ENVIRONMENT_VARIABLE = "KCP_BACKEND"

_forced: list[str] = []


@lru_cache(None)
def _load(name: str) -> ModuleType | str:
    """The backend's module, or why it can't be imported."""
    module = f"kcp.ops.backends.{name}"
    if importlib.util.find_spec(module) is None:
        return "not in this release"
    try:
        return importlib.import_module(module)
    except ImportError as error:
        return f"not installed ({error})"


def _reason(name: str, stage: str, compiled: bool = False) -> str | None:
    module = _load(name)
    if isinstance(module, str):
        return module
    if compiled and not getattr(module, "COMPILES", True):
        return "it serves PyNative, and this call is part of a graph"
    return module.unavailable(stage)


def forced() -> str | None:
    """The backend asked for by :func:`use` or ``KCP_BACKEND``, or None."""
    name = _forced[-1] if _forced else os.environ.get(ENVIRONMENT_VARIABLE, "") or None
    if name is not None and name not in NAMES:
        raise ValueError(f"{ENVIRONMENT_VARIABLE} is {name!r}; allowed: {', '.join(NAMES)}")
    return name


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Serve every call inside the ``with`` block by backend ``name`` (graphs compiled inside keep it)."""
    if name not in NAMES:
        raise ValueError(f"backend is {name!r}; allowed: {', '.join(NAMES)}")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def select(stage: str, compiled: bool = False, after: str | None = None) -> ModuleType:
    """The backend that serves ``stage`` here and now.

    Args:
        compiled: the call becomes part of a graph.
        after: only backends that come after this one in the order of choice (which one was asked for does not count then).

    Raises:
        RuntimeError: the backend that was asked for can't serve it, or none can; says why.
    """
    wanted = forced()
    if after is not None:
        names = NAMES[NAMES.index(after) + 1 :]
    else:
        names = NAMES if wanted is None else (wanted,)
    reasons = []
    for name in names:
        reason = _reason(name, stage, compiled)
        if reason is None:
            return _load(name)
        reasons.append(f"{name}: {reason}")
    raise RuntimeError(f"no backend serves {stage}: " + "; ".join(reasons))


def available(stage: str = "chunk_kda") -> tuple[str, ...]:
    """Names of the backends that can serve ``stage`` on this machine."""
    return tuple(name for name in NAMES if _reason(name, stage) is None)


def describe() -> list[tuple[str, str, dict[str, str]]]:
    """Rows ``(stage, backend that serves it or "-", {other backend: why not})`` for ``kcp doctor``."""
    rows = []
    wanted = forced()
    for stage in SERVED:
        reasons = {name: reason for name in NAMES if (reason := _reason(name, stage)) is not None}
        can = [n for n in ((wanted,) if wanted else NAMES) if n not in reasons]
        rows.append((stage, can[0] if can else "-", reasons))
    return rows
