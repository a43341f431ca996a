#!/usr/bin/env python3
"""Times chunk_kda forward and forward+backward on every backend, and the explicit stages, against the machine's own sgemm.

Every row, sgemm included, is run once per round in turn and medians are taken, so that a busy machine hits all rows alike. sgemm is a
2048^3 product, the best of NumPy and MindSpore. Useful FLOPs per chunk and head are those of the textbook form, forward
``4 C^2 K + 2 C^2 K + 2 C^2 V + 6 C K V + 2 C^2 V`` with C = 64, forward+backward 3.5 times that (a convention; the native kernels execute
fewer). Peak memory is that of a process of its own per row, above what it had after the imports and the inputs.

    python scripts/bench_ops.py [--tokens 4096 --heads 8 --key 128 --value 128 --dtype float32]
        [--packing 64:20-200] [--graph] [--stages] [--json out.json]

Peers run where ``--peer-python`` names an interpreter that has them (transformers >= 5 with kimi_linear; flash-linear-attention).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 64
FORWARD_BACKWARD = 3.5


def parse():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--key-heads", type=int, default=None)
    p.add_argument("--key", type=int, default=128)
    p.add_argument("--value", type=int, default=128)
    p.add_argument("--layout", choices=("BNSD", "BSND"), default="BNSD")
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    p.add_argument("--packing", default=None, metavar="N:MIN-MAX", help="N documents of MIN to MAX tokens in place of --tokens")
    p.add_argument("--threads", type=int, default=None, help="threads of the native kernels (KCP_NUM_THREADS)")
    p.add_argument("--backends", default="native,composite")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--warm-up", type=int, default=3)
    p.add_argument(
        "--cpu-time", action="store_true", help="processor seconds of all threads in place of elapsed ones: for a machine that is shared"
    )
    p.add_argument("--recompute", action="store_true", help="recompute caches in the backward (disable_recompute=False)")
    p.add_argument("--graph", action="store_true", help="also inside ms.jit")
    p.add_argument("--stages", action="store_true", help="also stage by stage, on each backend")
    p.add_argument("--peer-python", default=None, help="interpreter with transformers and torch (and fla)")
    p.add_argument("--json", default=None, help="write all figures to this file")
    p.add_argument("--memory-of", default=None, help=argparse.SUPPRESS)
    return p.parse_args()


def lengths_of(args):
    if args.packing is None:
        return [args.tokens]
    import numpy as np

    count, bounds = args.packing.split(":")
    low, high = bounds.split("-")
    return [int(n) for n in np.random.default_rng(0).integers(int(low), int(high) + 1, int(count))]


def useful_flops(args, tokens):
    """Forward FLOPs of the textbook form."""
    k, v = args.key, args.value
    chunk = 4 * CHUNK**2 * k + 2 * CHUNK**2 * k + 2 * CHUNK**2 * v + 6 * CHUNK * k * v + 2 * CHUNK**2 * v
    return chunk * tokens / CHUNK * args.heads


class Case:
    """Inputs of one call, and the rows that can be timed on a backend."""

    def __init__(self, args):
        import mindspore as ms
        import numpy as np
        from mindspore import Tensor, ops

        from kcp.ops import backends, chunk_kda

        self.args, self.ms, self.backends = args, ms, backends
        lengths = lengths_of(args)
        self.tokens = t = sum(lengths)
        rng = np.random.default_rng(0)
        dtype = getattr(ms, args.dtype)

        def make(heads, *width):
            shape = (1, heads, t, *width) if args.layout == "BNSD" else (1, t, heads, *width)
            return Tensor(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

        h, hk = args.heads, args.key_heads or args.heads
        self.inputs = (make(hk, args.key), make(hk, args.key), make(h, args.value), make(h, args.key), make(h))
        a_log = Tensor(0.5 * rng.standard_normal(h).astype(np.float32))
        dt_bias = Tensor(rng.standard_normal((h, args.key)).astype(np.float32))
        self.tensors = (*self.inputs, a_log, dt_bias)
        self.d_out = Tensor(rng.standard_normal((1, t, h, args.value)).astype(np.float32)).astype(dtype)
        options = dict(layout=args.layout, safe_gate=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                       disable_recompute=not args.recompute)  # fmt: skip
        if args.packing:
            options["cu_seqlens"] = tuple(int(n) for n in np.cumsum([0, *lengths]))
        self.options = options

        def forward(q, k, v, g, beta, a_log, dt_bias):
            return chunk_kda(q, k, v, g, beta, a_log=a_log, dt_bias=dt_bias, **options)[0]

        self.forward = forward
        gradient = ops.GradOperation(get_all=True, sens_param=True)(forward)

        def backward(q, k, v, g, beta, a_log, dt_bias, d_out):
            return gradient(q, k, v, g, beta, a_log, dt_bias, d_out)

        self.backward, self.jit_forward, self.jit_backward = backward, ms.jit(forward), ms.jit(backward)

    def rows(self, backend):
        """``{row: (function, useful FLOPs)}``; functions return when the work is done."""
        flops = useful_flops(self.args, self.tokens)

        def timed(run):
            def call():
                with self.backends.use(backend):
                    result = run()
                self.ms.runtime.synchronize()
                return result

            return call

        rows = {
            "forward": (timed(lambda: self.forward(*self.tensors)), flops),
            "forward+backward": (timed(lambda: self.backward(*self.tensors, self.d_out)), FORWARD_BACKWARD * flops),
        }
        if self.args.graph:
            rows["forward (graph)"] = (timed(lambda: self.jit_forward(*self.tensors)), flops)
            rows["forward+backward (graph)"] = (timed(lambda: self.jit_backward(*self.tensors, self.d_out)), FORWARD_BACKWARD * flops)
        if self.args.stages:
            rows.update({f"stage {name}": (timed(run), 0) for name, run in self.stages(backend).items()})
        return rows

    def stages(self, backend):
        """The explicit stages as functions of no argument, each fed by the ones before it."""
        from mindspore import ops

        from kcp import ops as kda

        q, k, v, g, beta, a_log, dt_bias = self.tensors
        head_major = [x if self.args.layout == "BNSD" else x.swapaxes(1, 2) for x in self.inputs]
        cu = {"cu_seqlens": self.options["cu_seqlens"]} if self.args.packing else {}
        gate = dict(use_gate_in_kernel=True, safe_gate=True, use_beta_sigmoid_in_kernel=True)
        scale = self.args.key**-0.5
        d_out = ops.cast(self.d_out, self.ms.float32)
        d_head_major = d_out.swapaxes(1, 2) * 1.0
        with self.backends.use(backend):
            prepare = lambda: kda.chunk_kda_fwd_prepare(q, k, v, g, beta, layout=self.args.layout, a_log=a_log, dt_bias=dt_bias,  # noqa: E731
                                                        use_qk_l2norm_in_kernel=True, **gate, **cu)  # fmt: skip
            gk, aqk, akk, w, u, qg, kg, qs, qh, kh, qr, kr, _ = prepare()
            fwd_h = lambda: kda.chunk_kda_fwd_h(kg, w, u, gk=gk, **cu)  # noqa: E731
            h, v_new, _ = fwd_h()
            local = lambda: kda.chunk_kda_bwd_prepare(aqk, v_new, d_out, h, scale=scale, layout="BSND", **cu)  # noqa: E731
            d_aqk, dv, dq_raw = local()
            dhu = lambda: kda.chunk_kda_bwd_dhu(qg, kg, w, d_head_major, dv, scale, gk=gk, **cu)  # noqa: E731
            dh, _, dv_scan = dhu()
        return {
            "fwd_prepare": prepare,
            "pre_process_fwd": lambda: kda.chunk_kda_pre_process_fwd(kg, w, u, gk=gk, **cu),
            "fwd_h": fwd_h,
            "fwd_finalize": lambda: kda.chunk_kda_fwd_finalize(qs, aqk, v_new, h, **cu),
            "bwd_prepare": local,
            "pre_process_bwd": lambda: kda.chunk_kda_pre_process_bwd(qg, kg, w, d_head_major, dv, scale, gk=gk, **cu),
            "bwd_dhu": dhu,
            "bwd_finalize": lambda: kda.chunk_kda_bwd_finalize(
                qh, kh, head_major[2], gk, head_major[3], head_major[4], a_log, dt_bias, akk, v_new, h, dh, dv_scan, d_aqk, dq_raw,
                scale=scale, q_rstd=qr, k_rstd=kr, **gate, **cu,
            ),
        }  # fmt: skip


def sgemm_rows():
    import numpy as np
    from mindspore import Tensor, mint, runtime

    a = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    out, x = np.empty_like(a), Tensor(a)

    def mindspore():
        mint.matmul(x, x)
        runtime.synchronize()

    return {"sgemm numpy": (lambda: np.matmul(a, a, out=out), 2 * 2048**3), "sgemm mindspore": (mindspore, 2 * 2048**3)}


def start():
    import mindspore as ms

    ms.set_device("CPU")
    ms.runtime.launch_blocking()


def peak_memory():
    """Peak resident bytes of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def measure_memory(args):
    """In a process of its own: peak of one row above the inputs' baseline, printed as bytes."""
    backend, row = args.memory_of.split("|")
    start()
    case = Case(args)
    args.stages = False
    run = case.rows(backend)[row][0]
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    run()
    print(peak_memory() - before)


