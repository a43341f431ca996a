"""What a configuration may say, and the one line for each thing that it may not."""

import copy
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml
from hf_cases import RELEASED

from kcp.config import ConfigError, load_run_config
from kcp.config_yaml import MAX_FILE_BYTES, read_yaml
from kcp.hf import expected_shapes, model_options_from_json

CONFIGS = Path(__file__).parents[2] / "configs"
M, P, D = "model.model_config", "parallel_config", "train_dataset.data_loader"


@pytest.fixture(scope="module")
def base():
    return yaml.safe_load((CONFIGS / "tiny_cp2.yaml").read_text())


@pytest.fixture
def load(base, tmp_path):
    """Load tiny_cp2.yaml with some keys changed (None removes a key)."""

    def changed(changes, world_size=None):
        content = copy.deepcopy(base)
        content.pop("train_dataset_task")
        for dotted, value in changes.items():
            *sections, key = dotted.split(".")
            section = content
            for name in sections:
                section = section[name]
            if value is None:
                del section[key]
            else:
                section[key] = value
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(content))
        return load_run_config(path, world_size)

    return changed


def problems(load, changes, world_size=None):
    with pytest.raises(ConfigError) as error:
        load(changes, world_size)
    assert str(error.value) == "\n".join(error.value.problems)
    assert all("\n" not in line for line in error.value.problems)
    return error.value.problems


@pytest.mark.parametrize(
    ("name", "world_size", "local"),
    [
        ("tiny_1p", 1, 512),
        ("tiny_cp2", 2, 256),
        ("tiny_hybrid_cp2", 2, 256),
        ("recall_cp2", 2, 2176),
        ("small_16m_cp2", 2, 4096),
        ("base_400m_npu_cp8", 8, 8192),
        ("large_3b_npu_cp32", 32, 16384),
        ("kimi_linear_48b_npu", 16, 8192),
    ],
)
def test_shipped_files_are_valid(name, world_size, local):
    run = load_run_config(CONFIGS / f"{name}.yaml", world_size)
    assert run.world_size == world_size
    assert run.local_seq_length == local


def test_every_shipped_file_is_on_the_ladder_and_says_why():
    page = (CONFIGS.parent / "docs" / "ladder.md").read_text()
    for path in CONFIGS.glob("*.yaml"):
        run = load_run_config(path)
        row = next(line for line in page.splitlines() if line.startswith(f"| [{path.name}]"))
        parameters = sum(int(np.prod(shape)) for shape in expected_shapes(asdict(run.model)).values())
        strategy = run.model.kda_cp_strategy if run.parallel.context_parallel > 1 else "none"
        cells = [cell.strip() for cell in row.strip("| ").split("|")]
        said = float(cells[1].split()[0]) * {"M": 1e6, "B": 1e9}[cells[1].split()[1]]
        assert said == pytest.approx(parameters, rel=0.06)
        assert cells[2:5] == [f"{run.model.seq_length:,}", str(run.parallel.context_parallel), f"`{strategy}`"]


def test_48b_file_is_the_released_model():
    model = load_run_config(CONFIGS / "kimi_linear_48b_npu.yaml").model
    released, _ = model_options_from_json(RELEASED)
    for key, value in released.items():
        if key in vars(model):
            assert getattr(model, key) == (tuple(value) if isinstance(value, list) else value), key


def test_tiny_files_describe_the_same_run():
    one, two = (load_run_config(CONFIGS / f"tiny_{name}.yaml") for name in ("1p", "cp2"))
    assert one.data == two.data
    assert one.training.batch_size * one.parallel.data_parallel == two.training.batch_size * two.parallel.data_parallel
    assert {k for k in vars(one.model) if getattr(one.model, k) != getattr(two.model, k)} == {"kda_cp_strategy"}


