"""What every process of the self-test runs: KdaCore over its slice against one rank, on the launch's real collectives.

``python -m`` target of :mod:`kcp.launch`; writes ``errors_RANK.json`` into its folder: ``{strategy: {tensor: relative L2 error}}``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

TOKENS_A_RANK = 40
_TOKENS = ("query", "key", "value", "gate", "beta")


def main(argv: list[str]) -> int:
    """Run the strategies of the command line and write this process's errors."""
    parser = argparse.ArgumentParser(prog="kcp.selftest.ranks")
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--strategies", required=True)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    options = parser.parse_args(argv)

    import mindspore as ms
    from mindspore.communication import init

    ms.set_device(options.device)
    if options.device == "CPU":
        ms.runtime.launch_blocking()
    init()

    from kcp.parallel import CpGroup
    from kcp.parallel.subgroups import part

    world = CpGroup.world()
    shards = options.tensor_parallel
    group = part(world, range(world.rank % shards, world.size, shards))
    found = {name: _errors(name, group, world.rank % shards, shards, options.device) for name in options.strategies.split(",")}
    (Path(options.folder) / f"errors_{world.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


def _inputs(group_size: int, shards: int, width: int) -> dict[str, np.ndarray]:
    """The same numbers in every process: all tokens, all heads."""
    rng = np.random.default_rng(group_size)
    heads, tokens = group_size * shards, TOKENS_A_RANK * group_size
    token, state = (1, tokens, heads, width), (1, heads, width, width)
    shapes = dict.fromkeys(("query", "key", "value", "gate"), token) | {"beta": token[:3], "initial_state": state, "d_final": state}
    x = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    x["gate"] -= 5.0
    return x | {"d_out": rng.standard_normal(token).astype(np.float32), "a_log": np.zeros(heads, np.float32)}


def _errors(strategy: str, group, shard: int, shards: int, device: str) -> dict[str, float]:
    import mindspore as ms
    from mindspore import Tensor, ops

    from kcp.layers import KdaCore, KdaCoreConfig
    from kcp.parallel import CpGroup
    from kcp.parallel.traffic import PARAMETER

    dtype, width = (ms.float32, 32) if device == "CPU" else (ms.bfloat16, 128)
    x, heads = _inputs(group.size, shards, width), group.size  # heads of this shard
    own = slice(shard * heads, (shard + 1) * heads)
    x = {name: v[own] if name == "a_log" else v[:, own] if name in ("initial_state", "d_final") else v[:, :, own] for name, v in x.items()}

    def run(kind, ranks, begin, end, share):
        core = KdaCore(KdaCoreConfig(heads, heads, width, width, strategy=kind, safe_gate=True), ranks)
        local = {n: Tensor(np.ascontiguousarray(x[n][:, begin:end])).astype(dtype) for n in _TOKENS}
        d_out, d_final = Tensor(np.ascontiguousarray(x["d_out"][:, begin:end])), Tensor(x["d_final"] / share)

        def loss(q, k, v, g, beta, a_log, initial):
            out, final = core(q, k, v, g, beta, a_log, None, initial)
            return (out.astype(ms.float32) * d_out).sum() + (final * d_final).sum(), out, final

        (_, out, final), grads = ms.value_and_grad(loss, tuple(range(7)), has_aux=True)(
            *local.values(), Tensor(x["a_log"]), Tensor(x["initial_state"])
        )
        return {"out": out, "final_state": final, **dict(zip((*_TOKENS, "a_log", "initial_state"), grads, strict=True))}

    begin = group.rank * TOKENS_A_RANK
    got = run(strategy, group, begin, begin + TOKENS_A_RANK, group.size)
    got["a_log"] = group.collectives.all_reduce(ops.depend(got["a_log"], got["query"]), PARAMETER)
    want = run("none", CpGroup.single(), 0, TOKENS_A_RANK * group.size, 1)
    found = {}
    for name, value in got.items():
        expected = want[name].astype(ms.float32).asnumpy()
        if name in ("out", *_TOKENS):
            expected = expected[:, begin : begin + TOKENS_A_RANK]
        difference = value.astype(ms.float32).asnumpy().astype(np.float64) - expected
        found[name] = float(np.linalg.norm(difference) / np.linalg.norm(expected))
    return found
