"""msrun worker: whole layers and models on this rank's slice; results are saved in a folder for the test to judge."""

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

from layer_cases import Case, run  # noqa: E402

from kcp.parallel import CpGroup  # noqa: E402

folder = Path(sys.argv[1])
for number, fields in enumerate(json.loads((folder / "cases.json").read_text())):
    results = run(Case(**fields), CpGroup.world)
    np.savez(folder / f"result_{number}_{CpGroup.world().rank}.npz", **results)
