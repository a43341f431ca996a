"""KdaCore over 8, 16 and 64 ranks in lockstep against the float64 recurrence: every strategy, dense and packed, the slowest decay."""

import itertools

import numpy as np
import pytest
from core_cases import STRATEGIES, CoreProblem, check, check_bfloat16, run_explicit

from kcp.layers import KdaCore
from kcp.ops import backends
from kcp.parallel import lockstep

CI = pytest.mark.ci


def problem(strategy: str, ranks: int, packed: bool, **fields) -> CoreProblem:
    """Unequal slices, with every sixth one empty at 16 and 64 ranks; packed: documents from 0 tokens to more than eight slices."""
    lengths = {8: (70, 64, 1, 90, 65, 33, 128, 61), 16: (23, 40, 16, 5, 31, 0, 17, 64) * 2, 64: (9, 16, 4, 13, 1, 0, 12, 10) * 8}[ranks]
    heads = ranks if strategy == "ulysses" else 2
    total = sum(lengths)
    documents = (3, total // 3, 0, 1, lengths[0], total // 2)
    rows = (0, *itertools.accumulate(documents), total) if packed else None
    batch = 1 if packed else 2
    sizes = {"num_heads": heads, "num_v_heads": heads if strategy == "ulysses" else 4, "batch": batch, "head_dim": 16, "v_head_dim": 12}
    return CoreProblem(lengths=lengths, strategy=strategy, cu_seqlens=rows, decay=0.01, seed=ranks, **{**sizes, **fields})


def run(case: CoreProblem) -> list[dict[str, np.ndarray]]:
    return lockstep.run(len(case.lengths), lambda group: run_explicit(case, group), case.lengths)


def require(backend: str) -> None:
    if backend not in backends.available():
        pytest.skip(f"the {backend} backend is not built here")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("strategy", "backend", "ranks", "packed"),
    [(name, "native", n, packed) for name in STRATEGIES for n in (8, 16) for packed in (False, True)]
    + [pytest.param(name, "native", 64, packed, marks=CI) for name in STRATEGIES for packed in (False, True)]
    + [pytest.param(name, "composite", 8, True, marks=CI) for name in STRATEGIES],
    ids=str,
)
def test_many_ranks_equal_one_device(strategy, backend, ranks, packed, record_property):
    require(backend)
    case = problem(strategy, ranks, packed)
    with backends.use(backend):
        found = check(case, run(case))
    record_property("worst", max((error, name) for name, error in found.items()))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("strategy", "backend", "packed"),
    [(name, "native", packed) for name in STRATEGIES for packed in (False, True)]
    + [pytest.param(name, "composite", False, marks=CI) for name in STRATEGIES],
    ids=str,
)
def test_bfloat16_inputs_lose_what_one_device_loses(strategy, backend, packed, record_property):
    require(backend)
    case = problem(strategy, 8, packed, dtype="bfloat16")
    with backends.use(backend):
        found = check_bfloat16(case, run(case))
    record_property("worst", max((error, name) for name, error in found.items()))


@pytest.mark.parametrize("ranks", [16, 64])
def test_ulysses_refuses_ranks_that_do_not_divide_the_heads(ranks):
    def body(group):
        KdaCore(problem("ulysses", 8, False).config(), group)

    with pytest.raises(ValueError, match=f"num_heads is 8; allowed under ulysses: a multiple of the group's size {ranks}"):
        lockstep.run(ranks, body)


def test_the_inputs_decay_as_slowly_as_they_should():
    """log decay in [-0.01, 0], write strengths up to 2: what is left of a state after 640 tokens is not small."""
    case = problem("state_scan", 64, False)
    x = case.arrays()
    decay = -5.0 / (1.0 + np.exp(-np.exp(x["a_log"].astype(np.float64))[:, None] * (x["g"] + x["dt_bias"])))
    assert -0.01001 < decay.min() < -0.009 and -1e-5 < decay.max() < 0.0
    assert 1.99 < (2.0 / (1.0 + np.exp(-x["beta"]))).max() <= 2.0
