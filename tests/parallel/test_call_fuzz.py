"""Random shapes, dtypes and boundaries through chunk_kda and KdaCore: a result of the right shape, or ValueError or TypeError."""

import os

import mindspore as ms
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from mindspore import Tensor

from kcp.layers import KdaCore, KdaCoreConfig
from kcp.ops import chunk_kda
from kcp.parallel import CpGroup

SETTINGS = settings(max_examples=200 if os.environ.get("CI") else 40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
MANY = settings(SETTINGS, max_examples=10_000)
SHAPES = {
    "q": (1, 12, 2, 4),
    "k": (1, 12, 2, 4),
    "v": (1, 12, 4, 3),
    "g": (1, 12, 4, 4),
    "beta": (1, 12, 4),
    "a_log": (4,),
    "dt_bias": (4, 4),
}
SIZES = st.one_of(st.integers(0, 13), st.just(257))
BOUNDARIES = st.one_of(
    st.none(),
    st.lists(st.integers(-2, 14), max_size=6),
    st.lists(st.integers(0, 12), max_size=4).map(lambda x: [0, *sorted(x), 12]),
    st.sampled_from([5, "0,12", 2.5, [0, 12.0], [0, True, 12], [[0, 12]], [[0, 5, 12], [0, 12]], (0, 2**40), {}, [None], ["0", 12]]),
)
KINDS = st.sampled_from(["list", "tuple", "int32", "int32", "int64", "float32", "bool", "numpy"])


@st.composite
def calls(draw):
    """Tensors of a call, at most two of them changed, and boundaries."""
    shapes, kinds = dict(SHAPES), dict.fromkeys(SHAPES, "float32")
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(list(shapes)))
        shape = list(shapes[name])
        how = draw(st.sampled_from(["size", "drop", "axis", "dtype", "none"]))
        if how == "dtype":
            kinds[name] = draw(st.sampled_from(["float16", "bfloat16", "int32", "bool_", "float64"]))
        elif how == "none":
            kinds[name] = None
        elif how == "axis":
            shape.insert(draw(st.integers(0, len(shape))), 1)
        elif shape and how == "drop":
            del shape[draw(st.integers(0, len(shape) - 1))]
        elif shape:
            shape[draw(st.integers(0, len(shape) - 1))] = draw(SIZES)
        shapes[name] = tuple(shape)
    tensors = {n: None if kinds[n] is None else ms.ops.zeros(shapes[n], getattr(ms, kinds[n])) for n in shapes}
    boundaries, kind = draw(BOUNDARIES), draw(KINDS)
    if isinstance(boundaries, list) and all(type(x) is int for x in boundaries) and boundaries:
        if kind == "numpy":
            boundaries = np.array(boundaries)
        elif kind != "list":
            boundaries = tuple(boundaries) if kind == "tuple" else Tensor(np.array(boundaries).astype(kind))
    return tensors, boundaries


def op_serves_or_refuses(call):
    tensors, boundaries = call
    try:
        out, _ = chunk_kda(**tensors, cu_seqlens=boundaries, layout="BSND", safe_gate=True, use_gate_in_kernel=True)
    except (ValueError, TypeError) as error:
        assert str(error)
        return
    assert out.shape == tensors["v"].shape
    assert not np.any(out.astype(ms.float32).asnumpy())


def core_serves_or_refuses(call):
    tensors, boundaries = call
    core = KdaCore(KdaCoreConfig(2, 4, head_dim=4, v_head_dim=3, safe_gate=True))
    try:
        out, _ = core(*tensors.values(), None, boundaries)
    except (ValueError, TypeError) as error:
        assert str(error)
        return
    assert out.shape == tensors["v"].shape
    assert not np.any(out.astype(ms.float32).asnumpy())


@seed(81)
@SETTINGS
@given(call=calls())
def test_chunk_kda_serves_or_refuses(call):
    op_serves_or_refuses(call)


@seed(82)
@SETTINGS
@given(call=calls())
def test_the_core_serves_or_refuses(call):
    core_serves_or_refuses(call)


@pytest.mark.once
@pytest.mark.parametrize("check", [op_serves_or_refuses, core_serves_or_refuses])
def test_many_calls_are_served_or_refused(check):
    seed(84)(MANY(given(call=calls())(lambda call: check(call))))()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_core_without_a_tensor_names_it(ranks):
    core = KdaCore(KdaCoreConfig(2, 4, head_dim=4, v_head_dim=3, strategy="none" if ranks == 1 else "state_scan"), CpGroup(0, ranks))
    tensors = [ms.ops.zeros(shape) for shape in SHAPES.values()]
    for at, name in enumerate(("query", "key", "value", "gate", "beta")):
        with pytest.raises(TypeError, match=f"^{name} "):
            core(*tensors[:at], None, *tensors[at + 1 :])
    with pytest.raises(ValueError, match=r"^k has shape \(1, 12, 2, 5\)"):
        core(tensors[0], ms.ops.zeros((1, 12, 2, 5)), *tensors[2:], None, [0, 12 * ranks])


NUMBERS = st.one_of(st.integers(-2, 5), st.none(), st.booleans(), st.floats(), st.sampled_from([16, 64, 257, 10**400, "4", (), b"1"]))
FIELDS = [
    "num_heads", "num_v_heads", "head_dim", "v_head_dim", "scale", "lower_bound", "epsilon", "chunk_size", "keep_transitions", "strategy",
    "ptp_head_groups", "hybrid_ulysses_degree", "plan_tokens", "plan_packed", "reduce_replicated_grads", "safe_gate", "state_v_first",
]  # fmt: skip


@seed(83)
@settings(SETTINGS, max_examples=500)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), NUMBERS, max_size=3),
    strategy=st.sampled_from(["none", "auto", "ulysses", "state_scan", "ptp_chain", "ptp_tree", "hybrid"]),
    ranks=st.integers(1, 5),
)
def test_a_core_is_built_or_refused(changes, strategy, ranks):
    try:
        KdaCore(KdaCoreConfig(**{"num_heads": 4, "num_v_heads": 4, "head_dim": 8, "strategy": strategy, **changes}), CpGroup(0, ranks))
    except (ValueError, TypeError) as error:
        assert str(error)
