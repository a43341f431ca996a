#!/usr/bin/env python3
"""Times KdaCore under context parallelism, every strategy, against one rank and against the machine's own ceiling.

What runs, forward+backward of one call on the native kernels, in turn within every round (every second round in the reverse order):

    one rank      all tokens on one rank; the others wait. Ranks take turns at it.
    ceiling       every rank runs its share of the tokens at the same time, alone: what the machine could give at most.
    STRATEGY      the ranks run the whole sequence together.

A rank is a process pinned to a core of its own, with one thread. Times are medians over the rounds, from the moment that the first rank
starts until the last one is done; the speedup is one rank's time over that. Every strategy's outputs and query gradients are compared with
one rank's in the same processes.

The plan (kcp.parallel.plan) is fed with this machine's numbers, measured apart from the strategies: FLOP/s from the ceiling runs, latency
and bandwidth from all-gathers of 4 bytes and of a tensor as large as a rank's queries.

Gates, for 2 ranks and 8 heads (--no-gates leaves them out):

    the best strategy   >= 87 % of 16/9 (a chain's pipeline of 8 groups of heads over 2 ranks) times ceiling / ranks
    state_scan          >= 1.15
    every strategy      measured within 20 % of what the plan predicts

A run whose ceiling is below 1.8 of 2 (0.9 a rank) is void: something else kept the machine busy.
Exit code: 0 the gates hold, 1 one does not, 3 the run is void, 2 bad arguments.

    python scripts/bench_cp.py
    python scripts/bench_cp.py --strategies ptp_chain,state_scan --rounds 15 --json out.json
    python scripts/bench_cp.py --tokens 65536 --heads 4 --no-gates
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ("ulysses", "state_scan", "ptp_chain", "ptp_tree", "hybrid")
BEST, SCAN, PREDICTED, CEILING = 0.87, 1.15, 0.20, 0.9
ONE, SHARE = "one rank", "ceiling"


def parse(arguments):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, default=2, metavar="W", help="processes, each on a core of its own (default: %(default)s)")
    p.add_argument("--tokens", type=int, default=16384, metavar="T", help="tokens of all ranks, a multiple of W (default: %(default)s)")
    p.add_argument("--heads", type=int, default=8, metavar="H", help="heads (default: %(default)s)")
    p.add_argument("--width", type=int, default=128, metavar="K", help="head width, K and V (default: %(default)s)")
    p.add_argument("--groups", type=int, default=None, metavar="G", help="head groups of ptp_chain (default: kcp's)")
    p.add_argument("--strategies", default=",".join(STRATEGIES), metavar="NAME,...", help="which (default: all)")
    p.add_argument("--rounds", type=int, default=9, metavar="N", help="timed rounds (default: %(default)s)")
    p.add_argument("--warm-up", type=int, default=2, metavar="N", help="rounds before them (default: %(default)s)")
    p.add_argument("--recompute", action="store_true", help="recompute caches in the backward (disable_recompute=False)")
    p.add_argument("--no-gates", action="store_true", help="print and write, judge nothing but the ceiling")
    p.add_argument("--json", type=Path, default=None, metavar="FILE", help="write all figures to FILE")
    p.add_argument("--records", type=Path, default=None, help=argparse.SUPPRESS)
    args = p.parse_args(arguments)
    for name, least in (("ranks", 2), ("tokens", 1), ("heads", 1), ("width", 1), ("rounds", 1), ("warm_up", 1)):
        if getattr(args, name) < least:
            p.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed: at least {least}")
    args.strategies = args.strategies.split(",")
    for name in args.strategies:
        if name not in STRATEGIES:
            p.error(f"--strategies has {name!r}; allowed: {', '.join(STRATEGIES)}")
    cores = len(os.sched_getaffinity(0))
    if args.records is None and cores < args.ranks:
        p.error(f"--ranks is {args.ranks}; allowed: at most {cores}, the cores of this machine")
    if args.tokens % args.ranks:
        p.error(f"--tokens is {args.tokens}; allowed: a multiple of --ranks = {args.ranks}")
    return args


def sizes_of(args):
    from kcp.parallel.plan import Sizes

    return Sizes(args.ranks, 1, args.tokens, args.heads, args.heads, args.width, args.width, disable_recompute=not args.recompute,
                 ptp_head_groups=args.groups)  # fmt: skip


# ---- one rank


class Jobs:
    """What one rank runs: jobs by name, each a function that returns when its work is done."""

    def __init__(self, args):
        import mindspore as ms
        import numpy as np
        from mindspore import Tensor, ops

        from kcp.layers import KdaCore, KdaCoreConfig
        from kcp.ops import backends
        from kcp.parallel import CpGroup, plan

        self.ms, self.np, self.Tensor = ms, np, Tensor
        self.group = group = CpGroup.world()
        rng = np.random.default_rng(0)
        t, h, w = args.tokens, args.heads, args.width
        shapes = [(1, t, h, w)] * 4 + [(1, t, h), (h,), (h, w), (1, t, h, w)]
        whole = [rng.standard_normal(shape, np.float32) for shape in shapes]
        whole[3] -= 6.0  # slow decay, so that states matter across ranks
        whole[5] *= 0.3
        begin, end = group.slice_bounds(t)
        slices = [x if x.ndim < 3 else x[:, begin:end].copy() for x in whole]
        self.whole, self.local = [Tensor(x) for x in whole], [Tensor(x) for x in slices]
        self.bounds = begin, end
        if backends.select("chunk_kda").__name__.rpartition(".")[2] != "native":
            raise SystemExit("kcp: error: the native kernels are not built; python kcp/ops/backends/native/build.py builds them")

        def job(strategy, over, tensors):
            options = dict(safe_gate=True, disable_recompute=not args.recompute)
            if strategy == "ptp_chain":
                options["ptp_head_groups"] = args.groups
            core = KdaCore(KdaCoreConfig(h, h, w, w, strategy=strategy, **options), over)

            def forward(q, k, v, g, beta, a_log, dt_bias):
                return core(q, k, v, g, beta, a_log, dt_bias, output_final_state=False)[0]

            gradient = ops.GradOperation(get_all=True, sens_param=True)(forward)

            def run():
                results = gradient(*tensors)
                ms.runtime.synchronize()
                return results

            run.forward = lambda: forward(*tensors[:7])
            return run

        single = CpGroup.single()
        self.jobs = {ONE: job("none", single, self.whole), SHARE: job("none", single, self.local)}
        machine = plan.machine_of("CPU", graph=False)
        self.refused = {}
        for name in args.strategies:
            reason = plan.estimate(name, sizes_of(args), machine).refused
            if reason is None:
                self.jobs[name] = job(name, group, self.local)
            else:
                self.refused[name] = reason

    def meet(self):
        """Wait for all ranks."""
        self.group.collectives.all_reduce(self.Tensor(self.np.zeros(1, self.np.float32)), "parameter").asnumpy()

    def exchange_seconds(self, numbers, count=15):
        """Median seconds of an all-gather of ``numbers`` float32 from every rank."""
        x, times = self.Tensor(self.np.ones(numbers, self.np.float32)), []
        for _ in range(count):
            self.meet()
            begin = time.perf_counter()
            self.group.collectives.all_gather(x, "parameter")
            self.ms.runtime.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def errors(self):
        """Relative L2 distance of every strategy's outputs and query gradients from one rank's."""
        out = {}
        expected = None
        begin, end = self.bounds
        for name, run in self.jobs.items():
            if name == SHARE:
                continue
            found = [run.forward().asnumpy(), run()[0].asnumpy()]
            if name == ONE:
                expected = [x[:, begin:end].copy() for x in found]
            else:
                out[name] = [float(self.np.linalg.norm(a - b) / self.np.linalg.norm(b)) for a, b in zip(found, expected, strict=True)]
            self.meet()
        return out


def work(args):
    """One rank: run the jobs and leave a record of when each began and ended."""
    import mindspore as ms
    from mindspore.communication import init

    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    init()
    jobs = Jobs(args)
    rank, ranks = jobs.group.rank, jobs.group.size
    record = {"rank": rank, "refused": jobs.refused, "errors": jobs.errors(), "times": {name: [] for name in jobs.jobs}}
    small, large = 1, args.tokens // ranks * args.heads * args.width
    record["exchange"] = [jobs.exchange_seconds(small), jobs.exchange_seconds(large), 4 * large * (ranks - 1)]
    for i in range(args.warm_up + args.rounds):
        order = list(jobs.jobs)
        for name in order if i % 2 == 0 else reversed(order):
            jobs.meet()
            if name == ONE and rank != i % ranks:
                continue
            begin = time.perf_counter()
            jobs.jobs[name]()
            if i >= args.warm_up:
                record["times"][name].append((i, begin, time.perf_counter()))
    record["cores"] = sorted(os.sched_getaffinity(0))
    (args.records / f"rank_{rank}.json").write_text(json.dumps(record))


# ---- all ranks


def run_ranks(args, arguments):
    """The records of all ranks."""
    from kcp.launch import LaunchOptions, launch

    os.environ.update(KCP_NUM_THREADS="1", OMP_NUM_THREADS="1", KCP_BACKEND="native", GLOG_v="3")
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]).strip(os.pathsep)
    with tempfile.TemporaryDirectory(prefix="kcp_bench_") as name:
        folder = Path(name)
        code = launch([str(Path(__file__).resolve()), *arguments, "--records", name], LaunchOptions(args.ranks, folder / "logs"))
        if code:
            raise SystemExit(code)
        return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(args.ranks)]


def elapsed(records, name):
    """Seconds of every round: from the first start to the last end."""
    rounds = {}
    for record in records:
        for i, begin, end in record["times"][name]:
            rounds.setdefault(i, []).append((begin, end))
    return [max(e for _, e in spans) - min(b for b, _ in spans) for spans in rounds.values()]


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":")[1].strip()
    return platform.machine()


def describe(args, records):
    import mindspore
    import numpy

    def git(*words):
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    changed = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "commit": git("rev-parse", "--short", "HEAD") + changed, "processor": processor(), "mindspore": mindspore.__version__,
        "numpy": numpy.__version__, "python": platform.python_version(), "ranks": args.ranks, "threads_per_rank": 1,
        "cores": [record["cores"] for record in records], "batch": 1, "tokens": args.tokens, "heads": args.heads, "key": args.width,
        "value": args.width, "dtype": "float32", "mode": "PyNative", "recompute": args.recompute, "warm_up": args.warm_up,
        "rounds": args.rounds, "load": os.getloadavg()[0],
    }  # fmt: skip


def evaluate(args, records):
    """All figures of the run as a dictionary."""
    from kcp.parallel import plan
    from kcp.parallel.degrees import head_groups

    seconds = {name: statistics.median(elapsed(records, name)) for name in records[0]["times"]}
    sizes = sizes_of(args)
    one, share = seconds.pop(ONE), seconds.pop(SHARE)
    latency, large, moved = (statistics.median(r["exchange"][i] for r in records) for i in range(3))
    flops = (plan.FORWARD + plan.BACKWARD) * sizes.forward_flops / share
    machine = plan.Machine(moved / (large - latency), latency, flops, False, True, False, "measured in this run")
    rows = []
    for name, measured in seconds.items():
        cost = plan.estimate(name, sizes, machine)
        error = [max(record["errors"][name][i] for record in records) for i in range(2)]
        rows.append({
            "strategy": name, "seconds": measured, "speedup": one / measured, "predicted": cost.seconds, "off": measured / cost.seconds - 1,
            "work": cost.work, "moved_bytes": cost.physical_bytes, "error": error,
        })  # fmt: skip
    ceiling = one / share
    groups = head_groups(args.heads, args.groups, args.ranks)
    return {
        "about": describe(args, records), "one_rank_seconds": one, "share_seconds": share, "ceiling": ceiling,
        "void": ceiling < CEILING * args.ranks, "latency": latency, "bandwidth": machine.bandwidth, "flops": flops, "groups": groups,
        "auto": plan.choose(sizes, machine).strategy, "rows": rows, "refused": records[0]["refused"],
    }  # fmt: skip


def gates(args, result):
    """``(what, measured, needed, holds)`` of every gate."""
    rows, out = {row["strategy"]: row for row in result["rows"]}, []
    best = max(rows.values(), key=lambda row: row["speedup"])
    needed = BEST * 16 / 9 * result["ceiling"] / args.ranks
    out.append((f"best ({best['strategy']})", best["speedup"], needed, best["speedup"] >= needed))
    if "state_scan" in rows:
        out.append(("state_scan", rows["state_scan"]["speedup"], SCAN, rows["state_scan"]["speedup"] >= SCAN))
    for name, row in rows.items():
        out.append((f"{name} off its plan", abs(row["off"]), PREDICTED, abs(row["off"]) <= PREDICTED))
    return out


def show(result):
    print("  ".join(f"{k}={v}" for k, v in result["about"].items()))
    print(
        f"one rank {1e3 * result['one_rank_seconds']:.1f} ms; every rank its share {1e3 * result['share_seconds']:.1f} ms: "
        f"ceiling {result['ceiling']:.3f}"
    )
    print(
        f"measured for the plan: {result['flops'] / 1e9:.1f} GFLOP/s a rank, latency {1e6 * result['latency']:.0f} us, "
        f"{result['bandwidth'] / 1e6:.0f} MB/s; ptp_chain in {result['groups']} groups; the plan would take {result['auto']}"
    )
    print(
        f"{'strategy':<12}{'ms':>9}{'speedup':>9}{'planned ms':>12}{'off':>8}{'work':>7}{'moved MB':>10}{'out error':>11}{'dq error':>10}"
    )
    for r in result["rows"]:
        print(
            f"{r['strategy']:<12}{1e3 * r['seconds']:>9.1f}{r['speedup']:>9.3f}{1e3 * r['predicted']:>12.1f}{100 * r['off']:>7.1f}%"
            f"{r['work']:>7.2f}{r['moved_bytes'] / 1e6:>10.2f}{r['error'][0]:>11.1e}{r['error'][1]:>10.1e}"
        )
    for name, reason in result["refused"].items():
        print(f"{name:<12}no: {reason}")


def main(arguments):
    args = parse(arguments)
    if args.records is not None:
        work(args)
        return 0
    result = evaluate(args, run_ranks(args, arguments))
    show(result)
    judged = [] if args.no_gates else gates(args, result)
    result["gates"] = [dict(zip(("what", "measured", "needed", "holds"), gate, strict=True)) for gate in judged]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    if result["void"]:
        print(f"void: the ceiling is below {CEILING * args.ranks:.1f}; the machine was busy with something else")
        return 3
    for what, measured, needed, holds in judged:
        print(f"{'holds' if holds else 'FAILS'}: {what} {measured:.3f}, gate {needed:.3f}")
    return 0 if all(gate[3] for gate in judged) else 1


if __name__ == "__main__":
    sys.path.append(str(ROOT))
    code = main(sys.argv[1:])
    if code:
        sys.exit(code)
