"""A YAML file as plain values: nothing in it runs, and neither its size nor its aliases can exhaust the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kcp.config_fields import ConfigError, show

MAX_FILE_BYTES = 1 << 18
MAX_DEPTH = 64
MAX_EXPANDED = 4 * MAX_FILE_BYTES  # values and characters once aliases are followed


def read_yaml(path: Path) -> dict[str, Any]:
    """Parse a YAML mapping safely.

    Raises:
        ConfigError: one line when the file is missing, too large, not text, not YAML or not a mapping.
    """
    try:
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8") if path.is_file() and size <= MAX_FILE_BYTES else ""
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: can't be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 text (byte {error.start})"]) from None
    if not path.is_file():
        raise ConfigError([f"{path}: is {'a folder' if path.is_dir() else 'no file'}, a YAML file is needed"])
    if size > MAX_FILE_BYTES:
        raise ConfigError([f"{path}: {size} bytes, a configuration has at most {MAX_FILE_BYTES}"])
    try:
        content = _parse(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError([f"{path}: not valid YAML{_position(error)}"]) from None
    except ValueError as error:
        raise ConfigError([f"{path}: not valid YAML: {error}"]) from None
    if not isinstance(content, dict):
        raise ConfigError([f"{path}: holds {show(content)}, a mapping of keys to values is needed"])
    return content


def _parse(text: str) -> Any:
    """Plain values of a YAML document; a tag that would make anything else is an error.

    Raises:
        ValueError: aliases that multiply to more than ``MAX_EXPANDED``, or that lead back to themselves; more than
            ``MAX_DEPTH`` levels.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded(node, {}, 0) > MAX_EXPANDED:
            raise ValueError(f"its aliases stand for more than {MAX_EXPANDED} characters")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _expanded(node: yaml.Node, known: dict[int, int | None], depth: int) -> int:
    """Values and characters that a node stands for, aliases followed; ``known`` holds what was counted, None where counting goes on."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep, line {node.start_mark.line + 1}")
    if id(node) not in known:
        known[id(node)] = None
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        flat = (part for child in children for part in (child if isinstance(child, tuple) else (child,)))
        known[id(node)] = 1 + sum(_expanded(part, known, depth + 1) for part in flat) + (0 if children else len(node.value))
    size = known[id(node)]
    if size is None:
        raise ValueError(f"an alias leads back to itself, line {node.start_mark.line + 1}")
    return size


def _position(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or (" ".join(str(error).split())[:120] or "nested too deeply")
    return f", line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else f": {problem}"
