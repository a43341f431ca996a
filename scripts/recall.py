#!/usr/bin/env python3
"""Trains the associative-recall task of a configuration and draws accuracy by distance, with a window of tokens for comparison.

The run is that of ``kcp train CONFIG`` (same model, data, wrapper, optimizer), started by kcp's launcher in as many processes as CONFIG
asks for; afterwards the ranks answer documents that were not trained on, still sharing every sample, and answer them a second time from
the last WINDOW tokens before each query alone: the same weights, but nothing older can be known.

    python scripts/recall.py [configs/recall_cp2.yaml] [--window 512] [--svg docs/images/recall.svg] [--json recall.json]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST, QUERIES = 4096, 24


def parse(arguments=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("config", nargs="?", default=str(ROOT / "configs" / "recall_cp2.yaml"))
    p.add_argument("--documents", type=int, default=48, help="documents that are answered afterwards")
    p.add_argument("--window", type=int, default=512, help="tokens that the windowed answers see")
    p.add_argument("--svg", default=None, help="picture to write")
    p.add_argument("--json", default=None, help="figures to write")
    p.add_argument("--rank-folder", default=None, help=argparse.SUPPRESS)
    return p.parse_args(arguments)


def worker(args):
    """One rank: trains, then answers its slice of every document, and of the windows if it is the first."""
    import mindspore as ms
    import numpy as np

    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})
    from kcp.config import load_run_config

    run = load_run_config(args.config)
    rank = 0
    if run.world_size > 1:
        from mindspore.communication import get_rank, init

        init()
        rank = get_rank()
    seed = run.training.seed
    ms.set_seed(seed)
    np.random.seed(seed)
    from mindformers.core.optim import AdamW

    from kcp.data.packing import EpochView
    from kcp.data.recall import RecallOptions, RecallSamples
    from kcp.models import KimiLinearConfig, KimiLinearForCausalLM
    from kcp.train_step import KcpTrainOneStepCell

    loader = run.raw["train_dataset"]["data_loader"]
    fields = {name: loader[name] for name in RecallOptions.__dataclass_fields__ if name in loader}
    samples = EpochView(RecallSamples(RecallOptions(**fields)))
    options = run.raw["model"]["model_config"] | {"context_parallel_size": run.parallel.context_parallel}
    model = KimiLinearForCausalLM(KimiLinearConfig(**options))
    batch = run.training.batch_size
    steps = len(samples) // batch
    rates = [run.training.learning_rate * min(1.0, (i + 1) / 20, (steps - i) / (0.3 * steps)) for i in range(steps)]
    optimizer = AdamW(model.trainable_params(), ms.Tensor(rates, ms.float32), betas=(0.9, 0.95), eps=1e-8)
    step = KcpTrainOneStepCell(model, optimizer, max_grad_norm=1.0)
    step.set_train()
    begin, losses = time.perf_counter(), []
    for i in range(steps):
        columns = [np.stack(column) for column in zip(*(samples[i * batch + j] for j in range(batch)), strict=True)]
        losses.append(float(step(*(ms.Tensor(column) for column in columns))[0].asnumpy()))
        if rank == 0 and (i % 20 == 19 or i == 0):
            length = RecallOptions(**fields).document_length(i * batch)
            print(f"step {i + 1}/{steps}  documents of {length}  loss {losses[-1]:.4f}  {time.perf_counter() - begin:.0f} s", flush=True)
    seconds = time.perf_counter() - begin
    step.set_train(False)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    answers = answer(model, args, fields["seq_length"])
    folder = Path(args.rank_folder)
    found = {"answers": answers, "seconds": seconds, "steps": steps, "losses": losses, "tokens": steps * batch * fields["seq_length"]}
    found["windowed"] = answer_windows(model, args, options, fields["seq_length"])
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    model.group.collectives.all_reduce(ms.Tensor([1.0]), "state").asnumpy()  # nobody leaves before the others are done
    return 0


def documents(args, length):
    from kcp.data.recall import evaluation_document

    return [evaluation_document(seed, length, QUERIES, LONGEST) for seed in range(args.documents)]


def answer(model, args, length):
    """``[distance, right]`` of the queries in this rank's slice, all ranks answering together."""
    import mindspore as ms
    import numpy as np

    begin, end = model.group.slice_bounds(length)
    found = []
    for tokens, labels, distance in documents(args, length):
        said = model.logits(ms.Tensor(tokens[None])).asnumpy()[0].argmax(-1)
        for at in np.flatnonzero(distance[begin:end]):
            found.append([int(distance[begin + at]), bool(said[at] == labels[begin + at])])
    return found