def memory_of(args, backend, row):
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", f"{backend}|{row}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(args))
    return int(done.stdout.split()[-1]) if done.returncode == 0 and done.stdout.split() else None


def environment(args):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]).strip(os.pathsep))
    if args.threads:
        env["KCP_NUM_THREADS"] = str(args.threads)
    return env


PEER = r"""
import json, sys, time, torch
a = json.loads(sys.argv[1]); T, H, K, V = a["tokens"], a["heads"], a["key"], a["value"]
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as kda
f = lambda *s: torch.randn(*s, requires_grad=True)
q, k, v, beta = f(1, T, H, K), f(1, T, H, K), f(1, T, H, V), torch.rand(1, T, H, requires_grad=True)
g = (-torch.rand(1, T, H, K)).requires_grad_()
def peak():
    return [int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM")][0]
open("/proc/self/clear_refs", "w").write("5"); base = peak()
t = time.perf_counter(); o = kda(q, k, v, g, beta)[0]; fwd = time.perf_counter() - t
o.sum().backward(); both = time.perf_counter() - t
print(json.dumps({"forward": fwd, "forward+backward": both, "memory": peak() - base}))
"""


def peer(args):
    """Seconds and bytes of transformers' reference, one run, or why there are none."""
    if args.peer_python is None:
        return {"skipped": "no --peer-python"}
    wanted = json.dumps({n: getattr(args, n) for n in ("tokens", "heads", "key", "value")})
    done = subprocess.run([args.peer_python, "-c", PEER, wanted], capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"skipped": done.stderr.strip().splitlines()[-1]}


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":")[1].strip()
    return platform.machine()


