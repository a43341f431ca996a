"""docs/ops.md as data: its tables, and the arguments and results of every function."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from golden_cases import ROOT

from kcp import ops as kcp_ops

PAGE = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")


def tables() -> list[list[list[str]]]:
    """Every table of the page: rows of cells, the header first."""
    found, rows = [], []
    for line in [*PAGE.splitlines(), ""]:
        if line.startswith("|"):
            cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not all(set(cell) <= set("-:") for cell in cells):
                rows.append(cells)
        elif rows:
            found.append(rows)
            rows = []
    return found


def table(*header: str) -> list[list[str]]:
    """Rows of the one table that has this header."""
    (rows,) = (rows for rows in tables() if tuple(rows[0]) == header)
    assert all(len(row) == len(header) for row in rows)
    return rows[1:]


@dataclass
class Row:
    """One argument or result."""

    name: str
    shape: str
    dtype: str
    default: str


@dataclass
class Stage:
    """A function's rows, in the order of the table."""

    arguments: dict[str, Row] = field(default_factory=dict)
    results: dict[str, Row] = field(default_factory=dict)


def contract() -> dict[str, Stage]:
    stages: dict[str, Stage] = {}
    for stage, name, _, shape, dtype, default in table("stage", "argument or result", "role", "shape", "dtype", "default"):
        rows = stages.setdefault(stage, Stage())
        kind = rows.results if name.startswith("→ ") else rows.arguments
        name = name.removeprefix("→ ")
        assert name not in kind, f"{stage} has {name} twice"
        kind[name] = Row(name, shape, dtype, default)
    return stages


CONTRACT = contract()


def function_of(stage: str):
    return getattr(kcp_ops, stage if stage == "chunk_kda" else f"chunk_kda_{stage}")
