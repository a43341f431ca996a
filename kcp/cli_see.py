"""``kcp generate``, ``kcp report`` and ``kcp profile``: what a model says, how a run went, where a step's time goes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kcp.cli_arguments import number, positive, refuse

GENERATE_HELP = """\
Continues a prompt with a recurrent state: a KDA layer keeps one state a head
however long the text is, an MLA layer one latent a token.

FOLDER is a Hugging Face checkpoint, the output folder of a run (its newest
checkpoint), or kcp's safetensors with model_config.yaml (kcp convert). Text is read by
its tokenizer.json, or as bytes without one. --temperature 0 takes the most likely
token each time; otherwise tokens are drawn.

examples:
  kcp generate converted --prompt 'def main('
  kcp generate converted --prompt 'import ' --temperature 0.8 --top-k 40 --seed 1
"""

REPORT_HELP = """\
Writes one HTML page about a run: loss, throughput, gradient norm, health of the
KDA layers and balance of the experts where the run logged them, the plan of its
strategy, its configuration. The page loads nothing from anywhere.

examples:
  kcp report output/tiny_cp2
  kcp report output/tiny_cp2 --config configs/tiny_cp2.yaml --output page.html
"""

PROFILE_HELP = """\
Starts CONFIG's workers, times every kind of layer alone (compiled, with the run's
shapes, all ranks taking part) and the whole training step, and counts what a layer
exchanges: bytes by purpose, and the time that as many bytes take.

examples:
  kcp profile configs/tiny_hybrid_cp2.yaml
  kcp profile configs/tiny_1p.yaml --steps 20 --json profile.json
"""


def add_commands(commands, style: dict) -> None:
    """Add the three subcommands to the parser of :mod:`kcp.cli`."""
    generate = commands.add_parser("generate", help="continue a prompt", description=GENERATE_HELP, **style)
    generate.add_argument("folder", metavar="FOLDER", help="folder with the model")
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    generate.add_argument("--tokens", type=positive, default=128, metavar="N", help="tokens to make (default: %(default)s)")
    generate.add_argument("--temperature", type=number, default=0.0, metavar="T", help="0: most likely token (default); 1: as trained")
    generate.add_argument("--top-k", type=positive, default=0, metavar="K", help="draw among the K most likely tokens (default: all)")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: %(default)s)")
    generate.add_argument("--config", metavar="YAML", help="file with model.model_config (default: FOLDER's own)")
    generate.set_defaults(command=run_generate)

    report = commands.add_parser("report", help="one HTML page about a run", description=REPORT_HELP, **style)
    report.add_argument("run_dir", metavar="RUN_DIR", help="output folder of a run, with metrics.jsonl")
    report.add_argument("--config", metavar="YAML", help="the run's file (default: RUN_DIR/config.yaml if there is one)")
    report.add_argument("--output", metavar="FILE", help="page to write (default: RUN_DIR/report.html)")
    report.set_defaults(command=run_report)

    profile = commands.add_parser("profile", help="where a training step's time goes", description=PROFILE_HELP, **style)
    profile.add_argument("config", metavar="CONFIG", help="MindFormers YAML file")
    profile.add_argument("--steps", type=positive, default=5, metavar="N", help="repetitions that are measured (default: %(default)s)")
    profile.add_argument("--json", metavar="FILE", help="write all figures to this file")
    profile.set_defaults(command=run_profile)


def run_generate(options: argparse.Namespace) -> int:
    """Print the continuation of a prompt."""
    os.environ.setdefault("GLOG_v", "3")
    from kcp.generate import run
    from kcp.hf.errors import CheckpointError

    try:
        run(
            Path(options.folder), options.prompt, options.tokens, options.temperature, options.top_k, options.seed,
            Path(options.config) if options.config else None,
        )  # fmt: skip
    except CheckpointError as error:
        return refuse(*error.problems)
    except ValueError as error:
        return refuse(str(error))
    return 0


def run_report(options: argparse.Namespace) -> int:
    """Write the page of a run."""
    from kcp.config import ConfigError
    from kcp.report import ReportError, write_report

    try:
        page = write_report(Path(options.run_dir), options.config, options.output)
    except ConfigError as error:
        return refuse(*error.problems)
    except ReportError as error:
        return refuse(str(error))
    print(f"kcp: {page} written")
    return 0


def run_profile(options: argparse.Namespace) -> int:
    """Print where a step's time goes."""
    os.environ.setdefault("GLOG_v", "3")
    from kcp.config import ConfigError, load_run_config

    try:
        run = load_run_config(options.config)
    except ConfigError as error:
        return refuse(*error.problems)
    if run.training.device_target != "CPU":
        return refuse(f"context.device_target = {run.training.device_target!r}: kcp profile runs on the CPU; use MindSpore's own profiler")
    from kcp.launch import LaunchError
    from kcp.profile import profile_run, profile_text

    try:
        figures = profile_run(run, options.steps)
    except LaunchError as error:
        return refuse(str(error))
    print(profile_text(figures))
    if options.json:
        import json

        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0