def describe(args, tokens, lengths):
    import mindspore
    import numpy

    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit, "processor": processor(), "cores": len(os.sched_getaffinity(0)), "mindspore": mindspore.__version__,
        "numpy": numpy.__version__, "python": platform.python_version(), "tokens": tokens, "heads": args.heads,
        "key_heads": args.key_heads or args.heads, "key": args.key, "value": args.value, "dtype": args.dtype, "layout": args.layout,
        "sequences": len(lengths),
        "length_min": min(lengths), "length_median": statistics.median(lengths), "length_max": max(lengths),
        "threads": args.threads or os.environ.get("KCP_NUM_THREADS", "default"), "warm_up": args.warm_up, "rounds": args.rounds,
        "recompute": args.recompute, "measured": "the whole chunk_kda call from Python", "clock": "cpu" if args.cpu_time else "elapsed",
        "load": os.getloadavg()[0],
    }  # fmt: skip


def main():
    args = parse()
    if args.memory_of:
        measure_memory(args)
        return
    if args.threads:
        os.environ["KCP_NUM_THREADS"] = str(args.threads)
    start()
    from kcp.ops import backends

    case = Case(args)
    rows = {(None, n): r for n, r in sgemm_rows().items()}
    for backend in args.backends.split(","):
        if backend in backends.available():
            rows.update({(backend, n): r for n, r in case.rows(backend).items()})
        else:
            print(f"{backend}: not available here")
    clock = time.process_time if args.cpu_time else time.perf_counter
    times = {key: [] for key in rows}
    for i in range(args.warm_up + args.rounds):
        for key, (run, _) in rows.items():
            if key[0] == "composite" and i >= args.warm_up + max(3, args.rounds // 5):
                continue  # slow, and steady
            begin = clock()
            run()
            if i >= args.warm_up:
                times[key].append(clock() - begin)
    median = {key: statistics.median(t) for key, t in times.items()}
    sgemm = max(rows[key][1] / median[key] for key in rows if key[0] is None)
    about = describe(args, case.tokens, lengths_of(args))
    print("  ".join(f"{k}={v}" for k, v in about.items()))
    print(f"sgemm 2048^3: {sgemm / 1e9:.1f} GFLOP/s (best of NumPy and MindSpore)")
    print(f"{'backend':10s} {'row':26s} {'ms':>10s} {'min':>10s} {'GFLOP/s':>8s} {'% sgemm':>8s} {'peak MiB':>9s}")
    table = []
    for (backend, row), (_, flops) in rows.items():
        if backend is None:
            continue
        seconds = median[backend, row]
        memory = memory_of(args, backend, row) if row in ("forward", "forward+backward") else None
        rate = flops / seconds if flops else None
        table.append({"backend": backend, "row": row, "seconds": seconds, "best": min(times[backend, row]), "gflops": rate and rate / 1e9,
                      "of_sgemm": rate and rate / sgemm, "peak_bytes": memory})  # fmt: skip
        shown = f"{rate / 1e9:8.1f} {100 * rate / sgemm:7.1f} %" if rate else " " * 17
        peak = f"{memory / 2**20:9.0f}" if memory is not None else " " * 9
        print(f"{backend:10s} {row:26s} {1e3 * seconds:10.2f} {1e3 * min(times[backend, row]):10.2f} {shown} {peak}")
    peers = peer(args)
    if "skipped" in peers:
        print(f"transformers: skipped ({peers['skipped']})")
    else:
        print(f"transformers forward+backward: {peers['forward+backward']:.2f} s, {peers['memory'] / 2**20:.0f} MiB")
        for r in table:
            if r["row"] == "forward+backward":
                r["ratio_to_transformers"] = peers["forward+backward"] / r["seconds"]
                print(f"  {r['backend']}: {r['ratio_to_transformers']:.0f} times as fast")
    if args.json:
        Path(args.json).write_text(json.dumps({"about": about, "sgemm_gflops": sgemm / 1e9, "rows": table, "peers": peers}, indent=1))


if __name__ == "__main__":
    sys.path.append(str(ROOT))
    main()
