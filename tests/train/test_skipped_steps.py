"""A whole run on two context parallel ranks of which one has a bad gradient now and then, and at last too often."""

from pathlib import Path

import pytest
import yaml
from _msrun import WorkerError, run_workers
from _runs import read_metrics, write_config

from kcp.checkpoint import MODEL, OPTIMIZER, read_checkpoint

WORKER = Path(__file__).with_name("_poison_worker.py")


@pytest.mark.ci
def test_steps_are_skipped_counted_and_too_many_in_a_row_end_the_run(tmp_path):
    path = write_config(tmp_path, cp=2, strategy="state_scan")
    run = yaml.safe_load(path.read_text())
    run["callbacks"] = [{"type": "KcpCheckpoint", "save_steps": 1, "keep_last": 0}]
    path.write_text(yaml.safe_dump(run))
    with pytest.raises(WorkerError) as caught:
        run_workers(WORKER, 2, [str(path), "--steps", "12", "--mode", "pynative"], 200, cwd=tmp_path)
    said = "kcp: error: step 8: gradients were not finite in 3 steps in a row (max_skipped_steps); last loss "
    assert all(said in output and "Traceback" not in output for output in caught.value.outputs)
    assert "SKIPPED (5 so far): gradients are not finite" in caught.value.outputs[0]
    records = read_metrics(tmp_path)
    assert [record["skipped"] for record in records] == [False, False, True, True, False, True, True, True]
    assert all(record["loss"] is not None for record in records), "the loss itself was finite"
    folders = [tmp_path / "out" / "checkpoints" / f"step_{step:08d}" for step in range(1, 8)]
    checkpoints = [read_checkpoint(folder) for folder in folders]
    assert [checkpoint.state["counters"]["skipped"] for checkpoint in checkpoints] == [0, 0, 1, 2, 2, 3, 4]
    for name in (MODEL, OPTIMIZER):
        contents = [(folder / name).read_bytes() for folder in folders]
        assert contents[1] == contents[2] == contents[3] and contents[4] == contents[5] == contents[6], name
        assert len(set(contents)) == 3, name
