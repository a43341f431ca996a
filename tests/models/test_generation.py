"""Generation: the recurrent state gives what the whole sequence gives, and does not grow; draws; the command line."""

import io
import shutil

import mindspore as ms
import numpy as np
import pytest
from hf_cases import golden_folder, golden_results, random_tensors, relative, write_checkpoint
from mindspore import Tensor

from kcp.cli import main
from kcp.generate import run
from kcp.hf import CheckpointError, hf_to_kcp
from kcp.models import load_hf
from kcp.models.kimi_linear.generation import KdaState, choose, extend, generate, new_state, state_bytes


@pytest.fixture(autouse=True)
def _device(cpu_device):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return cpu_device


@pytest.fixture(scope="module")
def golden(cpu_device):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return load_hf(golden_folder(), seq_length=150)


def test_tokens_one_by_one_give_the_logits_of_transformers(golden):
    want = golden_results()
    ids, state = want["input_ids"].astype(np.int32), new_state(golden)
    first, sizes = 70, []
    extend(golden, Tensor(ids[:, :first]), state)
    for t in range(first, first + 8):
        logits = extend(golden, Tensor(ids[:, t : t + 1]), state).asnumpy()
        assert relative(logits, want["logits"][:, t]) <= 1e-5
        sizes.append(state_bytes([entry for entry in state if isinstance(entry, KdaState)]))
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("cut", [1, 3, 64, 65])
def test_the_prompt_may_come_in_pieces(golden, cut):
    ids = golden_results()["input_ids"].astype(np.int32)[:, :90]
    whole, pieces = new_state(golden), new_state(golden)
    want = extend(golden, Tensor(ids), whole).asnumpy()
    extend(golden, Tensor(ids[:, :cut]), pieces)
    assert relative(extend(golden, Tensor(ids[:, cut:]), pieces).asnumpy(), want) <= 1e-5


def test_greedy_tokens_are_the_teacher_forced_argmax(golden):
    prompt = golden_results()["input_ids"].astype(np.int32)[:, :20]
    made = np.stack(list(generate(golden, prompt, 12)), 1)
    whole = np.concatenate([prompt, made], 1)
    padded = np.pad(whole, ((0, 0), (0, 150 - whole.shape[1])))
    logits = golden.logits(Tensor(padded)).asnumpy()[:, 19:31]
    np.testing.assert_array_equal(made, logits.argmax(-1))
    assert len(np.unique(made)) > 1


def test_draws_follow_temperature_and_top_k():
    logits = np.tile(np.log([0.5, 0.3, 0.15, 0.05]), (20000, 1))
    rng = np.random.default_rng(0)
    counts = np.bincount(choose(logits, 1.0, 0, rng), minlength=4) / len(logits)
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.015)
    counts = np.bincount(choose(logits, 1.0, 2, rng), minlength=4) / len(logits)
    np.testing.assert_allclose(counts, [0.625, 0.375, 0, 0], atol=0.015)
    sharp = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    counts = np.bincount(choose(logits, 0.5, 0, rng), minlength=4) / len(logits)
    np.testing.assert_allclose(counts, sharp / sharp.sum(), atol=0.015)
    assert (choose(logits, 0.0, 0, rng) == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": np.zeros((1, 0), np.int32)}, r"prompt has shape \(1, 0\)"),
        ({"prompt": np.array([[5, 259]])}, "prompt holds token 259; allowed: 0 to 258"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": -2}, "top_k is -2"),
    ],
)
def test_refusals(golden, options, message):
    with pytest.raises(ValueError, match=message):
        list(generate(golden, **({"prompt": np.array([[1]]), "num_tokens": 1} | options)))


def test_all_kinds_of_folder_say_the_same(tmp_path):
    hf_to_kcp(golden_folder(), tmp_path / "kcp")
    # the output folder of a run: its newest checkpoint, whose weights the index names
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000012"
    shutil.copytree(tmp_path / "kcp", checkpoint)
    (checkpoint.parent / "step_00000006").mkdir()
    texts = [run(folder, "def f(", 10, stream=io.StringIO()) for folder in (golden_folder(), tmp_path / "kcp", tmp_path / "run")]
    assert texts[0] == texts[1] == texts[2]
    drawn = [run(tmp_path / "kcp", "def f(", 10, 1.0, 20, seed, stream=io.StringIO()) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_command_line_refuses_what_is_no_model(tmp_path, capsys):
    assert main(["generate", str(tmp_path / "none"), "--prompt", "a"]) == 2
    assert "no such folder" in capsys.readouterr().err
    write_checkpoint(tmp_path / "hf", random_tensors())
    assert main(["generate", str(tmp_path / "hf"), "--prompt", "a"]) == 2
    assert "a vocabulary of 23 is too small for bytes" in capsys.readouterr().err
    shutil.copy(next((tmp_path / "hf").glob("*.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not say what model it is"):
        run(tmp_path, "a", 1)
