"""Random shapes, layouts, packings, gates and types against the oracle.

25 examples by default, 300 in CI, 10,000 once; the examples of a set are the same in every run.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from op_cases import check, make_problem, run

pytestmark = pytest.mark.usefixtures("backend")

SEED = 20260
HEALTH = list(HealthCheck)


@st.composite
def problems(draw):
    """A problem, and how to run it."""
    gate = draw(st.sampled_from(["lower_bound", "softplus", "none"]))
    sigmoid = draw(st.booleans())
    K, V = draw(st.integers(2, 40)), draw(st.integers(1, 40))
    Hk = draw(st.integers(1, 3))
    packed = draw(st.booleans())
    arguments = {
        "seed": draw(st.integers(0, 2**31)),
        "Hk": Hk,
        "Hv": Hk * draw(st.integers(1, 3)),
        "K": K,
        "V": V,
        "gate": gate,
        "a_log": gate != "lower_bound" or draw(st.booleans()),
        "dt_bias": draw(st.booleans()),
        "l2": draw(st.booleans()),
        "sigmoid": sigmoid,
        "shift": draw(st.sampled_from([-6.0, -2.0, 0.0, 3.0])),
        "dtype": draw(st.sampled_from(["float32", "float32", "float16", "bfloat16"])),
        "initial_state": draw(st.booleans()),
        "d_final": draw(st.booleans()),
        "state_v_first": draw(st.booleans()),
        "allow_neg_eigval": sigmoid and draw(st.booleans()),
        "chunk_size": draw(st.sampled_from([16, 32, 64])),
    }
    if gate == "lower_bound":
        arguments["lower_bound"] = draw(st.sampled_from([-5.0, -2.5, -0.1]))
    layouts = ["BSND", "BNSD", "TND", "NTD"]
    if packed:
        lens = draw(st.lists(st.integers(0, 80), min_size=1, max_size=5).filter(lambda x: sum(x) > 0))
        arguments["lens"] = tuple(lens)
    else:
        arguments["B"] = draw(st.integers(1, 3))
        arguments["T"] = draw(st.integers(1, 150))
        if arguments["B"] > 1:
            layouts = ["BSND", "BNSD"]
    arguments["d_out"] = not arguments["d_final"] or draw(st.booleans())
    how = {
        "layout": draw(st.sampled_from(layouts)),
        "cu_form": draw(st.sampled_from(["host", "tensor"])) if packed else "host",
        "disable_recompute": draw(st.booleans()),
        "use_exp2": draw(st.booleans()),
    }
    return arguments, how


def equals_the_oracle(drawn) -> None:
    arguments, how = drawn
    problem = make_problem(**arguments)
    entering = 0.0 if problem.d_final_state is None else float(np.linalg.norm(problem.d_final_state))
    check(run(problem, **how), problem.truth(), dtype=arguments["dtype"], entering=entering)


def property_test(examples: int):
    """``equals_the_oracle`` on so many examples."""

    @seed(SEED)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=HEALTH, print_blob=False)
    @given(problems())
    def test(drawn):
        equals_the_oracle(drawn)

    return test


def test_25_examples():
    property_test(25)()


@pytest.mark.ci
def test_300_examples():
    property_test(300)()


@pytest.mark.once
def test_10000_examples():
    property_test(10_000)()
