"""``kcp plan`` and ``kcp simulate``: what context parallelism costs and how exact it is, without starting a run."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

from kcp.cli_arguments import number, positive, refuse

PLAN_HELP = """\
Predicts bytes, FLOPs, memory and time of every strategy for the KDA layers of a
run, and says what kda_cp_strategy: 'auto' takes. Needs neither MindSpore nor the
device; nothing is started.

columns, for one rank:
  fwd/bwd     what it receives a layer, as if the device had every collective
  moved       what is moved for that, both ways: more where a collective is
              emulated (CPU: all-to-all by all-gather; graphs: point to point by
              rounds of all ranks)
  work        units of one forward over the rank's tokens; 3 is no extra work
  kept        memory from forward to backward a layer, kept transitions included
  time        of all KDA layers, forward and backward, exchanges not overlapped
  speedup     against one device

Projections, ShortConv, attention and MLP layers cost every strategy the same and
are left out. Runs on the CPU: below the table the memory of the whole model, and
whether this machine has it. CPU numbers are measured defaults; for NPUs give your own.

examples:
  kcp plan configs/tiny_cp2.yaml
  kcp plan configs/kimi_linear_48b_npu.yaml --world-size 64
  kcp plan CONFIG --bandwidth 50e9 --latency 20e-6 --flops 1e14
"""

SIMULATE_HELP = """\
Runs many ranks in one process and prints the worst error against one device.

summaries (default)
  Random affine summaries [E | M] of W ranks, W up to 1024. Prefix and suffix in
  float32, one after the other and as a tree, against float64: shows how errors
  grow with W. --decay is the largest log decay of a rank: near 0 the transitions
  hardly shrink anything, which is the hardest case.
core
  ShortConv's halo and KdaCore, forward and backward, as W ranks in lockstep (W
  up to 64), against the same on one rank, in float32.
layer
  A whole KDA layer (projections, convolution with its halo, gates, core, gated
  norm, output projection), forward and backward, as W ranks in lockstep (W up to
  64), against the same layer on one device, in float32: every strategy, one
  document and packed ones. Gradients of weights are summed over the ranks.
  columns: the output, then gradients of the input, of the projections (weights
  and bias), of the convolutions (taps and biases), of A_log and dt_bias, and of
  the gated norm. One head a rank unless --heads says otherwise, so that every
  strategy can serve.

Exit code of layer: 0 if the output is within 1e-5 and gradients within 5e-5, else 1.

examples:
  kcp simulate --ranks 1024
  kcp simulate core --ranks 8 --tokens 256 --strategy ptp_chain
  kcp simulate core --ranks 16 --tokens 320 --documents 100,1,219
  kcp simulate layer --ranks 64 --width 8
  kcp simulate layer --ranks 4 --strategy hybrid --documents 20,1,43
