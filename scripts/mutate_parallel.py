"""Change single operators and numbers of kcp/parallel and kcp/ops/stages.py and see which changes no test notices.

    python scripts/mutate_parallel.py FOLDER [--mutants 1000] [--seed 8] [--modules kcp/parallel ...] [--tests tests/parallel ...]

Needs cosmic-ray and coverage beside what the tests need, and a repository whose native library is built. FOLDER gets a copy of the
repository (the commit checked out), coverage of the tests test by test, and a line for every mutant in ``results.jsonl``; run again, it
goes on where it stopped.

cosmic-ray makes the mutants. Those of one operator into every other one are cut to the telling ones, and what sits in annotations and
``raise`` statements is left out; the rest is drawn at random, in proportion over the modules. One process imports MindSpore and pytest and
forks a child for each mutant, which imports the changed module and runs the tests that reach the changed line, cheapest first, up to the
first failure. A mutant whose tests take far longer than they should counts as killed.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = ["kcp/parallel", "kcp/ops/stages.py"]
TESTS = ["tests/parallel", "tests/layers", "tests/ops/test_stages.py", "tests/ops/test_stage_errors.py", "tests/ops/test_merge.py"]
NATIVE = "kcp/ops/backends/native/libkcp_native.so"
KEPT = {  # what an operator becomes
    "Add": ("Sub", "Mul"), "Sub": ("Add",), "Mul": ("Add", "FloorDiv"), "FloorDiv": ("Mul",), "Mod": ("FloorDiv",), "Div": ("Mul",),
    "Pow": ("Mul",), "BitAnd": ("BitOr",), "BitOr": ("BitAnd",), "Eq": ("NotEq", "GtE", "LtE"), "NotEq": ("Eq", "Gt", "Lt"),
    "Lt": ("LtE", "GtE", "Eq"), "LtE": ("Lt", "Gt", "Eq"), "Gt": ("GtE", "LtE", "Eq"), "GtE": ("Gt", "Lt", "Eq"), "Is": ("IsNot",),
    "IsNot": ("Is",), "USub": ("UAdd",), "Not": ("Delete",), "Delete": ("Not",), "Invert": ("UAdd",),
}  # fmt: skip
SECONDS, MOST_TESTS, LIMIT, SLOW = 6.0, 30, 60.0, 4.0  # of one mutant's tests together, their number, until killed; no test slower


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Under coverage this file is a plugin of pytest: lines are told apart by the test that reached them."""
    import coverage

    coverage.Coverage.current().switch_context(item.nodeid)
    begin = time.perf_counter()
    yield
    with open(os.environ["KCP_DURATIONS"], "a") as file:
        file.write(json.dumps([item.nodeid, time.perf_counter() - begin]) + "\n")
    coverage.Coverage.current().switch_context("")


def measure(folder: Path, modules: list[str], tests: list[str]) -> None:
    """Coverage of the modules by the tests, in ``folder/coverage``."""
    include = ",".join(str(folder / "tree" / module) + ("" if module.endswith(".py") else "/*") for module in modules)
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parent)])
    env = {**os.environ, "PYTHONPATH": path, "KCP_DURATIONS": str(folder / "durations.jsonl"), "PYTHONDONTWRITEBYTECODE": "1"}
    run = [sys.executable, "-m", "coverage", "run", f"--data-file={folder / 'coverage'}", f"--include={include}"]
    subprocess.run([*run, "-m", "pytest", "-q", "-p", "mutate_parallel", *tests], cwd=folder / "tree", env=env, check=True)


def reached(folder: Path) -> tuple[dict, dict]:
    """``(tests that reach a line by file and line, seconds by test)``; continued lines share what their statement has."""
    import coverage

    data = coverage.CoverageData(str(folder / "coverage"))
    data.read()
    seconds = dict(map(json.loads, (folder / "durations.jsonl").read_text().splitlines()))
    found = {}
    for name in data.measured_files():
        lines = defaultdict(set, {line: set(tests) for line, tests in data.contexts_by_lineno(name).items()})
        for node in ast.walk(ast.parse(Path(name).read_text())):
            if isinstance(node, ast.stmt):
                last = node.body[0].lineno if hasattr(node, "body") else node.end_lineno + 1
                together = set().union(*(lines[line] for line in range(node.lineno, last)))
                for line in range(node.lineno, last):
                    lines[line] |= together
        everyone = {test for tests in lines.values() for test in tests if test}
        # what runs as the module is imported concerns all of its tests
        found[str(Path(name).relative_to(folder / "tree"))] = {n: everyone if t == {""} else t - {""} for n, t in lines.items() if t}
    return found, seconds


