#!/usr/bin/env python3
"""Time per token and memory of chunk_kda as the sequence grows: forward+backward, one process per length.

    python scripts/bench_growth.py [--from 1024 --to 1048576 --heads 1 --key 128 --value 128] [--png growth.png] [--json growth.json]

Peak memory is that of the process above what it had after the imports: inputs, output, gradients, caches and workspace.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def parse():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--from", dest="first", type=int, default=1024)
    p.add_argument("--to", dest="last", type=int, default=1 << 20)
    p.add_argument("--factor", type=int, default=4)
    p.add_argument("--heads", type=int, default=1)
    p.add_argument("--key", type=int, default=128)
    p.add_argument("--value", type=int, default=128)
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    p.add_argument("--saved", action="store_true", help="save caches instead of recomputing them")
    p.add_argument("--seconds", type=float, default=3.0, help="time spent on a length, at least three runs")
    p.add_argument("--png", default=None)
    p.add_argument("--json", default=None)
    p.add_argument("--one", type=int, default=None, help=argparse.SUPPRESS)
    return p.parse_args()


def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def measure(args):
    """One length in this process: prints ``{tokens, seconds, best, runs, peak}``."""
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, ops

    from kcp.ops import backends, chunk_kda

    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    t, h = args.one, args.heads
    backends.select("chunk_kda")
    base = status("VmRSS")
    rng, dtype = np.random.default_rng(0), getattr(ms, args.dtype)

    def make(*shape):
        return Tensor(rng.standard_normal(shape, np.float32)).astype(dtype)

    inputs = (make(1, h, t, args.key), make(1, h, t, args.key), make(1, h, t, args.value), make(1, h, t, args.key), make(1, h, t))
    d_out = make(1, t, h, args.value)

    def forward(q, k, v, g, beta):
        return chunk_kda(q, k, v, g, beta, safe_gate=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                         disable_recompute=args.saved)[0]  # fmt: skip

    gradient = ops.GradOperation(get_all=True, sens_param=True)(forward)
    times, begin = [], time.perf_counter()
    while len(times) < 4 or time.perf_counter() - begin < args.seconds:
        start = time.perf_counter()
        gradient(*inputs, d_out)
        ms.runtime.synchronize()
        times.append(time.perf_counter() - start)
    times = times[1:]
    result = {"tokens": t, "seconds": statistics.median(times), "best": min(times), "runs": len(times), "peak": status("VmHWM") - base}
    print(json.dumps(result))


def plot(rows, args):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = [r["tokens"] for r in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    left.semilogx(tokens, [1e6 * r["seconds"] / r["tokens"] for r in rows], "o-", base=2)
    left.set(xlabel="tokens", ylabel="microseconds per token", title="forward+backward", ylim=(0, None))
    right.loglog(tokens, [r["peak"] / 2**20 for r in rows], "o-", base=2)
    right.set(xlabel="tokens", ylabel="MiB above the imports", title="peak memory")
    figure.suptitle(f"chunk_kda, H={args.heads}, K={args.key}, V={args.value}, {args.dtype}")
    figure.tight_layout()
    figure.savefig(args.png, dpi=120)


def main():
    args = parse()
    if args.one:
        measure(args)
        return
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]).strip(os.pathsep))
    rows, tokens = [], args.first
    print(f"{'tokens':>9s} {'s':>9s} {'us/token':>9s} {'best':>9s} {'runs':>5s} {'peak MiB':>9s} {'bytes/token':>11s}")
    while tokens <= args.last:
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", str(tokens)], capture_output=True, text=True, env=env)
        if done.returncode:
            print(f"{tokens:9d} failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}")
            return
        r = json.loads(done.stdout.splitlines()[-1])
        rows.append(r)
        print(f"{tokens:9d} {r['seconds']:9.4f} {1e6 * r['seconds'] / tokens:9.3f} {1e6 * r['best'] / tokens:9.3f} {r['runs']:5d} "
              f"{r['peak'] / 2**20:9.0f} {r['peak'] / tokens:11.0f}", flush=True)  # fmt: skip
        tokens *= args.factor
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    if args.png:
        plot(rows, args)


if __name__ == "__main__":
    sys.path.append(str(ROOT))
    main()
