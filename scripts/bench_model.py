#!/usr/bin/env python3
"""Times a training step of a hybrid Kimi-Linear, kcp in graph mode against transformers, from the same weights on the same tokens.

A step is forward, backward, clipping by the global norm and AdamW, as each side's users would write it. Both sides stay loaded in a
process of their own and take their steps in turn, kcp several for each of the peer's; medians are compared, and the losses of the first
step too, which must agree for the comparison to mean anything.

    python scripts/bench_model.py --peer-python PYTHON [--tokens 2048] [--rounds 5] [--threads 2] [--json out.json]

PYTHON is an interpreter with transformers >= 5.24 and torch. Without it kcp is timed alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PER_ROUND = 5  # kcp's steps for one of the peer's
MODEL = {
    "vocab_size": 259, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "linear_num_heads": 4, "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
    "num_attention_heads": 4, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 256,
    "routed_scaling_factor": 2.446, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258,
}  # fmt: skip
LEARNING_RATE = 1e-3


def parse():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--tokens", type=int, default=2048, help="tokens of the one sample of a step")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--warm-up", type=int, default=1, help="rounds that are not counted")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--peer-python", default=None, help="interpreter with transformers and torch")
    p.add_argument("--json", default=None, help="write all figures to this file")
    p.add_argument("--profile", action="store_true", help="print kcp's time by operator and by layer instead")
    p.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    return p.parse_args()


def kcp_worker(args):
    """Builds the model, writes it for the peer, then takes a step for every line on stdin."""
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor

    ms.set_device("CPU")
    ms.runtime.launch_blocking()
    ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})
    ms.set_seed(1)
    np.random.seed(1)
    from mindformers.core.optim import AdamW

    from kcp.hf.convert import kcp_to_hf
    from kcp.models import KimiLinearConfig, KimiLinearForCausalLM
    from kcp.train_step import KcpTrainOneStepCell

    folder = Path(args.worker)
    model = KimiLinearForCausalLM(KimiLinearConfig(seq_length=args.tokens, **MODEL))
    source = folder / "kcp"
    source.mkdir()
    write_safetensors(source / "kcp.safetensors", {p.name: p.asnumpy() for p in model.get_parameters()})
    config = source / "run.yaml"
    config.write_text(json.dumps({"model": {"model_config": {"model_type": "kimi_linear", "seq_length": args.tokens, **MODEL}}}))
    kcp_to_hf(source, folder / "hf", config)
    ids = np.load(folder / "ids.npy")
    labels = np.concatenate([ids[:, 1:], np.full((1, 1), -100, np.int32)], 1).astype(np.int32)
    inputs = Tensor(ids), Tensor(labels), Tensor((labels >= 0).astype(np.int32))
    optimizer = AdamW(model.trainable_params(), LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)
    step = KcpTrainOneStepCell(model, optimizer, max_grad_norm=1.0)
    step.set_train()

    def take():
        return float(step(*inputs)[0].asnumpy())

    serve(take, sum(int(np.prod(p.shape)) for p in model.get_parameters()))


def write_safetensors(path, tensors):
    from safetensors.numpy import save_file

    save_file(tensors, str(path))


PEER = r"""
import json, sys, time, numpy as np, torch
from transformers import AutoModelForCausalLM
folder, threads, rate = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(folder + "/hf", dtype=torch.float32)
model.train()
ids = torch.from_numpy(np.load(folder + "/ids.npy")).long()
optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
def take():
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss)
import transformers
print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "transformers": transformers.__version__,
                  "torch": torch.__version__, "attention": model.config._attn_implementation}), flush=True)
for line in sys.stdin:
    begin = time.perf_counter()
    loss = take()
    print(json.dumps({"seconds": time.perf_counter() - begin, "loss": loss}), flush=True)
"""


def serve(take, parameters):
    print(json.dumps({"parameters": parameters}), flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        loss = take()
        print(json.dumps({"seconds": time.perf_counter() - begin, "loss": loss}), flush=True)


class Side:
    """One side's process."""

    def __init__(self, command, env):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.about = self._read()
        self.results = []

    def _read(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.process.args[0]} ended with {self.process.wait()}")

    def step(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.results.append(self._read())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def main():
    args = parse()
    if args.worker:
        kcp_worker(args)
        return
    import numpy as np

    env = dict(os.environ, KCP_NUM_THREADS=str(args.threads), GLOG_v="3")
    env["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]).strip(os.pathsep)
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "ids.npy", np.random.default_rng(0).integers(0, 256, (1, args.tokens)).astype(np.int32))
        ours = Side([sys.executable, __file__, "--tokens", str(args.tokens), "--worker", folder], env)
        peer = None
        if args.peer_python:
            peer_env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            peer = Side([args.peer_python, "-c", PEER, folder, str(args.threads), str(LEARNING_RATE)], peer_env)
        for _ in range(args.warm_up + args.rounds):
            for _ in range(PER_ROUND):
                ours.step()
            if peer:
                peer.step()
        ours.close()
        if peer:
            peer.close()
    report(args, ours, peer)


def report(args, ours, peer):
    def summary(side, skip):
        seconds = [result["seconds"] for result in side.results[skip:]]
        median = statistics.median(seconds)
        return {"seconds": median, "best": min(seconds), "worst": max(seconds), "tokens_per_second": args.tokens / median,
                "first_losses": [result["loss"] for result in side.results[:3]], **side.about}  # fmt: skip

    figures = {"tokens": args.tokens, "threads": args.threads, "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0],
               "model": MODEL, "kcp": summary(ours, args.warm_up * PER_ROUND)}  # fmt: skip
    if peer:
        figures["transformers"] = summary(peer, args.warm_up)
        figures["ratio"] = figures["transformers"]["seconds"] / figures["kcp"]["seconds"]
    for name in ("kcp", "transformers"):
        if name in figures:
            f = figures[name]
            print(f"{name:13s} {f['tokens_per_second']:9.1f} tokens/s  {f['seconds']:8.3f} s a step ({f['best']:.3f} to {f['worst']:.3f})"
                  f"  first losses {', '.join(f'{loss:.6f}' for loss in f['first_losses'])}")  # fmt: skip
    if peer:
        print(f"kcp is {figures['ratio']:.1f} times as fast")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.append(str(ROOT))
    main()
