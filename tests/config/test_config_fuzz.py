"""Random changes of a valid file: it is read, or refused by ConfigError alone, in lines that name a key or the file."""

import copy
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from kcp.config import ConfigError, load_run_config

CONFIGS = Path(__file__).parents[2] / "configs"
BASES = [yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()) for name in ("tiny_cp2", "tiny_hybrid_cp2", "base_400m_npu_cp8")]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 600),
    st.sampled_from([10**400, -(2**63), 2**31, 0, -1]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["1e-3", "auto", "none", "ulysses", "train", "float32", "nan", ".", ""]),
    st.dates(),
    st.binary(max_size=3),
)
KEYS = st.one_of(st.text(max_size=6), st.integers(-2, 2), st.booleans(), st.none(), st.floats(allow_nan=False))
VALUES = st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x, max_size=3), max_leaves=5)


def places(tree, path=()):
    """Paths of all keys below a tree."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in children:
        yield (*path, key)
        yield from places(value, (*path, key))


@st.composite
def changed(draw):
    content = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 3))):
        *parents, key = draw(st.sampled_from(list(places(content)) or [("x",)]))
        inner = content
        for name in parents:
            inner = inner[name]
        how = draw(st.sampled_from(["value", "value", "drop", "add", "rename"]))
        if how == "value" or isinstance(inner, list):
            inner[key] = draw(VALUES)
        elif how == "add":
            inner[draw(KEYS)] = draw(VALUES)
        else:
            value = inner.pop(key)
            if how == "rename":
                inner[draw(KEYS)] = value
    return content


def read(content, folder):
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    try:
        load_run_config(path)
    except ConfigError as error:
        assert error.problems
        for line in error.problems:
            assert "\n" not in line
            assert ": " in line or " = " in line, line


EXAMPLES = 60 if not os.environ.get("CI") else 300


@seed(8)
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(content=changed())
def test_changed_files_are_read_or_refused(content, tmp_path_factory):
    read(content, tmp_path_factory.getbasetemp())


@pytest.mark.once
@seed(80)
@settings(max_examples=10_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(content=changed())
def test_many_changed_files_are_read_or_refused(content, tmp_path_factory):
    read(content, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_integers_beyond_every_float(value, tmp_path):
    """Where a number is allowed, an integer that no float holds is refused with its key."""
    content = copy.deepcopy(BASES[0])
    content["optimizer"]["weight_decay"] = value
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"optimizer\.weight_decay = .*a number"):
        load_run_config(path)


def test_a_key_with_line_breaks_gives_one_line(tmp_path):
    content = copy.deepcopy(BASES[0])
    content["model"]["model_config"]["kda_\nchunk"] = 1
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as error:
        load_run_config(path)
    assert [line for line in error.value.problems if line.startswith("model.model_config.kda_ chunk = 1: unknown key")]
    assert not [line for line in error.value.problems if "\n" in line]
