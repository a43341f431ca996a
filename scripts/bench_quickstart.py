#!/usr/bin/env python3
"""Tokens a second of the quickstart's training run on the native kernels against the composite ones.

Launches `kcp train configs/tiny_cp2.yaml` (two processes that share every sample) with KCP_BACKEND=native and =composite in turn and
compares the medians over the steps after the warm-up, in which graphs are compiled. The first losses must agree.

Exit code: 0 native is at least --gate times as fast, 1 it is not, 2 bad arguments or a run failed.

    python scripts/bench_quickstart.py [--rounds 3] [--steps 24] [--json out.json]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = ("native", "composite")
AGREE = 1e-4


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each backend (default: %(default)s)")
    p.add_argument("--steps", type=int, default=24, metavar="N", help="steps of a run (default: %(default)s)")
    p.add_argument("--warm-up", type=int, default=8, metavar="N", help="first steps, not counted (default: %(default)s)")
    p.add_argument("--gate", type=float, default=3.0, metavar="X", help="least ratio (default: %(default)s)")
    p.add_argument("--json", type=Path, default=None, metavar="FILE", help="write all figures to FILE")
    args = p.parse_args()
    if args.rounds < 1:
        p.error(f"--rounds is {args.rounds}; allowed: at least 1")
    if not 0 <= args.warm_up < args.steps:
        p.error(f"--warm-up is {args.warm_up}; allowed: 0 to {args.steps - 1}, fewer than --steps")
    return args


def train(backend, args, folder):
    """Metrics of every step of one run."""
    command = [sys.executable, "-m", "kcp.cli", "train", str(ROOT / "configs" / "tiny_cp2.yaml")]
    command += ["--output-dir", str(folder), "--steps", str(args.steps)]
    environment = dict(os.environ, KCP_BACKEND=backend)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise SystemExit(2)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main():
    args = parse()
    speeds, losses = {b: [] for b in BACKENDS}, {}
    for n in range(args.rounds):
        for backend in BACKENDS if n % 2 == 0 else BACKENDS[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                steps = train(backend, args, Path(folder))
            speeds[backend].append(statistics.median(s["tokens_per_second"] for s in steps[args.warm_up :]))
            losses[backend] = steps[0]["loss"]
            print(f"{backend:10} {speeds[backend][-1]:8.0f} tokens/s  first loss {losses[backend]:.6f}", flush=True)
    if abs(losses["native"] - losses["composite"]) > AGREE:
        print(f"the first losses differ by more than {AGREE}: the runs are not the same")
        return 2
    native, composite = (statistics.median(speeds[b]) for b in BACKENDS)
    ratio = native / composite
    print(f"native {native:.0f}, composite {composite:.0f} tokens/s: {ratio:.2f} times (gate {args.gate:g})")
    if args.json:
        args.json.write_text(json.dumps({"speeds": speeds, "losses": losses, "ratio": ratio, "steps": args.steps}, indent=1))
    return 0 if ratio >= args.gate else 1


if __name__ == "__main__":
    sys.exit(main())
