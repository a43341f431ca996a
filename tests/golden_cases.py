"""Where the peers' golden results are, and how to read them.

The shared folder (``KCP_SHARED``, default ``../shared`` beside the repository) holds every case; ``tests/data`` is an
extract of it that comes with a clone. A case that is in neither is skipped, with the reason.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("KCP_SHARED") or ROOT.parent / "shared") / "goldens"
EXTRACT = Path(__file__).resolve().parent / "data"

OP_CASES = (
    "dense_T1", "dense_T63", "dense_T64", "dense_T65", "dense_B3_T130", "safe_T200", "safe_strong_T129", "safe_noA_T70",
    "raw_T150", "raw_strong_T100", "h0_ht_T100", "ht_only_T65", "gva_T96", "v2k_T80", "negeig_T90", "varlen_mix",
    "varlen_h0_ht", "long_T1024",
)  # fmt: skip
LAYER_CASES = ("layer_raw", "layer_safe", "layer_gva")


def golden_file(name: str) -> Path:
    """Path of a golden file, the shared one first; skips the test when there is none."""
    for folder in (SHARED, EXTRACT):
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"golden file {name} is neither in {SHARED} (set KCP_SHARED) nor in {EXTRACT}")


@functools.lru_cache(maxsize=8)
def _json(name: str):
    return json.loads(golden_file(name).read_text())


@functools.lru_cache(maxsize=8)
def _npz(name: str):
    return np.load(golden_file(name))


def to_float(x: np.ndarray) -> np.ndarray:
    """Float array of a stored one; uint16 holds the bits of bfloat16."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def golden_case(base: str, case: str) -> tuple[dict, dict[str, np.ndarray], dict[str, np.ndarray], dict[str, float]]:
    """One case of ``fla_kda_seed1`` or ``fla_kda_layer_seed1``.

    Args:
        base: Name of the golden file without its suffix.
        case: Name of the case.

    Returns:
        Its description, inputs and peer results, float64 truth (stored as float32), and the peer's relative error per
        tensor.
    """
    meta = _json(f"{base}.json")
    if base.startswith("fla_kda_layer"):
        table, errors = meta["variants"], meta["fla_relative_error"]
    else:
        table, errors = meta, _json(f"{base}_fla_error.json")
    if case not in table:
        pytest.skip(f"golden case {case} is not in the extract of a clone; set KCP_SHARED to the shared folder")

    def tensors(name: str) -> dict[str, np.ndarray]:
        store = _npz(name)
        return {key[len(case) + 1 :]: to_float(store[key]) for key in store.files if key.startswith(f"{case}/")}

    return table[case], tensors(f"{base}.npz"), tensors(f"{base}_truth.npz"), errors[case]
