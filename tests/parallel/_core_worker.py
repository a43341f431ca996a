"""msrun worker: KdaCore at this rank for the problems of a folder, each twice; results are saved there for the test to judge."""

import json
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore.communication import init

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[2]))

ms.set_device("CPU")
ms.runtime.launch_blocking()
init()

from core_cases import CoreProblem, run_autodiff  # noqa: E402

from kcp.parallel import CpGroup  # noqa: E402


def tuples(rows):
    """JSON lists as the tuples they were."""
    return tuple(map(tuples, rows)) if isinstance(rows, list) else rows


folder, mode = Path(sys.argv[1]), sys.argv[2]
for number, fields in enumerate(json.loads((folder / "problems.json").read_text())):
    problem = CoreProblem(**{name: tuples(value) for name, value in fields.items()})
    group = CpGroup.world(slice_lengths=problem.lengths)
    states = problem.with_initial_state or problem.with_final_state
    results = run_autodiff(problem, group, jit=mode == "graph", host_boundaries=states, twice=True)
    np.savez(folder / f"result_{number}_{group.rank}.npz", **results)