def mutants(tree: Path, modules: list[str], seed: int) -> list:
    """cosmic-ray's mutants but for those left out, in the order in which they are tried."""
    from cosmic_ray.commands import init
    from cosmic_ray.modules import find_modules
    from cosmic_ray.work_db import WorkDB

    work, kept = WorkDB(":memory:", WorkDB.Mode.create), defaultdict(list)
    init(find_modules([Path(module) for module in modules]), work, {})
    for item in work.work_items:
        mutation = item.mutations[0]
        names = mutation.operator_name.split("/")[1].split("_")
        if len(names) == 1 or names[2] in KEPT.get(names[1], ()):
            kept[str(mutation.module_path)].append(mutation)
    order, rng = [], random.Random(seed)
    for name in sorted(kept):
        left_out = []
        for node in ast.walk(ast.parse((tree / name).read_text())):
            left_out += [n for n in (getattr(node, "annotation", None), getattr(node, "returns", None)) if n is not None]
            left_out += [node] if isinstance(node, ast.Raise) else []
        spans = [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in left_out]
        mine = [m for m in kept[name] if not any(begin <= tuple(m.start_pos) < end for begin, end in spans)]
        mine.sort(key=lambda m: (m.operator_name, m.occurrence))
        rng.shuffle(mine)
        order += [((i + rng.random()) / len(mine), mutation) for i, mutation in enumerate(mine)]
    return [mutation for _, mutation in sorted(order, key=lambda entry: entry[0])]


def chosen(tests: set, seconds: dict) -> list[str]:
    """Cheap tests, of different functions first."""
    by_function, out, total = defaultdict(list), [], 0.0
    for test in sorted(tests, key=seconds.get):
        if seconds[test] < SLOW:
            by_function[test.split("[")[0]].append(test)
    turns = [
        group[turn] for turn in range(max(map(len, by_function.values()), default=0)) for group in by_function.values() if turn < len(group)
    ]
    for test in turns:
        if not out or (total + seconds[test] <= SECONDS and len(out) < MOST_TESTS):
            out.append(test)
            total += seconds[test]
    return out


def passes(tests: list[str], log: Path) -> bool:
    """Whether the tests pass in a child of this process, which has MindSpore and pytest but nothing of kcp."""
    child = os.fork()
    if child == 0:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        try:
            os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "fast", *tests]))
        finally:
            os._exit(70)
    end = time.monotonic() + LIMIT
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)
    return ended[1] == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mutants", type=int, default=1000, help="how many are tried")
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--modules", nargs="+", default=MODULES)
    parser.add_argument("--tests", nargs="+", default=TESTS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    tree, results = folder / "tree", folder / "results.jsonl"
    if not tree.exists():
        subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
        shutil.copy(ROOT / NATIVE, tree / NATIVE)
    if not (folder / "coverage").exists():
        measure(folder, options.modules, options.tests)
    os.chdir(tree)
    subprocess.run(["git", "checkout", "-q", "--", "kcp"], check=True)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    import hypothesis  # noqa: F401
    import mindspore  # noqa: F401
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator

    lines, seconds = reached(folder)
    if not passes(sorted(seconds, key=seconds.get)[:200], folder / "log"):
        sys.exit(f"tests fail without a mutant: {folder / 'log'}")
    done = {tuple(json.loads(line)["mutant"]) for line in results.read_text().splitlines()} if results.exists() else set()
    every = mutants(tree, options.modules, options.seed)
    for mutation in every[: options.mutants]:
        name, operator = str(mutation.module_path), mutation.operator_name
        if (name, operator, mutation.occurrence) in done:
            continue
        with use_mutation(Path(name), get_operator(operator)(), mutation.occurrence) as (before, after):
            try:
                ast.parse(after)
                tests = chosen(lines.get(name, {}).get(mutation.start_pos[0], set()), seconds)
                verdict = ("survived" if passes(tests, folder / "log") else "killed") if tests else "not reached"
            except SyntaxError:
                verdict = "no program"
        changed = [line.strip() for line, old in zip(after.splitlines(), before.splitlines(), strict=False) if line != old]
        entry = {"mutant": [name, operator, mutation.occurrence], "verdict": verdict, "line": mutation.start_pos[0], "code": changed[:1]}
        with results.open("a") as file:
            file.write(json.dumps(entry) + "\n")
    entries = [json.loads(line) for line in results.read_text().splitlines()]
    for entry in entries:
        if entry["verdict"] in ("survived", "not reached"):
            print(f"{entry['mutant'][0]}:{entry['line']} {entry['verdict']}: {' '.join(entry['code'])}")
    print(f"{len(every)} mutants, {len(entries)} tried: {dict(Counter(entry['verdict'] for entry in entries))}")


if __name__ == "__main__":
    main()
