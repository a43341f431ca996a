"""The command line: ``kcp train``, ``validate``, ``plan``, ``simulate``, ``generate``, ``report``, ``profile``, ``convert``, ``doctor``,
``selftest``.

Errors of the user are one line ``kcp: error: ...`` each, exit code 2. Nothing heavy is imported here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from kcp import __version__, cli_parallel, cli_see
from kcp.cli_arguments import count, positive, refuse

DESCRIPTION = """\
Trains Kimi Delta Attention models with context parallelism: the tokens of one
sample are shared by several processes, so a sequence may be longer than one
device can hold. A run is described by a MindFormers YAML file."""

EXAMPLES = """\
examples:
  kcp doctor                               what is installed, which kernels serve
  kcp validate configs/tiny_cp2.yaml       check a file, start nothing
  kcp plan configs/tiny_cp2.yaml           what each strategy would cost
  kcp train configs/tiny_cp2.yaml          train: two processes share each sample
  kcp train configs/tiny_1p.yaml --steps 20 --mode pynative
  kcp report output/tiny_cp2               one HTML page about a run
  kcp convert hf-to-kcp DIR OUT            a Hugging Face checkpoint into kcp's
  kcp selftest --device cpu                is everything right on this machine?
  kcp generate OUT --prompt 'import '      continue a text
"""

TRAIN_EXAMPLES = """\
The number of processes is data_parallel * context_parallel of the file's
parallel_config. They are started here, pinned to cores of their own, and ended
together; the first one that fails is named with its last error lines.

output folder:
  metrics.jsonl   one line a step: step, loss, grad_norm, tokens_per_second, ...
  loss.png        the loss curve
  checkpoints/    step_NNNNNNNN, with the callback KcpCheckpoint in the file
  logs/           worker_N.log of each process, scheduler.log, msrun.log

examples:
  kcp train configs/tiny_1p.yaml                   one process
  kcp train configs/tiny_cp2.yaml                  two processes on this machine
  kcp train configs/tiny_cp2.yaml --steps 20       stop after 20 steps
  kcp train configs/tiny_cp2.yaml --resume         go on from the last checkpoint
  kcp train configs/tiny_cp2.yaml --restarts 3     do so after a failure

several machines (the same command on each, with its own --node-rank):
  kcp train CONFIG --worker-num 16 --local-worker-num 8 \\
      --master-addr ADDRESS --master-port 8118 --node-rank 0
"""

VALIDATE_EXAMPLES = """\
Checks sizes, degrees, strategy, precision, data and device settings without
MindSpore; files for NPUs can be checked on any machine. Every problem is one
line: key = value: what is allowed.

examples:
  kcp validate configs/tiny_cp2.yaml
  kcp validate configs/kimi_linear_48b_npu.yaml --world-size 16
"""

CONVERT_EXAMPLES = """\
Both sides hold the same tensors under the same names: every name and shape is
checked, then bytes are copied, one tensor at a time, and bfloat16 stays bfloat16.
A tensor that is missing, extra or mis-shaped is named and nothing is written.

kcp's side: kcp-*.safetensors (load_checkpoint: OUT in a run's YAML) and
model_config.yaml (its section model.model_config).

examples:
  kcp convert hf-to-kcp Kimi-Linear-48B-A3B-Base converted
  kcp convert kcp-to-hf converted back
  kcp convert kcp-to-hf weights back --config configs/tiny_cp2.yaml
"""

DOCTOR_HELP = """\
Prints versions, devices, which backend serves each stage and why not another, and
what of Hyper-Parallel's functions is there. Exit code 1 when training can't work.

--route CONFIG says which way the KDA layers of a run file take on Ascend, and why:
  fused   npu_chunk_kda, forward and backward in two kernels: softplus gates
          without states
  stages  the chain of six stages: lower-bound gates, states, recompute, V-first,
          a final state in the loss, and strategies that exchange states
  other   the sizes, types or mode are not for the kernels; MindSpore operators

examples:
  kcp doctor
  kcp doctor --route configs/kimi_linear_48b_npu.yaml
"""

SELFTEST_HELP = """\
Runs the op, its stages and context parallelism on this machine's device and holds
them to a float64 recurrence, to golden results of a peer, and to one rank; then
times the op. Takes about a minute on two CPU cores. Everything is printed as it
comes, and written to one file: send that back from a machine with NPUs.

  processes           2 (CPU); 2, 4 and 8, as many NPUs as there are (Ascend)
  TP 2 x CP 2         4 processes
  golden results      in $KCP_SHARED/goldens, in a clone's tests/data, or --goldens
  routes and stages   the fused route, the chain of stages, every stage by hand
  one process         2, 4 and 8 ranks in lockstep, every strategy
  precision gate      final state alone in the loss, bfloat16: dk within 1 %

