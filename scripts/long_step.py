#!/usr/bin/env python3
"""One training step of a KDA layer on a very long sequence, at two context-parallel degrees: memory of all processes, and agreement.

A step is the layer's forward (one head, in-kernel gate, norm and sigmoid; caches recomputed in the backward), the mean squared distance
to its input as the loss, all gradients, their sum over the ranks, and a step of gradient descent. Inputs and weights do not depend on the
degree. The same step runs with --ranks processes and then with --against, and these are compared by relative L2:

    outputs                          <= 1e-5
    gradients of the input and of every parameter (a_log's error against the sum of its absolute terms where that is larger)  <= 5e-5

Memory is the sum of the resident sets of every process of the launch, the scheduler included, sampled ten times a second; pages that
processes share are counted once a process, so it is an upper bound. The gate is --memory GiB at both degrees.

Exit code: 0 the gates hold, 1 one does not, 2 bad arguments.

    python scripts/long_step.py
    python scripts/long_step.py --tokens 65536 --ranks 2 --against 1 --strategy ptp_chain
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 4096  # tokens that share a seed
FORWARD, BACKWARD = 1e-5, 5e-5
RATE = 0.1


def parse(arguments):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, default=1 << 20, metavar="T", help="tokens of the sequence (default: %(default)s)")
    p.add_argument("--ranks", type=int, default=4, metavar="W", help="processes of the first step (default: %(default)s)")
    p.add_argument("--against", type=int, default=2, metavar="W", help="processes of the step to compare with (default: %(default)s)")
    p.add_argument("--hidden", type=int, default=128, metavar="D", help="width of the layer, and of its head (default: %(default)s)")
    p.add_argument("--strategy", default="state_scan", metavar="NAME", help="strategy of both (default: %(default)s)")
    p.add_argument("--memory", type=float, default=20.0, metavar="GIB", help="bound on the resident sets (default: %(default)s)")
    p.add_argument("--json", type=Path, default=None, metavar="FILE", help="write all figures to FILE")
    p.add_argument("--records", type=Path, default=None, help=argparse.SUPPRESS)
    args = p.parse_args(arguments)
    for name in ("tokens", "ranks", "against", "hidden"):
        if getattr(args, name) < 1:
            p.error(f"--{name} is {getattr(args, name)}; allowed: at least 1")
    for ranks in (args.ranks, args.against):
        if args.tokens % (ranks * BLOCK):
            p.error(f"--tokens is {args.tokens}; allowed: a multiple of {ranks * BLOCK}, {BLOCK} times the ranks")
    return args


# ---- one rank


def work(args):
    """One step on this rank; leaves outputs, gradients and a record."""
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, ops
    from mindspore.communication import init

    from kcp.layers import KdaAttention, KdaAttentionConfig
    from kcp.parallel import CpGroup

    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    if "MS_ROLE" in os.environ:
        init()
    group = CpGroup.world()
    begin, end = group.slice_bounds(args.tokens)
    np.random.seed(0)
    ms.set_seed(0)
    strategy = args.strategy if group.size > 1 else "none"
    config = KdaAttentionConfig(args.hidden, 1, head_dim=args.hidden, safe_gate=True, strategy=strategy, disable_recompute=False)
    layer = KdaAttention(config, group)
    for i, parameter in enumerate(layer.trainable_params()):  # MindSpore's own start depends on the rank
        if parameter.ndim == 2:
            start = np.random.default_rng(i).standard_normal(parameter.shape, np.float32) * args.hidden**-0.5
            parameter.set_data(Tensor(start))
    blocks = [
        np.random.default_rng(10**6 + b).standard_normal((BLOCK, args.hidden), np.float32) for b in range(begin // BLOCK, end // BLOCK)
    ]
    x = Tensor(np.concatenate(blocks)[None])
    del blocks

    def loss(x):
        y = layer(x)
        error = y - x
        return (error * error).sum() / (args.tokens * args.hidden), y

    parameters = layer.trainable_params()
    start = time.perf_counter()
    (value, y), (dx, grads) = ms.value_and_grad(loss, 0, parameters, has_aux=True)(x)
    whole = []
    for gradient in (ops.reshape(value, (1,)), *grads):
        whole.append(group.collectives.all_reduce(gradient, "parameter") if group.size > 1 else gradient)
    for parameter, gradient in zip(parameters, whole[1:], strict=True):
        parameter.set_data(parameter - RATE * gradient)
    ms.runtime.synchronize()
    seconds = time.perf_counter() - start
    np.save(args.records / f"y_{group.rank}.npy", y.asnumpy())
    np.save(args.records / f"dx_{group.rank}.npy", dx.asnumpy())
    if group.rank == 0:
        named = {p.name: g.asnumpy() for p, g in zip(parameters, whole[1:], strict=True)}
        np.savez(args.records / "parameters.npz", **named)
    record = {"loss": float(whole[0].asnumpy()[0]), "seconds": seconds}
    (args.records / f"rank_{group.rank}.json").write_text(json.dumps(record))


# ---- all ranks


class Memory(threading.Thread):
    """Samples the resident sets of this process's descendants until ``stop``; ``peak`` is the largest sum, in bytes."""

    def __init__(self):
        super().__init__(daemon=True)
        self.done, self.peak = threading.Event(), 0

    def run(self):
        import psutil

        while not self.done.wait(0.1):
            total = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    total += process.memory_info().rss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, total)

    def stop(self):
        self.done.set()
        self.join()
        return self.peak


