"""Context parallelism beside other axes of a mesh: heads sharded by tensor parallelism, rows by data parallelism, in sub-groups."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from core_cases import TOKEN_INPUTS, CoreProblem, check, run_explicit

from kcp.parallel import lockstep
from kcp.parallel.subgroups import part

HEAD_AXIS = {**dict.fromkeys((*TOKEN_INPUTS, "out", "d_out"), 2), **dict.fromkeys(("a_log", "dt_bias"), 0)}


@dataclass(frozen=True)
class Shard(CoreProblem):
    """One of two equal parts of a problem, by heads or by rows."""

    whole: CoreProblem | None = None
    number: int = 0
    by_heads: bool = True

    def arrays(self):
        out = {}
        for name, x in self.whole.arrays().items():
            axis = HEAD_AXIS.get(name, 1) if self.by_heads else 0
            rows_only = not self.by_heads and name in ("a_log", "dt_bias")
            out[name] = x if rows_only else np.split(x, 2, axis)[self.number]
        return out


def _shards(whole, by_heads):
    half = {"num_heads": whole.num_heads // 2, "num_v_heads": whole.num_v_heads // 2} if by_heads else {"batch": whole.batch // 2}
    fields = {**{f: getattr(whole, f) for f in CoreProblem.__dataclass_fields__}, **half}
    return [Shard(**fields, whole=whole, number=n, by_heads=by_heads) for n in range(2)]


@pytest.mark.parametrize("strategy", ["state_scan", "ptp_chain", "ulysses"])
def test_heads_sharded_by_tensor_parallelism(strategy):
    """World rank = 2 cp + tp: each shard's a_log, dt_bias and states hold its heads, and its CP group never meets the other shard."""
    whole = CoreProblem(lengths=(9, 14), strategy=strategy, num_heads=4, num_v_heads=8)
    shards = _shards(whole, by_heads=True)

    def body(world):
        shard, rank = world.rank % 2, world.rank // 2
        group = part(world, range(shard, 4, 2), whole.lengths)
        assert group.rank == rank
        return run_explicit(shards[shard], group)

    results = lockstep.run(4, body)
    merged = []
    for rank in range(2):
        pair = results[2 * rank], results[2 * rank + 1]
        merged.append({name: np.concatenate([r[name] for r in pair], HEAD_AXIS.get(name, 1)) for name in pair[0]})
    check(whole, merged)


def test_rows_shared_by_data_parallelism():
    """World rank = 2 dp + cp: parameter gradients summed once over all four ranks (or reduced and scattered) are those of one device."""
    whole = CoreProblem(lengths=(9, 14), strategy="state_scan", batch=2)
    shards = _shards(whole, by_heads=False)

    def body(world):
        replica = world.rank // 2
        return run_explicit(shards[replica], part(world, range(2 * replica, 2 * replica + 2), whole.lengths))

    results = lockstep.run(4, body)
    merged = []
    for rank in range(2):
        pair = results[rank], results[2 + rank]
        sums = {name: pair[0][name] + pair[1][name] for name in ("a_log", "dt_bias")}
        merged.append({**{name: np.concatenate([r[name] for r in pair], 0) for name in pair[0]}, **sums})
    check(whole, merged)


def test_kcp_reduces_over_its_own_group_alone():
    whole = CoreProblem(lengths=(9, 14), strategy="state_scan", batch=2, options={"reduce_replicated_grads": "kcp"})
    shards = _shards(whole, by_heads=False)

    def body(world):
        replica = world.rank // 2
        return run_explicit(shards[replica], part(world, range(2 * replica, 2 * replica + 2), whole.lengths))

    results = lockstep.run(4, body)
    for replica in range(2):
        np.testing.assert_array_equal(results[2 * replica]["a_log"], results[2 * replica + 1]["a_log"])
    trainer = replace(whole, options={"reduce_replicated_grads": "trainer"})
    terms = trainer.truth()
    total = results[0]["a_log"] + results[2]["a_log"]
    assert np.all(np.abs(total - terms["a_log"]) <= 1e-5 * terms["a_log_terms"])
