"""Output folders that can't be written: one line that names the file, and no training without its results.

What stands in the way here is a file or a folder of the same name, which stops root too, as permissions would not.
"""

import io
import os
from types import SimpleNamespace

import pytest
from _runs import write_config

from kcp import train
from kcp.monitor import METRICS_FILE, KcpMonitor, replace_text
from kcp.outputs import OutputError, writing


def refusal(path, folder):
    """What a worker in this process can't write, in a line."""
    with pytest.raises(OutputError) as caught:
        train.main([str(path), "--output-dir", str(folder)])
    (line,) = str(caught.value).splitlines()
    return line


def test_a_file_where_the_output_folder_should_be(tmp_path):
    path = write_config(tmp_path)
    (tmp_path / "file").write_text("mine")
    assert refusal(path, tmp_path / "file") == f"{tmp_path / 'file'}: can't be written: File exists"
    assert refusal(path, tmp_path / "file" / "below") == f"{tmp_path / 'file' / 'below'}: can't be written: Not a directory"
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_system_that_takes_no_files(tmp_path):
    assert refusal(write_config(tmp_path), "/proc/kcp").startswith("/proc/kcp: can't be written: ")


@pytest.mark.parametrize("name", ["config.yaml", "mindformers_rank0.log"])
def test_a_folder_where_a_file_should_be(tmp_path, name):
    path = write_config(tmp_path)
    folder = tmp_path / "results"
    (folder / name).mkdir(parents=True)
    assert refusal(path, folder) == f"{folder / name}: can't be written: Is a directory"


def test_the_worker_says_it_in_one_line_and_ends_with_1(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as left:
        train.run_worker([str(write_config(tmp_path)), "--output-dir", str(tmp_path / "file")])
    assert left.value.code == 1
    assert capsys.readouterr().err == f"kcp: error: {tmp_path / 'file'}: can't be written: File exists\n"


def test_a_disk_that_fills_up_while_metrics_are_written(tmp_path):
    """``/dev/full`` refuses every byte, as a full disk does."""
    monitor = KcpMonitor(tmp_path, 128, stream=io.StringIO())
    network = SimpleNamespace(max_skipped_steps=2)
    params = SimpleNamespace(epoch_num=1, batch_num=5, train_network=network, net_outputs=(1.0, False, 1.0, 1e-3, 0.5))
    context = SimpleNamespace(original_args=lambda: params, request_stop=lambda: None)
    monitor.on_train_begin(context)
    (tmp_path / METRICS_FILE).unlink()
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    monitor.on_train_step_begin(context)
    with pytest.raises(OutputError) as caught:
        monitor.on_train_step_end(context)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / METRICS_FILE}: can't be written: No space left on device, ") and text.endswith(" bytes are free")


def test_a_file_that_is_replaced_stays_when_the_new_one_can_not_be_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("old")
    (tmp_path / ".metrics.jsonl.new").mkdir()
    with pytest.raises(OutputError, match="Is a directory"):
        replace_text(path, "new")
    assert path.read_text() == "old"


def test_other_errors_pass():
    with pytest.raises(ValueError, match="mine"), writing(os.devnull):
        raise ValueError("mine")
