"""Packings of up to 10,240 tokens over 2 and 4 ranks in lockstep against the float64 recurrence; no document hears of another."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from core_cases import STRATEGIES, TOKEN_INPUTS, CoreProblem, check, run_explicit

from kcp.parallel import lockstep

OWN = "every document on its own rank"
PACKINGS = [
    (3000, 4000, 3240),
    (7000, 3240),
    (1000, 1500, 2000, 2500, 1240, 1000, 1000),
    (512, 1, 511),
    (257, 1, 253, 257, 1, 253, 2),
    (1,) * 64,
    (1024,),
    OWN,
]


@dataclass(frozen=True)
class Perturbed(CoreProblem):
    """Everything of document 0 is half as large again."""

    first: int = 0  # tokens of document 0; 0: nothing is changed

    def arrays(self):
        x = super().arrays()
        if self.first:
            for name in (*TOKEN_INPUTS, "d_out"):
                x[name][:, : self.first] *= 1.5
            x["initial_state"][0] *= 1.5
            x["d_final"][0] *= 1.5
        return x


def problem(documents, strategy: str, ranks: int, first: int = 0) -> Perturbed:
    if documents == OWN:
        documents = (1024 // ranks,) * ranks
    rows = tuple(int(n) for n in np.cumsum((0, *documents)))
    return Perturbed(
        lengths=(rows[-1] // ranks,) * ranks, strategy=strategy, batch=1, num_heads=4, num_v_heads=4, head_dim=16, v_head_dim=12,
        cu_seqlens=rows, decay=0.01, first=first and documents[0], options={"chunk_size": 64},
    )  # fmt: skip


@cache
def truth(documents, ranks: int) -> dict[str, np.ndarray]:
    return problem(documents, "none", ranks).truth()


def run(case: CoreProblem) -> list[dict[str, np.ndarray]]:
    return lockstep.run(len(case.lengths), lambda group: run_explicit(case, group), case.lengths)


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "documents",
    [pytest.param(p, marks=pytest.mark.ci if p != OWN and sum(p) > 2000 else ()) for p in PACKINGS],
    ids=lambda p: p if p == OWN else "-".join(map(str, p[:7])),
)
def test_every_strategy_serves_the_packing(documents, ranks, record_property):
    """Equal to the float64 recurrence; a change of document 0 leaves all that belongs to the others as it was, to the bit."""
    worst = (0.0, "")
    for strategy in STRATEGIES:
        base, other = problem(documents, strategy, ranks), problem(documents, strategy, ranks, first=1)
        results, changed = run(base), run(other)
        found = check(base, results, truth(documents, ranks))
        worst = max(worst, *((error, f"{strategy} {name}") for name, error in found.items()))
        for name in ("out", *TOKEN_INPUTS):
            one, two = (np.concatenate([r[name] for r in ranks_], 1) for ranks_ in (results, changed))
            np.testing.assert_array_equal(one[:, other.first :], two[:, other.first :], err_msg=f"{strategy} {name}")
            assert not np.array_equal(one, two)
        for r, c in zip(results, changed, strict=True):
            for name in ("final_state", "initial_state"):
                np.testing.assert_array_equal(r[name][1:], c[name][1:], err_msg=f"{strategy} {name}")
    record_property("worst", worst)