def step(args, arguments, ranks, folder):
    """Run the step with ``ranks`` processes; its record."""
    from kcp.launch import LaunchOptions, launch

    folder.mkdir()
    memory = Memory()
    memory.start()
    code = launch([str(Path(__file__).resolve()), *arguments, "--records", str(folder)], LaunchOptions(ranks, folder / "logs"))
    peak = memory.stop()
    if code:
        raise SystemExit(code)
    record = json.loads((folder / "rank_0.json").read_text())
    return {"ranks": ranks, "peak_bytes": peak, **record}


class Distance:
    """Relative L2 of tensors that are cut into different slices."""

    def __init__(self):
        self.difference = self.reference = 0.0

    def add(self, a, b):
        import numpy as np

        a, b = a.astype(np.float64), b.astype(np.float64)
        self.difference += float(((a - b) ** 2).sum())
        self.reference += float((b**2).sum())

    def value(self):
        return (self.difference / self.reference) ** 0.5


def distances(args, first, second):
    """Relative L2 of the first step's results from the second's, by name."""
    import numpy as np

    out = {}
    for name in ("y", "dx"):
        mine = [np.load(first / f"{name}_{rank}.npy", mmap_mode="r")[0] for rank in range(args.ranks)]
        theirs = [np.load(second / f"{name}_{rank}.npy", mmap_mode="r")[0] for rank in range(args.against)]
        distance = Distance()
        for token in range(0, args.tokens, BLOCK):
            rows = []
            for parts in (mine, theirs):
                length = args.tokens // len(parts)
                rows.append(parts[token // length][token % length : token % length + BLOCK])
            distance.add(*rows)
        out[name] = distance.value()
    with np.load(first / "parameters.npz") as a, np.load(second / "parameters.npz") as b:
        for name in a.files:
            distance = Distance()
            distance.add(a[name], b[name])
            out[name] = distance.value()
    return out


def main(arguments):
    args = parse(arguments)
    if args.records is not None:
        work(args)
        return 0
    os.environ.setdefault("GLOG_v", "3")
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]).strip(os.pathsep)
    with tempfile.TemporaryDirectory(prefix="kcp_long_") as name:
        folders = [Path(name) / part for part in ("first", "second")]
        steps = [step(args, arguments, ranks, folder) for ranks, folder in zip((args.ranks, args.against), folders, strict=True)]
        errors = distances(args, *folders)
    for s in steps:
        print(f"CP={s['ranks']}: loss {s['loss']:.7f}, step {s['seconds']:.1f} s, peak of all processes {s['peak_bytes'] / 2**30:.2f} GiB")
    holds = all(s["peak_bytes"] <= args.memory * 2**30 for s in steps)
    for name, error in errors.items():
        gate = FORWARD if name == "y" else BACKWARD
        holds = holds and error <= gate
        print(f"{name:<24}{error:>10.2e}  gate {gate:.0e}")
    if args.json:
        args.json.write_text(json.dumps({"tokens": args.tokens, "strategy": args.strategy, "steps": steps, "errors": errors}, indent=1))
    print("the gates hold" if holds else "a gate does not hold")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.path.append(str(ROOT))
    code = main(sys.argv[1:])
    if code:
        sys.exit(code)