"""


def add_commands(commands, style: dict) -> None:
    """Add both subcommands to the parser of :mod:`kcp.cli`."""
    plan = commands.add_parser("plan", help="what each strategy costs, and what auto takes", description=PLAN_HELP, **style)
    plan.add_argument("config", metavar="CONFIG", help="MindFormers YAML file")
    plan.add_argument("--world-size", type=positive, metavar="N", help="plan for N workers (default: as many as CONFIG asks for)")
    plan.add_argument("--bandwidth", type=number, metavar="BYTES/S", help="bytes a second that a rank receives")
    plan.add_argument("--latency", type=number, metavar="S", help="seconds of one exchange of almost nothing")
    plan.add_argument("--flops", type=number, metavar="FLOP/S", help="what the KDA kernels of one rank reach")
    plan.set_defaults(command=run_plan)

    simulate = commands.add_parser("simulate", help="errors of context parallelism, without machines", description=SIMULATE_HELP, **style)
    simulate.add_argument(
        "what", nargs="?", choices=("summaries", "core", "layer"), default="summaries", help="what to run (default: %(default)s)"
    )
    simulate.add_argument("--ranks", type=positive, default=8, metavar="W", help="ranks (default: %(default)s)")
    simulate.add_argument("--heads", type=positive, metavar="H", help="heads (default: 2; layer: as many as ranks)")
    simulate.add_argument("--width", type=positive, default=32, metavar="K", help="head width, K and V (default: %(default)s)")
    simulate.add_argument("--decay", type=number, default=0.01, metavar="A", help="largest decay (default: %(default)s)")
    simulate.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: %(default)s)")
    core = simulate.add_argument_group("core and layer")
    core.add_argument("--strategy", metavar="NAME", help="strategy (default: state_scan; layer: every one)")
    core.add_argument("--tokens", type=positive, metavar="T", help="tokens of all ranks (default: 16 a rank)")
    core.add_argument(
        "--documents", type=_lengths, metavar="N,N,...", help="packed documents' lengths, T in all (default: one; layer: random)"
    )
    simulate.set_defaults(command=run_simulate)


def run_plan(options: argparse.Namespace) -> int:
    """Print the table of ``kcp plan``."""
    from kcp.config import ConfigError, load_run_config

    try:
        run = load_run_config(options.config)
        sizes, machine = _plan_inputs(run, options)
    except ConfigError as error:
        return refuse(*error.problems)
    except ValueError as error:
        return refuse(str(error))
    print(plan_text(sizes, machine, run.model.kda_cp_strategy))
    if run.training.device_target == "CPU":
        print("\n" + memory_text(run, sizes.ranks))
    return 0


def _plan_inputs(run, options):
    """``(Sizes, Machine)`` of a run and the command line."""
    ranks = run.parallel.context_parallel
    if options.world_size is not None:
        if options.world_size % run.parallel.data_parallel:
            raise ValueError(f"--world-size is {options.world_size}; allowed: a multiple of data_parallel = {run.parallel.data_parallel}")
        ranks = options.world_size // run.parallel.data_parallel
    if run.model.seq_length % ranks:
        raise ValueError(f"seq_length is {run.model.seq_length}; allowed: a multiple of context_parallel = {ranks}")
    sizes, machine = plan_of(run, ranks)
    given = {name: getattr(options, name) for name in ("bandwidth", "latency", "flops")}
    given = {name: value for name, value in given.items() if value is not None}
    return sizes, replace(machine, **given, source=machine.source + "; given: " + ", ".join(given)) if given else machine


def plan_of(run, ranks: int | None = None):
    """``(Sizes, Machine)`` that :mod:`kcp.parallel.plan` needs of a run, over ``ranks`` (by default the run's context_parallel)."""
    from kcp.parallel.plan import Sizes, machine_of

    model = run.model
    graph = run.training.mode == 0
    sizes = Sizes(
        ranks or run.parallel.context_parallel, run.training.batch_size, model.seq_length, model.linear_num_heads,
        model.linear_num_value_heads, model.linear_head_dim, model.linear_value_head_dim,
        layers=max(1, model.layer_types.count("linear_attention")), dtype=model.compute_dtype,
        packed=graph, chunk_size=model.kda_chunk_size, disable_recompute=model.kda_disable_recompute,
        ptp_head_groups=model.kda_ptp_head_groups or None, hybrid_ulysses_degree=model.kda_hybrid_ulysses_degree or None,
    )  # fmt: skip
    return sizes, machine_of(run.training.device_target, graph)


def plan_text(sizes, machine, configured: str) -> str:
    """The table of ``kcp plan``.

    Args:
        sizes: a :class:`kcp.parallel.plan.Sizes`.
        machine: a :class:`kcp.parallel.plan.Machine`.
        configured: the strategy of the configuration.
    """
    from kcp.parallel.plan import choose, compare, one_device_seconds

    s, whole = sizes, one_device_seconds(sizes, machine)
    packing = ", boundaries known at run time" if s.packed else ""
    lines = [
        f"{s.layers} KDA layers over {s.ranks} ranks: {s.batch} x {s.tokens} tokens, {s.num_heads} key and {s.num_v_heads} value heads, "
        f"K {s.head_dim}, V {s.v_head_dim}, {s.dtype}{packing}",
        f"bandwidth {machine.bandwidth:.3g} B/s, latency {machine.latency:.3g} s, {machine.flops:.3g} FLOP/s ({machine.source})",
        "",
        f"{'strategy':<12}{'fwd MB':>10}{'bwd MB':>10}{'moved MB':>10}{'work':>7}{'GFLOP':>10}{'kept MB':>10}{'time ms':>11}{'speedup':>9}",
    ]
    for cost in compare(s, machine):
        if cost.refused:
            lines.append(f"{cost.strategy:<12}no: {cost.refused}")
            continue
        megabytes = "".join(f"{n / 1e6:>10.3f}" for n in (cost.forward_bytes, cost.backward_bytes, cost.physical_bytes))
        seconds = cost.seconds * s.layers
        lines.append(
            f"{cost.strategy:<12}{megabytes}{cost.work:>7.2f}{cost.flops / 1e9:>10.3f}{cost.kept_bytes / 1e6:>10.3f}"
            f"{seconds * 1e3:>11.3f}{whole * s.layers / seconds:>9.2f}"
        )
    lines += ["", f"auto takes {choose(s, machine).strategy}; kda_cp_strategy is {configured}"]
    return "\n".join(lines)


def memory_text(run, ranks: int) -> str:
    """What ``kcp plan`` says about the memory of a run over ``ranks`` context parallel ranks."""
    from kcp.memory import FACTOR, GIB, estimate_memory, memory_of, memory_problem

    run = replace(run, parallel=replace(run.parallel, context_parallel=ranks))
    needed = estimate_memory(run)
    parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in vars(needed).items())
    line = f"memory of a worker at a step's peak, GiB: {needed.total / GIB:.2f} ({parts}), within a factor of {FACTOR:g}"
    problem = memory_problem(run, run.world_size, memory_of(run))
    return line if problem is None else f"{line}\nthis machine alone can't run it: {problem}"