def test_values_arrive(load):
    run = load({f"{M}.kda_lower_bound": -2, f"{M}.kda_safe_gate": True, "runner_config.stop_step": 7})
    assert (run.model.kda_lower_bound, run.model.kda_safe_gate, run.training.stop_step) == (-2.0, True, 7)
    assert run.training.learning_rate == 3e-3
    assert run.raw["parallel_config"]["context_parallel"] == 2


def test_value_heads_default_to_heads_and_are_dataclasses_frozen(load):
    run = load({})
    assert (run.model.linear_num_value_heads, run.model.linear_value_head_dim) == (4, 32)
    with pytest.raises(AttributeError):
        run.model.hidden_size = 1


MOE = {f"{M}.mlp_layer_types": ["dense", "sparse"], f"{M}.num_experts": 4, f"{M}.num_experts_per_token": 2}
MLA = {f"{M}.layer_types": ["linear_attention", "full_attention"]}
CASES = [
    # unknown keys, nearest name
    ({f"{M}.kda_cp_stratgy": "ulysses"}, f"{M}.kda_cp_stratgy = 'ulysses': unknown key; did you mean kda_cp_strategy?"),
    ({f"{M}.hiden_size": 64}, f"{M}.hiden_size = 64: unknown key; did you mean hidden_size?"),
    ({f"{P}.context_paralel": 2}, f"{P}.context_paralel = 2: unknown key; did you mean context_parallel?"),
    ({f"{D}.datset_dir": "x"}, f"{D}.datset_dir = 'x': unknown key; did you mean dataset_dir?"),
    ({"runner_config.batchsize": 2}, "runner_config.batchsize = 2: unknown key; did you mean batch_size?"),
    ({"runner_wrapper.max_grad": 2}, "runner_wrapper.max_grad = 2: unknown key; did you mean max_grad_norm?"),
    (
        {"paralel_config": {}},
        "paralel_config: unknown section, MindFormers would ignore it; did you mean parallel_config?",
    ),
    # values
    (
        {f"{M}.kda_cp_strategy": "uleses"},
        f"{M}.kda_cp_strategy = 'uleses': one of none, ulysses, state_scan, ptp_chain, ptp_tree, hybrid, auto is needed",
    ),
    ({f"{M}.kda_chunk_size": 48}, f"{M}.kda_chunk_size = 48: one of 16, 32, 64 is needed"),
    ({f"{M}.kda_chunk_size": True}, f"{M}.kda_chunk_size = True: one of 16, 32, 64 is needed"),
    ({f"{M}.kda_lower_bound": -6}, f"{M}.kda_lower_bound = -6.0: a number in [-5, 0) is needed"),
    ({f"{M}.kda_lower_bound": 0}, f"{M}.kda_lower_bound = 0.0: a number in [-5, 0) is needed"),
    ({f"{M}.kda_lower_bound": float("nan")}, f"{M}.kda_lower_bound = nan: a number is needed"),
    ({f"{M}.kda_safe_gate": "yes"}, f"{M}.kda_safe_gate = 'yes': True or False is needed"),
    ({f"{M}.hidden_size": "128"}, f"{M}.hidden_size = '128': an integer >= 1 is needed"),
    ({f"{M}.hidden_size": 0}, f"{M}.hidden_size = 0: an integer >= 1 is needed"),
    ({f"{M}.linear_head_dim": 512}, f"{M}.linear_head_dim = 512: an integer from 1 to 256 is needed"),
    ({"lr_schedule.learning_rate": "1e-3"}, "lr_schedule.learning_rate = '1e-3': a number > 0 is needed; YAML reads"),
    ({"optimizer.weight_decay": -1}, "optimizer.weight_decay = -1: a number >= 0 is needed"),
    ({f"{D}.dataset_dir": []}, f"{D}.dataset_dir = []: 'stdlib', a file, a folder or a list of them is needed"),
    ({f"{D}.dataset_dir": [1]}, f"{D}.dataset_dir = [1]: a text or a list of texts is needed"),
    (
        {"train_dataset.input_columns": ["input_ids"]},
        "train_dataset.input_columns = ['input_ids']: [input_ids, labels,",
    ),
    ({f"{D}.type": "KcpTextDataSet"}, f"{D}.type = 'KcpTextDataSet': did you mean KcpTextDataset?"),
    # rules between values
    ({f"{M}.layer_types": ["linear_attention", "mamba"]}, f"{M}.layer_types = 'mamba': linear_attention or full_attention is needed"),
    ({f"{M}.layer_types": ["linear_attention"]}, f"{M}.layer_types = '1 entries': 2 entries are needed"),
    ({f"{M}.mlp_layer_types": ["dense", "sparse"]}, f"{M}.num_experts = 0: an integer >= 1 is needed with sparse layers"),
    ({f"{M}.mlp_layer_types": ["dense", "moe"]}, f"{M}.mlp_layer_types = 'moe': dense or sparse is needed for each layer"),
    ({f"{M}.mlp_layer_types": ["dense"]}, f"{M}.mlp_layer_types = '1 entries': 2 entries are needed"),
    ({f"{M}.num_experts": 8}, f"{M}.num_experts = 8: mlp_layer_types is needed beside it"),
    (MOE | {f"{M}.num_expert_group": 3}, f"{M}.num_experts = 4: a multiple of num_expert_group = 3 is needed"),
    (MOE | {f"{M}.topk_group": 2}, f"{M}.topk_group = 2: at most num_expert_group = 1 is needed"),
    (MOE | {f"{M}.num_experts_per_token": 8}, f"{M}.num_experts_per_token = 8: at most 4 is needed"),
    (MOE | {f"{M}.routed_scaling_factor": 0}, f"{M}.routed_scaling_factor = 0: a number > 0 is needed"),
    (MOE | {f"{M}.num_experts": -1}, f"{M}.num_experts = -1: an integer >= 0 is needed"),
    ({f"{M}.mla_cp_strategy": "latent"}, f"{M}.mla_cp_strategy = 'latent': one of none, ulysses, latent_gather is needed; did"),
    (MLA | {f"{M}.mla_cp_strategy": "none"}, f"{M}.mla_cp_strategy = 'none': ulysses or latent_gather is needed with"),
    (
        MLA | {f"{M}.mla_cp_strategy": "ulysses", f"{M}.num_attention_heads": 3},
        f"{M}.num_attention_heads = 3: ulysses needs a multiple of parallel_config.context_parallel = 2; or use",
    ),
    ({f"{M}.kv_lora_rank": 0}, f"{M}.kv_lora_rank = 0: an integer >= 1 is needed"),
    ({f"{M}.q_lora_rank": 8}, f"{M}.q_lora_rank = 8: only None is supported"),
    ({f"{M}.num_key_value_heads": 2, f"{M}.num_attention_heads": 4}, f"{M}.num_key_value_heads = 2: num_attention_heads = 4 is needed"),
    ({f"{M}.first_k_dense_replace": 1}, f"{M}.first_k_dense_replace = 1: the spelling here is mlp_layer_types; `kcp convert"),
    ({f"{M}.hidden_act": "gelu"}, f"{M}.hidden_act = 'gelu': only silu is supported"),
    ({f"{M}.attention_dropout": 0.1}, f"{M}.attention_dropout = 0.1: only 0.0 is supported"),
    (
        {f"{M}.linear_num_value_heads": 6},
        f"{M}.linear_num_value_heads = 6: a multiple of linear_num_heads = 4 is needed",
    ),
    ({f"{M}.vocab_size": 256}, f"{M}.vocab_size = 256: the byte tokenizer needs at least 259"),
    (
        {f"{M}.kda_cp_strategy": "none"},
        f"{M}.kda_cp_strategy = 'none': one of ulysses, state_scan, ptp_chain, ptp_tree, hybrid is needed with {P}.context_",
    ),
    ({f"{P}.model_parallel": 2}, f"{P}.model_parallel = 2: only 1 is supported"),
    ({f"{P}.pipeline_stage": 2}, f"{P}.pipeline_stage = 2: only 1 is supported"),
    ({f"{D}.seq_length": 256}, f"{D}.seq_length = 256: {M}.seq_length = 512 is needed"),
    ({f"{D}.context_parallel": 1}, f"{D}.context_parallel = 1: {P}.context_parallel = 2 is needed"),
    ({"use_parallel": False}, "use_parallel = False: True is needed with data_parallel * context_parallel = 2"),
    ({"use_legacy": None}, "use_legacy = True: False is needed"),
    ({"runner_config.gradient_accumulation_steps": 0}, "runner_config.gradient_accumulation_steps = 0: an integer >= 1"),
    ({"callbacks": [{"type": "KcpCheckpoint", "save_step": 5}]}, "callbacks[0].save_step = 5: unknown key; did you mean save_steps?"),
    ({"callbacks": [{"type": "KcpHealth", "every_steps": -1}]}, "callbacks[0].every_steps = -1: an integer >= 0"),
    ({"callbacks": [{"type": "KcpHelth"}]}, "callbacks[0].type = 'KcpHelth': did you mean KcpHealth?"),
    ({"callbacks": {"type": "KcpHealth"}}, "callbacks = {'type': 'KcpHealth'}: a list of mappings with a type is needed"),
    ({"do_eval": True}, "eval_dataset = None: a section like train_dataset is needed with do_eval"),
    ({"recompute_config.recompute": 1}, "recompute_config.recompute = 1: True or False is needed"),
    ({"train_dataset.drop_remainder": False}, "train_dataset.drop_remainder = False: True is needed"),
    (
        {"runner_wrapper.type": "MFTrainOneStepCell"},
        "runner_wrapper.type = 'MFTrainOneStepCell': KcpTrainOneStepCell is",
    ),
    ({"runner_wrapper.scale_sense": 2.0}, "runner_wrapper.scale_sense = 2.0: 1.0 is needed"),
    # devices
    ({"context.device_target": "GPU"}, "context.device_target = 'GPU': one of CPU, Ascend is needed"),
    ({"context.mode": 2}, "context.mode = 2: one of 0, 1 is needed"),
    ({f"{M}.compute_dtype": "bfloat16"}, f"{M}.compute_dtype = 'bfloat16': float32 is needed on CPU"),
    ({f"{M}.compute_dtype": "float8"}, f"{M}.compute_dtype = 'float8': one of float32, float16, bfloat16 is needed"),
    ({f"{M}.params_dtype": "bfloat16"}, f"{M}.params_dtype = 'bfloat16': one of float32 is needed"),
    (
        {"runner_config.sink_mode": None},
        "runner_config.sink_mode = '(not given, MindFormers takes True)': False is needed",
    ),
    ({"parallel.parallel_mode": 1}, "parallel.parallel_mode = 1: 0 is needed"),
    ({"parallel": None}, "parallel.parallel_mode = '(not given, MindFormers takes 1)': 0 is needed"),
    ({"model": None}, "model.model_config: missing"),
    ({"model": {"model_config": 3}}, "model.model_config = 3: a mapping of keys to values is needed"),
    ({"train_dataset": None}, "train_dataset.data_loader: missing"),
]


