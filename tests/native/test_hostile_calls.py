"""Calls whose tensors do not fit together are refused by a code and a reason, before anything is read or written beyond a tensor."""

import numpy as np
import pytest
from native_driver import Options


def zeros(*shape):
    return np.zeros(shape, np.float32)


def options(present=0, gate=1, begin=0):
    packed = Options().pack(())
    packed[[6, 1, 7]] = present, gate, begin
    return packed


def forward(out=(1, 9, 4, 8), cu=None, gate=1, q=(1, 9, 4, 8)):
    tokens, one = (1, 9, 4, 8), zeros(1)
    cu = np.zeros(1, np.int32) if cu is None else cu
    inputs = [zeros(*q), zeros(*q), zeros(*tokens), zeros(*tokens), zeros(1, 9, 4)]
    return [options(0 if cu.size == 1 else 8, gate), *inputs, one, one, one, cu, zeros(*out), one, one]


def softmax(into, begin=2):
    scores = zeros(1, 2, 3, 5)
    return [options(4, begin=begin), scores, np.array(into, np.int32), zeros(1, 2, 3, 5)]


CALLS = {
    "head-major out": ("kcp_forward", forward(out=(1, 4, 9, 8)), "tensor 10 has 9 heads of 4"),
    "short out": ("kcp_forward", forward(out=(1, 8, 4, 8)), "tensor 10 must hold B=1, T=9, 4 heads and a width of 8"),
    "scalar q": ("kcp_forward", forward(q=()), "tensor 1 has rank 0"),
    "unknown gate": ("kcp_forward", forward(gate=7), "gate 7"),
    "boundaries without numbers": ("kcp_forward", forward(cu=np.zeros((5, 0), np.int32)), "at least 2 numbers"),
    "missing tensors": ("kcp_grouped", [options()], "tensor 1 is missing"),
    "rows of nothing": ("kcp_norm", [options(), zeros(3, 0), zeros(0), zeros(1), zeros(3, 0)], "rows of no numbers"),
    "before the first key": ("kcp_softmax", softmax((0, 4, 0)), "a token is 4 tokens into its document; 0 to 3"),
    "behind the last key": ("kcp_softmax", softmax((0, 0, -1)), "a token is -1 tokens into its document"),
    "rows of no logits": ("kcp_cross_entropy", [options(), zeros(3, 0), np.zeros(3, np.int32), zeros(3)], "at least one column"),
    "labels of half the rows": ("kcp_cross_entropy", [options(), zeros(4, 5), np.zeros(2, np.int32), zeros(4)], "2 labels for 4 rows"),
    "labels in float32": ("kcp_cross_entropy_backward", [options(), zeros(4, 5), zeros(4), zeros(4), zeros(4, 5)], "must be int32"),
    "far head": ("kcp_softmax", softmax((0, 0, 0), begin=2**63 - 1), "of 5 keys"),
    "half a batch of documents": (
        "kcp_conv",
        [options(4), zeros(3, 4, 2), zeros(3, 1, 2), zeros(2, 1, 2), zeros(1), np.zeros(8, np.int32), zeros(3, 4, 2)],
        "tensor 5 holds 8 tokens; 4 or 12",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused_with_a_reason(native, name, capfd):
    entry, arrays, reason = CALLS[name]
    before = [a.copy() for a in arrays]
    assert native.call(entry, arrays) == 1
    assert reason in capfd.readouterr().err
    for a, b in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(a, b)
