#!/usr/bin/env python3
"""Copy a few small cases of the shared golden files into ``tests/data``, for clones that do not have the shared folder.

Only what the tests read is kept: the inputs of a case and its float64 truth; the peer's own results are represented by
its error table. Run from anywhere: ``python scripts/extract_goldens.py [--shared FOLDER]``.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
OP_CASES = ("dense_T1", "safe_noA_T70", "raw_strong_T100", "negeig_T90")
OP_INPUTS = ("q", "k", "v", "g", "beta", "do", "A_log", "dt_bias")
LAYER_CASES = ("layer_safe",)
LIMIT_BYTES = 2 * 2**20


def extract_op(source: Path, target: Path) -> None:
    """Inputs, truth and error table of ``OP_CASES`` (none of which has states at its borders)."""
    base = source / "fla_kda_seed1"
    with np.load(f"{base}.npz") as store, np.load(f"{base}_truth.npz") as truth:
        inputs = {f"{case}/{name}": store[f"{case}/{name}"]
                  for case in OP_CASES for name in OP_INPUTS if f"{case}/{name}" in store.files}  # fmt: skip
        truths = {name: truth[name] for name in truth.files if name.split("/")[0] in OP_CASES}
    np.savez_compressed(target / "fla_kda_seed1.npz", **inputs)
    np.savez_compressed(target / "fla_kda_seed1_truth.npz", **truths)
    for suffix in (".json", "_fla_error.json"):
        table = json.loads(Path(f"{base}{suffix}").read_text())
        (target / f"fla_kda_seed1{suffix}").write_text(json.dumps({c: table[c] for c in OP_CASES}, indent=1) + "\n")


def extract_layer(source: Path, target: Path) -> None:
    """Weights, input, output gradient and truth of ``LAYER_CASES``."""
    base = source / "fla_kda_layer_seed1"
    with np.load(f"{base}.npz") as store, np.load(f"{base}_truth.npz") as truth:
        wanted = tuple(f"{case}/{kind}" for case in LAYER_CASES for kind in ("x", "dy", "param/"))
        inputs = {name: store[name] for name in store.files if name.startswith(wanted)}
        truths = {name: truth[name] for name in truth.files if name.split("/")[0] in LAYER_CASES}
    np.savez_compressed(target / "fla_kda_layer_seed1.npz", **inputs)
    np.savez_compressed(target / "fla_kda_layer_seed1_truth.npz", **truths)
    meta = json.loads(Path(f"{base}.json").read_text())
    for part in ("variants", "fla_relative_error"):
        meta[part] = {case: meta[part][case] for case in LAYER_CASES}
    (target / "fla_kda_layer_seed1.json").write_text(json.dumps(meta, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path(os.environ.get("KCP_SHARED", ROOT.parent / "shared")))
    source, target = parser.parse_args().shared / "goldens", ROOT / "tests" / "data"
    if not source.is_dir():
        parser.error(f"no golden files at {source}; give the shared folder with --shared or KCP_SHARED")
    target.mkdir(parents=True, exist_ok=True)
    extract_op(source, target)
    extract_layer(source, target)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"{target}: {size / 2**20:.2f} MB")
    if size > LIMIT_BYTES:
        parser.error(f"the extract holds {size} bytes, more than {LIMIT_BYTES}")


if __name__ == "__main__":
    main()