@pytest.mark.parametrize(("changes", "expected"), CASES, ids=[expected[:60] for _, expected in CASES])
def test_each_wrong_thing_gives_its_line(load, changes, expected):
    assert any(line.startswith(expected) for line in problems(load, changes)), expected


@pytest.mark.parametrize(("changes", "expected"), CASES[:-3], ids=[expected[:60] for _, expected in CASES[:-3]])
def test_one_wrong_thing_gives_one_line(load, changes, expected):
    assert len(problems(load, changes)) == 1


def test_ranks_and_heads_decide_about_groups_and_degrees(load):
    hybrid = {f"{P}.context_parallel": 4, f"{D}.context_parallel": 4, f"{M}.kda_cp_strategy": "hybrid"}
    degree = f"{M}.kda_hybrid_ulysses_degree"
    assert problems(load, hybrid | {degree: 3})[0] == f"{degree} = 3: a divisor of {P}.context_parallel = 4 is needed"
    assert problems(load, hybrid | {degree: 4, f"{M}.linear_num_heads": 2}) == (
        f"{degree} = 4: a divisor of linear_num_heads = 2 is needed",
    )
    assert load(hybrid | {degree: 2}).model.kda_hybrid_ulysses_degree == 2
    groups = f"{M}.kda_ptp_head_groups"
    assert problems(load, {groups: 3}) == (f"{groups} = 3: a divisor of linear_num_heads = 4 is needed",)


