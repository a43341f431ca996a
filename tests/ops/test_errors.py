"""Wrong calls: each raises ValueError or TypeError that names the argument, what it got and what is allowed."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from kcp.ops import chunk_kda

B, T, HK, HV, K, V = 2, 8, 2, 4, 6, 5


class Late:
    """A Tensor that is made when a test asks for it: nothing runs on the device while tests are collected."""

    def __init__(self, make):
        self.make = make


def zeros(*shape: int, dtype=ms.float32) -> Late:
    return Late(lambda: Tensor(np.zeros(shape, np.float32)).astype(dtype))


def call(**changes):
    """The op on legal inputs (BSND, softplus gate) with some of them replaced."""
    arguments = {
        "q": zeros(B, T, HK, K), "k": zeros(B, T, HK, K), "v": zeros(B, T, HV, V), "g": zeros(B, T, HV, K),
        "beta": zeros(B, T, HV), "a_log": zeros(HV), "layout": "BSND",
    }  # fmt: skip
    arguments.update(changes)
    return chunk_kda(**{n: x.make() if isinstance(x, Late) else x for n, x in arguments.items()})


def packed(**changes):
    """The op on one row of T tokens with boundaries."""
    one_row = {
        "q": zeros(1, T, HK, K), "k": zeros(1, T, HK, K), "v": zeros(1, T, HV, V), "g": zeros(1, T, HV, K),
        "beta": zeros(1, T, HV),
    }  # fmt: skip
    return call(**{**one_row, **changes})


def of(*values, dtype=np.int32) -> Late:
    return Late(lambda: Tensor(np.asarray(values, dtype)))


SAFE = {"safe_gate": True}

# id: (call, changes, exception, words that the message holds)
WRONG = {
    "layout_unknown": (call, {"layout": "BHSD"}, ValueError, ["layout", "BHSD", "BNSD", "BSND", "NTD", "TND"]),
    "layout_number": (call, {"layout": 4}, (TypeError, ValueError), ["layout", "4", "BSND"]),
    "layout_packed_for_batch": (call, {"layout": "TND"}, ValueError, ["q", "(2, 8, 2, 6)", "[T, Hk, K]"]),
    "chunk_size_48": (call, {"chunk_size": 48}, ValueError, ["chunk_size", "48", "16", "32", "64"]),
    "chunk_size_0": (call, {"chunk_size": 0}, ValueError, ["chunk_size", "0", "16", "32", "64"]),
    "chunk_size_text": (call, {"chunk_size": "64"}, TypeError, ["chunk_size", "str", "16", "32", "64"]),
    "chunk_size_bool": (call, {"chunk_size": True}, TypeError, ["chunk_size", "bool", "16", "32", "64"]),
    "unknown_keyword": (call, {"use_beta_sigmoid": True}, TypeError, ["use_beta_sigmoid"]),
    "q_none": (call, {"q": None}, TypeError, ["q", "None", "Tensor"]),
    "q_numpy": (call, {"q": np.zeros((B, T, HK, K), np.float32)}, TypeError, ["q", "ndarray", "Tensor"]),
    "q_rank_3": (call, {"q": zeros(T, HK, K)}, ValueError, ["q", "(8, 2, 6)", "[B, T, Hk, K]"]),
    "q_integers": (call, {"q": zeros(B, T, HK, K, dtype=ms.int32)}, TypeError, ["q", "Int32", "float32"]),
    "q_float64": (call, {"q": zeros(B, T, HK, K, dtype=ms.float64)}, TypeError, ["q", "Float64", "float32"]),
    "q_bfloat16_k_float32": (call, {"q": zeros(B, T, HK, K, dtype=ms.bfloat16)}, TypeError, ["k", "BFloat16"]),
    "k_tokens": (call, {"k": zeros(B, T + 1, HK, K)}, ValueError, ["k", "(2, 9, 2, 6)", "T=8"]),
    "k_width": (call, {"k": zeros(B, T, HK, K + 1)}, ValueError, ["k", "(2, 8, 2, 7)", "K=6"]),
    "k_heads": (call, {"k": zeros(B, T, HV, K)}, ValueError, ["k", "(2, 8, 4, 6)", "Hk=2"]),
    "v_tokens": (call, {"v": zeros(B, T - 1, HV, V)}, ValueError, ["v", "(2, 7, 4, 5)", "T=8"]),
    "v_heads_not_a_multiple": (call, {"v": zeros(B, T, 3, V)}, ValueError, ["v", "3", "2", "multiple"]),
    "v_fewer_heads": (call, {"v": zeros(B, T, 1, V)}, ValueError, ["v", "1", "2", "multiple"]),
    "g_per_head": (call, {"g": zeros(B, T, HV)}, ValueError, ["g", "(2, 8, 4)", "K=6"]),
    "g_width": (call, {"g": zeros(B, T, HV, V)}, ValueError, ["g", "(2, 8, 4, 5)", "K=6"]),
    "g_heads": (call, {"g": zeros(B, T, HK, K)}, ValueError, ["g", "(2, 8, 2, 6)", "Hv=4"]),
    "beta_rank": (call, {"beta": zeros(B, T, HV, 1)}, ValueError, ["beta", "(2, 8, 4, 1)", "Hv=4]"]),
    "beta_heads": (call, {"beta": zeros(B, T, HK)}, ValueError, ["beta", "(2, 8, 2)", "Hv=4"]),
    "k_dim_over_256": (
        call, {"q": zeros(B, T, HK, 257), "k": zeros(B, T, HK, 257), "g": zeros(B, T, HV, 257)}, ValueError,
        ["257", "256"],
    ),
    "v_dim_over_256": (call, {"v": zeros(B, T, HV, 300)}, ValueError, ["v", "300", "256"]),
    "a_log_length": (call, {"a_log": zeros(HV + 1)}, ValueError, ["a_log", "(5,)", "Hv=4"]),
    "a_log_of_key_heads": (call, {"a_log": zeros(HK)}, ValueError, ["a_log", "(2,)", "Hv=4"]),
    "a_log_bfloat16": (call, {"a_log": zeros(HV, dtype=ms.bfloat16)}, TypeError, ["a_log", "BFloat16", "float32"]),
    "a_log_missing_for_softplus": (call, {"a_log": None}, ValueError, ["a_log", "None", "safe_gate"]),
    "dt_bias_length": (call, {"dt_bias": zeros(HV * K + 1)}, ValueError, ["dt_bias", "(25,)", "24"]),
    "dt_bias_per_head": (call, {"dt_bias": zeros(HV)}, ValueError, ["dt_bias", "(4,)", "24"]),
    "dt_bias_transposed": (call, {"dt_bias": zeros(K, HV)}, ValueError, ["dt_bias", "(6, 4)", "Hv=4", "K=6"]),
    "dt_bias_float16": (call, {"dt_bias": zeros(HV * K, dtype=ms.float16)}, TypeError, ["dt_bias", "Float16"]),
    "lower_bound_zero": (call, {**SAFE, "lower_bound": 0.0}, ValueError, ["lower_bound", "0", "-5"]),
    "lower_bound_positive": (call, {**SAFE, "lower_bound": 1.0}, ValueError, ["lower_bound", "1.0", "-5"]),
    "lower_bound_below": (call, {**SAFE, "lower_bound": -6.0}, ValueError, ["lower_bound", "-6.0", "-5"]),
    "lower_bound_nan": (call, {**SAFE, "lower_bound": float("nan")}, ValueError, ["lower_bound", "nan", "finite"]),
    "lower_bound_text": (call, {**SAFE, "lower_bound": "-5"}, TypeError, ["lower_bound", "str"]),
    "neg_eigval_without_sigmoid": (
        call, {"allow_neg_eigval": True}, ValueError, ["allow_neg_eigval", "use_beta_sigmoid_in_kernel"],
    ),
    "flag_text": (call, {"state_v_first": "yes"}, TypeError, ["state_v_first", "yes", "True", "False"]),
    "flag_none": (call, {"disable_recompute": None}, TypeError, ["disable_recompute", "None", "True", "False"]),
    "epsilon_negative": (call, {"epsilon": -1e-6}, ValueError, ["epsilon", "-1e-06"]),
    "epsilon_nan": (call, {"epsilon": float("nan")}, ValueError, ["epsilon", "nan"]),
    "scale_text": (call, {"scale": "1"}, TypeError, ["scale", "str"]),
    "scale_infinite": (call, {"scale": float("inf")}, ValueError, ["scale", "inf"]),
    "state_v_first_shape": (
        call, {"initial_state": zeros(B, HV, V, K)}, ValueError,
        ["initial_state", "(2, 4, 5, 6)", "K=6, V=5"],
    ),
    "state_k_first_shape": (
        call, {"initial_state": zeros(B, HV, K, V), "state_v_first": True}, ValueError,
        ["initial_state", "(2, 4, 6, 5)", "V=5, K=6"],
    ),
    "state_rank": (
        call, {"initial_state": zeros(HV, K, V)}, ValueError,
        ["initial_state", "(4, 6, 5)", "N=2, Hv=4, K=6, V=5"],
    ),
    "state_batch": (
        call, {"initial_state": zeros(1, HV, K, V)}, ValueError,
        ["initial_state", "(1, 4, 6, 5)", "N=2"],
    ),
    "state_bfloat16": (
        call, {"initial_state": zeros(B, HV, K, V, dtype=ms.bfloat16)}, TypeError,
        ["initial_state", "BFloat16", "float32"],
    ),
    "state_sequences": (
        packed, {"cu_seqlens": [0, 3, 8], "initial_state": zeros(3, HV, K, V)}, ValueError,
        ["initial_state", "(3, 4, 6, 5)", "N=2"],
    ),
    "cu_falls": (packed, {"cu_seqlens": [0, 6, 4, 8]}, ValueError, ["cu_seqlens", "6", "4", "decreas"]),
    "cu_starts_late": (packed, {"cu_seqlens": [1, 8]}, ValueError, ["cu_seqlens", "1", "0"]),
    "cu_ends_early": (packed, {"cu_seqlens": [0, 7]}, ValueError, ["cu_seqlens", "7", "8"]),
    "cu_ends_late": (packed, {"cu_seqlens": [0, 9]}, ValueError, ["cu_seqlens", "9", "8"]),
    "cu_negative": (packed, {"cu_seqlens": [0, -1, 8]}, ValueError, ["cu_seqlens", "-1"]),
    "cu_empty": (packed, {"cu_seqlens": []}, ValueError, ["cu_seqlens", "at least"]),
    "cu_single": (packed, {"cu_seqlens": [0]}, ValueError, ["cu_seqlens", "at least"]),
    "cu_floats": (packed, {"cu_seqlens": [0, 8.0]}, TypeError, ["cu_seqlens", "8.0", "int"]),
    "cu_text": (packed, {"cu_seqlens": "0,8"}, TypeError, ["cu_seqlens", "str"]),
    "cu_batch": (call, {"cu_seqlens": [0, 8]}, ValueError, ["cu_seqlens", "2", "1"]),
    "cu_tensor_int64": (
        packed, {"cu_seqlens": of(0, 8, dtype=np.int64)}, TypeError, ["cu_seqlens", "Int64", "int32"],
    ),
    "cu_tensor_rank": (packed, {"cu_seqlens": of([0, 8])}, ValueError, ["cu_seqlens", "(1, 2)"]),
    "cu_tensor_falls": (packed, {"cu_seqlens": of(0, 6, 4, 8)}, ValueError, ["cu_seqlens", "6", "4", "decreas"]),
    "cu_tensor_ends_early": (packed, {"cu_seqlens": of(0, 4, 7)}, ValueError, ["cu_seqlens", "7", "8"]),
    "cu_tensor_batch": (call, {"cu_seqlens": of(0, 8)}, ValueError, ["cu_seqlens", "2", "1"]),
    "chunk_indices_alone": (call, {"chunk_indices": [0, 0]}, ValueError, ["chunk_indices", "cu_seqlens"]),
    "chunk_indices_do_not_fit": (
        packed, {"cu_seqlens": [0, 3, 8], "chunk_indices": [0, 0, 0, 1]}, ValueError, ["chunk_indices", "cu_seqlens"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_call(case):
    function, changes, kind, words = WRONG[case]
    with pytest.raises(kind) as caught:
        function(**changes)
    message = str(caught.value)
    missing = [word for word in words if word.lower() not in message.lower()]
    assert not missing, f"{missing} not in: {message}"
    assert "\n" not in message.strip(), f"more than one line: {message}"


def test_there_are_at_least_forty():
    assert len(WRONG) >= 40


def test_the_legal_call_is_legal():
    """What the table changes one thing of is accepted as it stands."""
    assert call()[0].shape == (B, T, HV, V)
    assert packed(cu_seqlens=[0, 3, 8])[0].shape == (1, T, HV, V)
    assert call(**SAFE, a_log=None)[0].shape == (B, T, HV, V)


def test_no_tokens_are_refused():
    empty = {n: Late(lambda s=s: ms.ops.zeros(s)) for n, s in {
        "q": (B, 0, HK, K), "k": (B, 0, HK, K), "v": (B, 0, HV, V), "g": (B, 0, HV, K), "beta": (B, 0, HV),
    }.items()}  # fmt: skip
    with pytest.raises(ValueError, match=r"q.*0"):
        call(**empty)
