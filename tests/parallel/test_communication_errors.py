"""An error of a collective is fatal: nothing that runs during a training step swallows what a collective can raise."""

import ast

import pytest
from golden_cases import ROOT

FOLDERS = ("parallel", "layers", "models")
FILES = ("train.py", "train_step.py", "trainer.py", "monitor.py", "gauges.py", "checkpoint_callbacks.py")
# in one process, where an error of a rank is handed to the caller; neither runs in training
SIMULATION = {"lockstep.py", "simulate.py", "simulate_layer.py"}
BROAD = {"Exception", "BaseException", "RuntimeError"}  # MindSpore raises RuntimeError and its kin


def sources():
    package = ROOT / "kcp"
    found = [package / name for name in FILES]
    found += [path for folder in FOLDERS for path in sorted((package / folder).rglob("*.py")) if path.name not in SIMULATION]
    return found


def names_of(expression):
    return {"BaseException"} if expression is None else {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def swallowing(tree):
    """Lines that catch an error of a collective and neither raise again nor end the process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and names_of(node.type) & BROAD:
            ends = [n for n in ast.walk(node) if isinstance(n, ast.Raise)]
            if not ends:
                yield node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "suppress":
            if set().union(*(names_of(argument) for argument in node.args)) & BROAD:
                yield node.lineno


def test_nothing_in_a_training_step_catches_them():
    found = {f"{path.relative_to(ROOT)}:{line}" for path in sources() for line in swallowing(ast.parse(path.read_text(encoding="utf-8")))}
    # the end of a worker: it prints the error and leaves with exit code 1
    ends = [place for place in found if place.startswith("kcp/train.py:")]
    assert len(sources()) > 30 and found == set(ends) and len(ends) == 1, found


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("try:\n    f()\nexcept RuntimeError:\n    pass", [3]),
        ("try:\n    f()\nexcept:\n    pass", [3]),
        ("try:\n    f()\nexcept (OSError, Exception) as e:\n    g(e)", [3]),
        ("with contextlib.suppress(RuntimeError):\n    f()", [1]),
        ("try:\n    f()\nexcept Exception:\n    raise", []),
        ("try:\n    f()\nexcept ValueError:\n    pass", []),
    ],
)
def test_the_search_finds_what_it_should(text, lines):
    assert list(swallowing(ast.parse(text))) == lines