def test_heads_decide_about_ulysses(load):
    three = {f"{P}.context_parallel": 3, f"{D}.context_parallel": 3, f"{M}.kda_cp_strategy": "ulysses"}
    three |= {f"{M}.seq_length": 510, f"{D}.seq_length": 510}
    assert problems(load, three) == (f"{M}.linear_num_heads = 4: ulysses needs a multiple of {P}.context_parallel = 3; or use state_scan",)
    assert load(three | {f"{M}.kda_cp_strategy": "state_scan"}).world_size == 3
    assert load({f"{M}.kda_cp_strategy": "ulysses"}).model.kda_cp_strategy == "ulysses"
    grouped = {f"{M}.kda_cp_strategy": "ulysses", f"{M}.linear_num_heads": 1, f"{M}.linear_num_value_heads": 4}
    assert problems(load, grouped)[0].startswith(f"{M}.linear_num_heads = 1: ulysses needs a multiple")


def test_sample_length_must_divide(load):
    changes = {f"{M}.seq_length": 511, f"{D}.seq_length": 511}
    assert problems(load, changes) == (f"{M}.seq_length = 511: a multiple of {P}.context_parallel = 2 is needed",)


@pytest.mark.parametrize(
    ("changes", "world_size", "expected"),
    [
        ({}, 1, f"{P}.context_parallel = 2: data_parallel * context_parallel = 1 * 2 = 2 workers are needed but this"),
        ({}, 3, f"{P}.context_parallel = 2: data_parallel * context_parallel = 1 * 2 = 2 workers"),
        ({}, 4, f"{P}.data_parallel = 1: data_parallel * context_parallel = 1 * 2 = 2 workers"),
        ({f"{P}.data_parallel": 2}, 2, f"{P}.data_parallel = 2: data_parallel * context_parallel = 2 * 2 = 4 workers"),
    ],
)
def test_launch_must_provide_the_workers(load, changes, world_size, expected):
    (line,) = problems(load, changes, world_size)
    assert line.startswith(expected)
    assert ("start it with: kcp train" in line) == (world_size == 1)


