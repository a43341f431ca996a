"""Wrong calls of the explicit stages: one line each that names the argument, what it got and what is allowed."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor

from kcp import ops as kcp_ops

B, T, HK, HV, K, V, C = 1, 37, 1, 2, 8, 12, 16


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


SIZES = {"B": B, "T": T, "Hk": HK, "Hv": HV, "K": K, "V": V, "C": C, "Nc": 3, "HvK": HV * K}
INPUTS = {
    "pre_process_fwd": "k=B,Hv,T,K w=B,Hv,T,K u=B,Hv,T,V gk=B,Hv,T,K",
    "fwd_h": "k=B,Hv,T,K w=B,Hv,T,K u=B,Hv,T,V gk=B,Hv,T,K initial_state=B,Hv,K,V",
    "fwd_finalize": "qg_scaled=B,Hv,T,K aqk=B,Hv,T,C v_new=B,Hv,T,V h=B,Nc,Hv,K,V",
    "bwd_prepare": "aqk=B,Hv,T,C v_new=B,Hv,T,V d_o=B,Hv,T,V h=B,Nc,Hv,K,V",
    "pre_process_bwd": "q=B,Hv,T,K k=B,Hv,T,K w=B,Hv,T,K d_o=B,Hv,T,V dv=B,Hv,T,V gk=B,Hv,T,K",
    "bwd_dhu": "q=B,Hv,T,K k=B,Hv,T,K w=B,Hv,T,K d_o=B,Hv,T,V dv=B,Hv,T,V gk=B,Hv,T,K h0=B,Hv,K,V dht=B,Hv,K,V",
    "bwd_finalize": "q=B,Hk,T,K k=B,Hk,T,K v=B,Hv,T,V gk=B,Hv,T,K raw_g=B,Hv,T,K beta=B,Hv,T a_log=Hv dt_bias=HvK akk=B,Hv,T,C "
    "v_new=B,Hv,T,V h=B,Nc,Hv,K,V dh=B,Nc,Hv,K,V dv_scan=B,Hv,T,V d_aqk=B,Hv,T,C dq_raw=B,Hv,T,K q_rstd=B,Hk,T k_rstd=B,Hk,T",
}


def call(stage: str, **changes):
    """A stage on zeros of legal shapes with some arguments replaced (arrays become Tensors)."""
    arguments = {} if stage == "fwd_finalize" else {"chunk_size": C}
    for item in INPUTS[stage].split():
        name, axes = item.split("=")
        arguments[name] = zeros(*(SIZES[axis] for axis in axes.split(",")))
    arguments.update(changes)
    given = {n: Tensor(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
    return getattr(kcp_ops, f"chunk_kda_{stage}")(**given)


@pytest.mark.parametrize("stage", INPUTS)
def test_the_legal_call_is_legal(stage):
    call(stage)


OPTIONAL = {"initial_state", "h0", "dht", "a_log", "dt_bias", "q_rstd", "k_rstd"}
NAMES = [(stage, item.split("=")[0]) for stage, items in INPUTS.items() for item in items.split()]


@pytest.mark.parametrize("stage, name", NAMES)
@pytest.mark.parametrize("value", [None, [1.0]])
def test_what_is_no_tensor(stage, name, value):
    if value is None and name in OPTIONAL:
        return
    with pytest.raises(TypeError, match=rf"^{name} is not a Tensor but {type(value).__name__}; allowed: a Tensor"):
        call(stage, **{name: value})


@pytest.mark.parametrize("stage, name", NAMES)
def test_wrong_rank(stage, name):
    with pytest.raises(ValueError, match=rf"^{name} has shape \(7, 7, 7, 7, 7, 7\).*allowed: \["):
        call(stage, **{name: zeros(7, 7, 7, 7, 7, 7)})


@pytest.mark.parametrize("stage, name", [(s, n) for s, n in NAMES if n not in ("k", "q", "qg_scaled", "aqk", "v", "v_new")])
def test_wrong_dtype(stage, name):
    shape = next(item.split("=")[1].split(",") for item in INPUTS[stage].split() if item.startswith(name + "="))
    with pytest.raises(TypeError, match=rf"^{name} has dtype Int32; allowed: Float32"):
        call(stage, **{name: np.zeros([SIZES[axis] for axis in shape], np.int32)})


# id: (stage, changes, exception, words that the message holds)
WRONG = {
    "chunk_size_of_other_caches": ("bwd_finalize", {"chunk_size": 32}, ValueError, ["akk", "(1, 2, 37, 16)", "C=32"]),
    "default_chunk_size": ("bwd_prepare", {"chunk_size": 64}, ValueError, ["aqk", "(1, 2, 37, 16)", "C=64"]),
    "width_that_is_no_chunk_size": ("fwd_finalize", {"aqk": zeros(B, HV, T, 20)}, ValueError, ["aqk", "C=20", "16, 32, 64"]),
    "chunk_size_48": ("fwd_h", {"chunk_size": 48}, ValueError, ["chunk_size", "48", "16, 32, 64"]),
    "chunk_size_text": ("fwd_h", {"chunk_size": "16"}, TypeError, ["chunk_size", "str", "16, 32"]),
    "states_of_too_many_chunks": ("fwd_finalize", {"h": zeros(B, 5, HV, K, V)}, ValueError, ["h", "Nc=5", "allowed: 3"]),
    "states_of_too_few_chunks": ("bwd_prepare", {"h": zeros(B, 1, HV, K, V)}, ValueError, ["h", "Nc=1", "allowed: 3"]),
    "chunks_of_a_pack": ("fwd_finalize", {"cu_seqlens": [0, 20, 37]}, ValueError, ["h", "Nc=3", "allowed: 4"]),
    "dh_beside_h": ("bwd_finalize", {"dh": zeros(B, 2, HV, K, V)}, ValueError, ["dh", "(1, 2, 2, 8, 12)", "Nc=3"]),
    "dt_bias_length": ("bwd_finalize", {"dt_bias": zeros(2 * HV * K)}, ValueError, ["dt_bias", "(32,)", "Hv*K=16"]),
    "dt_bias_transposed": ("bwd_finalize", {"dt_bias": zeros(K, HV)}, ValueError, ["dt_bias", "(8, 2)", "Hv=2, K=8"]),
    "one_rstd": ("bwd_finalize", {"q_rstd": None}, ValueError, ["q_rstd", "k_rstd", "None"]),
    "state_count": ("fwd_h", {"initial_state": zeros(2, HV, K, V)}, ValueError, ["initial_state", "(2, 2, 8, 12)", "N=1"]),
    "state_count_of_a_pack": ("fwd_h", {"cu_seqlens": [0, 20, 37]}, ValueError, ["initial_state", "(1, 2, 8, 12)", "N=2"]),
    "state_v_first": ("fwd_h", {"state_v_first": True}, ValueError, ["initial_state", "(1, 2, 8, 12)", "V=12, K=8"]),
    "h0_shape": ("bwd_dhu", {"h0": zeros(3)}, ValueError, ["h0", "(3,)", "N=1, Hv=2, K=8, V=12"]),
    "dht_shape": ("bwd_dhu", {"dht": zeros(B, HV, V, K)}, ValueError, ["dht", "(1, 2, 12, 8)", "K=8, V=12"]),
    "layout_of_d_o": ("bwd_prepare", {"layout": "BSND"}, ValueError, ["d_o", "(1, 2, 37, 12)", "B=1, T=37, Hv=2, V=12"]),
    "layout_unknown": ("fwd_finalize", {"output_layout": "BHSD"}, ValueError, ["output_layout", "BHSD", "BSND"]),
    "packed_layout_of_a_batch": (
        "fwd_finalize",
        {"qg_scaled": zeros(2, HV, T, K), "aqk": zeros(2, HV, T, C), "v_new": zeros(2, HV, T, V), "h": zeros(2, 3, HV, K, V),
         "output_layout": "TND"},
        ValueError, ["output_layout", "TND", "B=2", "BSND"],
    ),
    "boundaries_end_early": ("pre_process_fwd", {"cu_seqlens": [0, 30]}, ValueError, ["cu_seqlens", "30", "37"]),
    "boundary_tensor_ends_early": ("pre_process_bwd", {"cu_seqlens": np.array([0, 30], np.int32)}, ValueError, ["cu_seqlens", "30", "37"]),
    "boundary_tensor_rank": ("pre_process_fwd", {"cu_seqlens": np.array([[0, 37]], np.int32)}, ValueError, ["cu_seqlens", "(1, 2)"]),
    "heads": ("bwd_finalize", {"q": zeros(B, 3, T, K), "k": zeros(B, 3, T, K), "q_rstd": None, "k_rstd": None}, ValueError,
              ["v", "Hv=2", "Hk=3", "multiple"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_call(case):
    stage, changes, kind, words = WRONG[case]
    with pytest.raises(kind) as caught:
        call(stage, **changes)
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
    assert "\n" not in message.strip(), message
