"""Nothing of kcp reads a pickle or runs what a file says: by its source, and by what the interpreter reports while files are read."""

import ast
import collections
import pickle
import sys

import numpy as np
from golden_cases import ROOT
from hf_cases import TINY, random_tensors, write_checkpoint

from kcp import checkpoint
from kcp.hf import hf_to_kcp, kcp_to_hf, scan

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch", "pandas"}
CALLS = {"eval", "exec", "read_pickle", "unsafe_load", "full_load", "load_all", "unsafe_load_all", "full_load_all"}


def problems_of(tree: ast.AST) -> list[str]:
    """What in a source could unpickle or run a file's content."""
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"import {name}" for name in names if name.split(".")[0] in MODULES]
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function.split(".")[-1] in CALLS and not function.startswith("ast."):
                found.append(function)
            if function in ("yaml.load", "ms.load_checkpoint", "mindspore.load_checkpoint"):
                found.append(function)
            if any(keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False" for keyword in node.keywords):
                found.append(f"{function}(allow_pickle)")
            if any(keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False" for keyword in node.keywords):
                found.append(f"{function}(trust_remote_code)")
    return found


def test_no_source_could_unpickle_or_run_a_file():
    sources = sorted((ROOT / "kcp").rglob("*.py"))
    assert len(sources) > 80
    assert {str(path): found for path in sources if (found := problems_of(ast.parse(path.read_text())))} == {}


def test_the_search_finds_what_it_looks_for():
    code = "import torch.nn\nfrom pickle import loads\nnp.load(f, allow_pickle=True)\nyaml.load(f)\nyaml.unsafe_load(f)\neval(x)\n"
    code += "AutoTokenizer.from_pretrained(f, trust_remote_code=flag)\npd.read_pickle(f)\n"
    assert len(problems_of(ast.parse(code))) == 8
    assert np.load.__kwdefaults__ is None or np.load.__kwdefaults__.get("allow_pickle", False) is False


def test_reading_checkpoints_of_both_kinds_unpickles_nothing(tmp_path):
    """The interpreter reports every class and function that a pickle asks for (PEP 578)."""
    unpickled, listening = [], [True]
    sys.addaudithook(lambda event, given: unpickled.append(given) if listening[0] and event == "pickle.find_class" else None)
    try:
        pickle.loads(pickle.dumps(collections.OrderedDict()))
        assert unpickled, "the interpreter reports nothing: the test shows nothing"
        unpickled.clear()
        source = write_checkpoint(tmp_path / "hf", random_tensors(), 2)
        hf_to_kcp(source, tmp_path / "kcp")
        kcp_to_hf(tmp_path / "kcp", tmp_path / "back")
        weights = {name: tensor.read() for name, tensor in scan(tmp_path / "back").items()}
        state = {"step": 1, "samples": 1, "data": {}, "random": {}, "counters": {}, "run": {}}
        folder = checkpoint.write_checkpoint(tmp_path / "run", weights, {"n": np.int32([1])}, state, TINY, 0)
        assert len(dict(checkpoint.read_checkpoint(folder).read())) == len(weights) + 1
        assert unpickled == []
    finally:
        listening[0] = False