def test_hybrid_layers_are_accepted(load):
    model = load(MOE | MLA | {f"{M}.num_attention_heads": 3, f"{M}.kv_lora_rank": 7}).model
    assert (model.layer_types[1], model.mlp_layer_types[1], model.num_experts, model.kv_lora_rank) == ("full_attention", "sparse", 4, 7)
    assert model.mla_cp_strategy is None
    assert load(MLA | {f"{M}.mla_cp_strategy": "ulysses", f"{M}.num_attention_heads": 2}).model.mla_cp_strategy == "ulysses"
    assert load({f"{M}.mla_cp_strategy": "none"}).model.layer_types == ("linear_attention",) * 2


def test_all_problems_come_at_once(load):
    changes = {f"{M}.kda_chunk_size": 7, f"{P}.model_parallel": 4, f"{D}.seed": -1, "context.mode": "graph"}
    assert len(problems(load, changes)) == 4


def test_npu_options_are_allowed_on_ascend(load):
    changes = {"context.device_target": "Ascend", f"{M}.compute_dtype": "bfloat16", "runner_config.sink_mode": True}
    assert load(changes).model.compute_dtype == "bfloat16"


def bomb(level):
    """Twelve levels of nine references each to the level below: 9^12 values in less than a kilobyte."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} " + level.format(", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 13)]
    return "\n".join(lines).encode()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a: [1, 2", "not valid YAML, line 1, column 9"),
        (b"a: !!python/object/apply:os.system ['touch MARKER']", "not valid YAML, line 1, column 4: could not determine"),
        (b"a: !!python/object/new:os.system [touch MARKER]", "not valid YAML, line 1, column 4: could not determine"),
        (b"a: !!python/name:os.system", "not valid YAML, line 1, column 4: could not determine"),
        (b"!!python/module:os : 1", "not valid YAML, line 1, column 1: could not determine"),
        (b"a: !own {}", "not valid YAML, line 1, column 4: could not determine a constructor for the tag '!own'"),
        (b"- 1\n- 2\n", "holds [1, 2], a mapping of keys to values is needed"),
        (b"", "holds None, a mapping of keys to values is needed"),
        (b"a: \xff", "not UTF-8 text (byte 3)"),
        (b"a: \x00", "not valid YAML"),
        pytest.param(b"[" * 20_000, "not valid YAML", marks=pytest.mark.ci),
        ("\n".join(" " * n + "a:" for n in range(66)).encode(), "not valid YAML: nested more than 64 levels deep, line 6"),
        (bomb("[{}]"), "not valid YAML: its aliases stand for more than"),
        (bomb("{{a: [{}]}}"), "not valid YAML: its aliases stand for more than"),
        (bomb("{{<<: [{}]}}"), "not valid YAML: its aliases stand for more than"),
        (b"a: &a ['" + b"x" * 100_000 + b"']\nb: [" + b"*a, " * 50 + b"*a]", "not valid YAML: its aliases stand for more than"),
        (b"a: 1\nb: &b [1, *b]", "not valid YAML: an alias leads back to itself, line 2"),
        (b"a: &a {b: 1, <<: *a}", "not valid YAML: an alias leads back to itself, line 1"),
        (b"a: [1, 2, {b: c}]\n" * 60_000, f"{60_000 * 18} bytes, a configuration has at most"),
        (b"#" * (MAX_FILE_BYTES + 1), f"{MAX_FILE_BYTES + 1} bytes, a configuration has at most"),
    ],
)
def test_file_errors_are_one_line(tmp_path, monkeypatch, content, expected):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_run_config(path)
    (line,) = error.value.problems
    assert line.startswith(f"{path}: ") and expected in line and "\n" not in line and len(line) < 400
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.yaml"], "something in the file was run"


def test_ordinary_aliases_are_followed(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("a: &a {x: 1, y: [2]}\nb: *a\nc: {<<: *a, x: 3}\n")
    assert read_yaml(path) == {"a": {"x": 1, "y": [2]}, "b": {"x": 1, "y": [2]}, "c": {"x": 3, "y": [2]}}


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_run_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a folder") as error:
        load_run_config(tmp_path)
    assert str(error.value) == f"{tmp_path}: is a folder, a YAML file is needed"
    with pytest.raises(ConfigError, match="is no file"):
        load_run_config(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("load_arguments", "expected"),
    [
        ({"path": "pandas", "data_files": "x.pkl"}, "path = 'pandas': its files are pickles"),
        ({"load_func": "Dataset"}, "load_func = 'Dataset': one of load_dataset, load_from_disk is needed; did you mean load_dataset?"),
        ({"trust_remote_code": True}, "trust_remote_code = True: only False is supported"),
    ],
)
def test_data_that_would_run_code_is_refused(load, load_arguments, expected):
    loader = {"type": "KcpHuggingFaceDataset", "load": {"path": "json", "data_files": "x.json"} | load_arguments}
    (line,) = problems(load, {D: loader})
    assert line.startswith(f"{D}.load.{expected}")
