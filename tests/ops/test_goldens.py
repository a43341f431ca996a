"""Every golden case of FLA's Triton kernels: float32 against the float64 truth, bfloat16 against FLA's own error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from golden_cases import OP_CASES, golden_case
from op_cases import check, errors, golden_problem, run

pytestmark = pytest.mark.usefixtures("backend")


def stored_truth(problem, truth: dict) -> dict:
    """The stored truth in the shapes of the op, with the absolute terms of a_log's gradient from the oracle."""
    exact = problem.truth()
    want = {n: x.reshape(exact[n].shape) for n, x in truth.items()}
    return want | {n: exact[n] for n in ("a_log_terms",) if n in exact}


@pytest.mark.parametrize("case", OP_CASES)
def test_float32_inputs(case):
    problem, truth, _ = golden_problem(case)
    problem = replace(problem, dtype="float32")
    check(run(problem), stored_truth(problem, truth))


@pytest.mark.ci
@pytest.mark.parametrize("case", OP_CASES)
def test_bfloat16_inputs_against_the_peer(case):
    """At most 0.6 of FLA's error on every tensor; what FLA holds at zero is held to 1e-6."""
    problem, truth, peer = golden_problem(case)
    gate_dtype = "bfloat16" if "g" in golden_case("fla_kda_seed1", case)[0]["bf16_as_uint16"] else "float32"
    found = errors(run(problem, gate_dtype=gate_dtype), stored_truth(problem, truth))
    bad = {}
    for name, error in found.items():
        limit = 0.6 * peer[name] if peer.get(name) else 1e-5
        if name == "a_log":
            limit = 1e-5
        if not error <= limit:
            bad[name] = f"{error:.3g} > {limit:.3g}"
    assert not bad, bad


def test_the_cases_cover_the_contract():
    """The list above names what the golden file holds, so that a case added there is not left out here."""
    table = {case: golden_problem(case)[0] for case in OP_CASES if case not in ("long_T1024",)}
    assert {p.options.get("safe_gate", False) for p in table.values()} == {False, True}
    assert {p.options["use_gate_in_kernel"] for p in table.values()} == {False, True}
    assert any(np.any(p.inputs.get("initial_state", 0)) for p in table.values())