def run_simulate(options: argparse.Namespace) -> int:
    """Print what ``kcp simulate`` found."""
    os.environ.setdefault("GLOG_v", "3")  # MindSpore's warnings would hide the table
    import mindspore as ms

    from kcp.parallel.simulate import MOST_CORE_RANKS, MOST_RANKS

    ms.set_device("CPU")
    ms.runtime.launch_blocking()

    most = MOST_RANKS if options.what == "summaries" else MOST_CORE_RANKS
    if options.ranks > most:
        return refuse(f"--ranks is {options.ranks}; allowed for {options.what}: at most {most}")
    try:
        return {"summaries": _simulate_summaries, "core": _simulate_core, "layer": _simulate_layer}[options.what](options)
    except ValueError as error:
        return refuse(str(error))


def _simulate_summaries(options):
    from kcp.parallel.simulate import summary_errors

    rows = summary_errors(options.ranks, options.heads or 2, options.width, options.decay, options.seed)
    print(f"{'ranks':>6}{'prefix':>12}{'suffix':>12}{'tree':>12}   relative L2 of the last rank's state against float64")
    for ranks, prefix, suffix, tree in rows:
        print(f"{ranks:>6}{prefix:>12.2e}{suffix:>12.2e}{tree:>12.2e}")
    return 0


def _tokens(options):
    return options.tokens or (sum(options.documents) if options.documents else 16 * options.ranks)


def _simulate_core(options):
    from kcp.parallel.simulate import core_errors

    strategy, tokens = options.strategy or "state_scan", _tokens(options)
    errors = core_errors(strategy, options.ranks, tokens, options.heads or 2, options.width, options.decay, options.documents, options.seed)
    print(f"{strategy} over {options.ranks} ranks, {tokens} tokens: relative L2 against one rank")
    for name, value in errors.items():
        print(f"  {name:<14}{value:.2e}")
    print(f"  worst         {max(errors.values()):.2e}")
    return 0


def _simulate_layer(options):
    """The table of ``kcp simulate layer``; 1 if a gate is exceeded."""
    from kcp.parallel.simulate_layer import GATES, LAYER_STRATEGIES, LayerSimulation, random_documents

    ranks, heads, tokens = options.ranks, options.heads or options.ranks, _tokens(options)
    strategies = LAYER_STRATEGIES if options.strategy is None else (options.strategy,)
    sizes = (ranks, tokens, heads, options.width, options.decay)
    simulations = {"one": LayerSimulation(*sizes, None, options.seed)}
    packed = options.documents or random_documents(tokens, ranks, options.seed)
    simulations[f"{len(packed)} packed"] = LayerSimulation(*sizes, packed, options.seed)
    exceeded = []
    print(f"a KDA layer over {ranks} ranks, {tokens} tokens, {heads} heads, K = V = {options.width}: worst relative L2 against one device")
    print(f"{'strategy':<12}{'documents':<11}" + "".join(f"{name:>12}" for name in GATES))
    for strategy in strategies:
        if options.strategy is None and strategy == "ulysses" and heads % ranks:
            print(f"{strategy:<12}no: --heads is {heads}; allowed under ulysses: a multiple of the ranks, {ranks}")
            continue
        for documents, simulation in simulations.items():
            errors = simulation.errors(strategy)
            print(f"{strategy:<12}{documents:<11}" + "".join(f"{errors[name]:>12.2e}" for name in GATES), flush=True)
            exceeded += [f"{strategy}, {documents}: {name} {errors[name]:.2e}" for name, gate in GATES.items() if not errors[name] <= gate]
    print(f"{'':<12}{'gates':<11}" + "".join(f"{gate:>12.0e}" for gate in GATES.values()))
    for line in exceeded:
        print(f"kcp: above the gate: {line}", file=sys.stderr)
    return 1 if exceeded else 0


def _lengths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text}: lengths separated by commas are needed, as in 100,1,219")
    return tuple(int(part) for part in parts)