Exit code 0: all passed; 1: something failed; 2: the device is not there.

examples:
  kcp selftest --device cpu
  kcp selftest --device ascend --report atlas-900.md
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        print(f"kcp: error: {message} (see: {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: command line without the program's name; by default this process's.

    Returns:
        Exit code: 0 done, 1 the run failed, 2 wrong input, 130 interrupted.
    """
    options = _parser().parse_args(argv)
    try:
        return options.command(options)
    except KeyboardInterrupt:
        print("kcp: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left (as in `kcp doctor | head`); Python must not complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _train(options: argparse.Namespace) -> int:
    from kcp.checkpoint import FOLDER, find_checkpoint, resume_place
    from kcp.config import ConfigError, load_run_config
    from kcp.data.text import DataError, check_sources
    from kcp.hf.errors import CheckpointError
    from kcp.launch import LaunchError, LaunchOptions
    from kcp.launch_restart import launch_with_restarts
    from kcp.memory import memory_of, memory_problem
    from kcp.train import MODES
    from kcp.weights import weights_of_run

    try:
        run = load_run_config(options.config, options.workers)
        if run.data.dataset_dir:
            check_sources(run.data.dataset_dir)
        weights_of_run(run)
        if options.mode:
            run = replace(run, training=replace(run.training, mode=MODES[options.mode]))
        if run.memory.check and (problem := memory_problem(run, options.local_worker_num or run.world_size, memory_of(run))):
            return refuse(problem)
        output_dir = Path(options.output_dir or run.training.output_dir)
        launch_options = LaunchOptions(
            workers=run.world_size,
            log_dir=output_dir / "logs",
            local_workers=options.local_worker_num,
            master_addr=options.master_addr,
            master_port=options.master_port,
            node_rank=options.node_rank,
            pin=options.pin,
            bind_devices=options.pin and run.training.device_target == "Ascend",
            verbose=options.verbose,
        )
        arguments = [str(Path(options.config).resolve()), "--output-dir", str(output_dir)]
        if options.mode:
            arguments += ["--mode", options.mode]
        if options.steps:
            arguments += ["--steps", str(options.steps)]
        place = resume_place(run, output_dir, options.resume)
        resumed = None if place is None else find_checkpoint(place)
        if launch_options.node_rank == 0:
            print(f"kcp: {_summary(run)}; logs: {launch_options.log_dir}", flush=True)
        return launch_with_restarts(["kcp.train", *arguments], launch_options, output_dir / FOLDER, resumed, options.restarts)
    except (ConfigError, CheckpointError) as error:
        return refuse(*error.problems)
    except (DataError, LaunchError) as error:
        return refuse(str(error))


def _validate(options: argparse.Namespace) -> int:
    from kcp.config import ConfigError, load_run_config

    try:
        run = load_run_config(options.config, options.world_size)
    except ConfigError as error:
        return refuse(*error.problems)
    print(f"kcp: {options.config} is valid: {_summary(run)}")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from kcp.hf import CheckpointError, hf_to_kcp, kcp_to_hf

    try:
        if options.direction == "hf-to-kcp":
            unused = hf_to_kcp(options.source, options.target)
            if unused:
                print(f"kcp: config.json: keys that kcp does not know are not carried over: {', '.join(unused)}")
        else:
            kcp_to_hf(options.source, options.target, options.config, options.spelling)
    except CheckpointError as error:
        return refuse(*error.problems)
    print(f"kcp: {options.target} written")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from kcp.doctor import report

    if options.route is None:
        return report()
    from kcp.config import ConfigError, load_run_config
    from kcp.doctor_ascend import route_lines

    os.environ.setdefault("GLOG_v", "3")
    try:
        run = load_run_config(options.route)
    except ConfigError as error:
        return refuse(*error.problems)
    print("\n".join(route_lines(run)))
    return 0


def _selftest(options: argparse.Namespace) -> int:
    from kcp.selftest.report import run

    if options.goldens is not None and not (Path(options.goldens) / "fla_kda_seed1.npz").exists():
        return refuse(f"--goldens = {options.goldens}: a folder with fla_kda_seed1.npz is needed")
    if options.report is not None and not Path(options.report).resolve().parent.is_dir():
        return refuse(f"--report = {options.report}: a file in a folder that exists is needed")
    return run(options.device, options.report, options.goldens, options.seeds, options.tokens)


def _summary(run) -> str:
    """A run in a line."""
    parallel, model = run.parallel, run.model
    workers = f"{run.world_size} worker" + ("s" if run.world_size > 1 else "")
    degrees = f"data_parallel {parallel.data_parallel} x context_parallel {parallel.context_parallel}"
    strategy = f", {model.kda_cp_strategy}" if parallel.context_parallel > 1 else ""
    tokens = f"{model.seq_length} tokens a sample, {run.local_seq_length} a worker"
    return f"{workers} on {run.training.device_target} ({degrees}{strategy}), {tokens}"


def _parser() -> argparse.ArgumentParser:
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser(prog="kcp", description=DESCRIPTION, epilog=EXAMPLES, **style)
    parser.add_argument("--version", action="version", version=f"kcp {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    train = commands.add_parser("train", help="train from a YAML file", epilog=TRAIN_EXAMPLES, **style)
    train.add_argument("config", metavar="CONFIG", help="MindFormers YAML file")
    train.add_argument(
        "--workers",
        "--worker-num",
        dest="workers",
        type=positive,
        metavar="N",
        help="processes of the whole run; must be data_parallel * context_parallel of CONFIG (default)",
    )
    train.add_argument("--output-dir", metavar="DIR", help="folder for results (default: output_dir of CONFIG)")
    train.add_argument("--mode", choices=("graph", "pynative"), help="execution mode (default: context.mode of CONFIG)")
    train.add_argument("--steps", type=positive, metavar="N", help="stop after N steps")
    train.add_argument("--resume", nargs="?", const="", metavar="DIR", help="go on from a checkpoint (default: the newest one of this run)")
    train.add_argument("--restarts", type=count, default=0, metavar="N", help="after a failure go on from the last checkpoint, N times")
    train.add_argument("--no-pin", dest="pin", action="store_false", help="do not give each process cores of its own")
    train.add_argument("--verbose", action="store_true", help="show all of rank 0's output, not only its progress")
    nodes = train.add_argument_group("several machines")
    nodes.add_argument("--local-worker-num", type=positive, metavar="N", help="processes on this machine")
    nodes.add_argument("--master-addr", default="127.0.0.1", metavar="ADDRESS", help="address of machine 0")
    nodes.add_argument("--master-port", type=positive, metavar="PORT", help="its port (default here: a free one)")
    nodes.add_argument("--node-rank", type=int, default=0, metavar="N", help="number of this machine, from 0")
    train.set_defaults(command=_train)

    validate = commands.add_parser("validate", help="check a YAML file", epilog=VALIDATE_EXAMPLES, **style)
    validate.add_argument("config", metavar="CONFIG", help="MindFormers YAML file")
    validate.add_argument("--world-size", type=positive, metavar="N", help="processes that a launch would provide")
    validate.set_defaults(command=_validate)

    cli_parallel.add_commands(commands, style)
    cli_see.add_commands(commands, style)

    convert = commands.add_parser("convert", help="Hugging Face checkpoints in and out", epilog=CONVERT_EXAMPLES, **style)
    directions = convert.add_subparsers(dest="direction", metavar="DIRECTION", required=True)
    into = directions.add_parser("hf-to-kcp", help="into kcp's safetensors and model_config", epilog=CONVERT_EXAMPLES, **style)
    out = directions.add_parser("kcp-to-hf", help="into config.json and model*.safetensors", epilog=CONVERT_EXAMPLES, **style)
    for direction in (into, out):
        direction.add_argument("source", metavar="DIR", help="folder to read")
        direction.add_argument("target", metavar="OUT", help="folder to make")
    out.add_argument("--config", metavar="YAML", help="file with model.model_config (default: DIR/model_config.yaml)")
    spellings = ("transformers5", "linear_attn_config")
    out.add_argument("--spelling", choices=spellings, default=spellings[0], help="of config.json (default: %(default)s)")
    convert.set_defaults(command=_convert)

    doctor = commands.add_parser("doctor", help="versions, devices, and which backend serves which stage", description=DOCTOR_HELP, **style)
    doctor.add_argument("--route", metavar="CONFIG", help="say which way the KDA layers of this file take on Ascend")
    doctor.set_defaults(command=_doctor)

    selftest = commands.add_parser("selftest", help="is everything right on this machine?", description=SELFTEST_HELP, **style)
    selftest.add_argument("--device", choices=("cpu", "ascend"), required=True, help="what to test")
    selftest.add_argument("--report", metavar="FILE", help="report file (default: kcp-selftest-DEVICE.md)")
    selftest.add_argument("--goldens", metavar="DIR", help="folder with fla_kda_seed1.npz")
    selftest.add_argument("--seeds", type=positive, default=20, metavar="N", help="seeds of the precision gate (default: %(default)s)")
    selftest.add_argument("--tokens", type=positive, metavar="T", help="tokens of the timings (default: 1024, on NPUs 8192)")
    selftest.set_defaults(command=_selftest)
    return parser


if __name__ == "__main__":
    sys.exit(main())