def answer_windows(trained, args, options, length):
    """The same from the last ``args.window`` tokens before each query; every rank answers some of the documents, alone."""
    import mindspore as ms
    import numpy as np

    from kcp.data.recall import KEYS, VALUES
    from kcp.models import KimiLinearConfig, KimiLinearForCausalLM
    from kcp.parallel.group import CpGroup

    one = {"context_parallel_size": 1, "kda_cp_strategy": "none", "mla_cp_strategy": "none", "seq_length": args.window}
    model = KimiLinearForCausalLM(KimiLinearConfig(**(options | one)), CpGroup.single())
    for mine, theirs in zip(model.get_parameters(), trained.get_parameters(), strict=True):
        mine.set_data(theirs)
    found = []
    for tokens, labels, distance in documents(args, length)[trained.group.rank :: trained.group.size]:
        places = np.flatnonzero(distance)
        windows = np.full((len(places), args.window), KEYS + VALUES, np.int32)  # a filler where the document has not begun
        for row, at in enumerate(places):
            seen = tokens[max(0, at + 1 - args.window) : at + 1]
            windows[row, args.window - len(seen) :] = seen
        said = model.logits(ms.Tensor(windows)).asnumpy()[:, -1].argmax(-1)
        found += [[int(distance[at]), bool(said[row] == labels[at])] for row, at in enumerate(places)]
    return found


def by_octave(answers):
    """``[from, to, right, asked]`` for distances of each octave up to 4,096."""
    rows = []
    low = 4
    while low < LONGEST:
        here = [right for distance, right in answers if low <= distance < 2 * low or (2 * low == LONGEST and distance == LONGEST)]
        rows.append([low, 2 * low, sum(here), len(here)])
        low *= 2
    return rows


def draw(figures, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kcp"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
    for name, label, style in (
        ("accuracy", f"KDA, {figures['context_parallel']} ranks sharing each sample", "o-"),
        ("windowed", f"the same model, last {figures['window']} tokens only", "s--"),
    ):
        rows = figures[name]
        axes.plot([(a * b) ** 0.5 for a, b, _, _ in rows], [100 * right / asked for _, _, right, asked in rows], style, label=label)
    axes.axhline(100 / 64, color="grey", linewidth=0.8, linestyle=":", label="guessing")
    axes.axvline(figures["window"], color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens between the value and its query")
    axes.set_ylabel("right answers (%)")
    axes.set_ylim(0, 104)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left")
    figure.savefig(path, format="svg", metadata={"Date": None})


def main():
    args = parse()
    if args.rank_folder:
        return worker(args)
    from kcp.config import load_run_config
    from kcp.launch import LaunchOptions, launch

    run = load_run_config(args.config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(Path(__file__).resolve()), str(Path(args.config).resolve()), "--rank-folder", folder]
        arguments += ["--documents", str(args.documents), "--window", str(args.window)]
        code = launch(arguments, LaunchOptions(workers=run.world_size, log_dir=Path(folder) / "logs", verbose=True))
        if code:
            return code
        ranks = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(run.world_size)]
    answers = [pair for rank in ranks for pair in rank["answers"]]
    windowed = [pair for rank in ranks for pair in rank["windowed"]]
    figures = {
        "context_parallel": run.parallel.context_parallel, "strategy": run.model.kda_cp_strategy, "window": args.window,
        "seconds": ranks[0]["seconds"], "steps": ranks[0]["steps"], "tokens": ranks[0]["tokens"],
        "accuracy": by_octave(answers), "windowed": by_octave(windowed), "losses": ranks[0]["losses"],
    }  # fmt: skip
    print(f"trained in {figures['seconds']:.0f} s, {figures['steps']} steps, {figures['tokens']} tokens")
    print(f"{'distance':>12} {'asked':>6} {'right %':>8} {'window %':>9}")
    for (low, high, right, asked), (_, _, near, _) in zip(figures["accuracy"], figures["windowed"], strict=True):
        print(f"{low:>6}-{high:<5} {asked:>6} {100 * right / asked:>8.1f} {100 * near / asked:>9.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps(figures) + "\n")
    if args.svg:
        draw(figures, args.svg)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GLOG_v", "3")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    sys.exit(main())
