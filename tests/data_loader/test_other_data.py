"""Megatron's files and Hugging Face datasets through MindFormers' own readers, and tokenizers from files."""

import importlib.util
import json
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

from kcp.data.packing import PackedSamples
from kcp.data.text import DataError
from kcp.data.tokenizer import FileTokenizer

EOD, LENGTH = 3, 16


def rows(dataset):
    return list(dataset.create_dict_iterator(num_epochs=1, output_numpy=True))


@pytest.fixture(scope="module")
def sets():
    pytest.importorskip("mindformers")
    from kcp.data import mindformers_sets

    return mindformers_sets


@pytest.fixture(scope="module")
def megatron_helpers(tmp_path_factory):
    """MindFormers' helpers, compiled to a temporary folder where they are not compiled yet."""
    name = "mindformers.dataset.blended_datasets.helpers"
    from mindformers.dataset import blended_datasets

    if importlib.util.find_spec(name) is None:
        pybind11 = pytest.importorskip("pybind11")
        source = importlib.util.find_spec("mindformers.dataset.blended_datasets").submodule_search_locations[0]
        target = tmp_path_factory.mktemp("helpers") / f"helpers{sysconfig.get_config_var('EXT_SUFFIX')}"
        includes = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]
        command = ["g++", "-O1", "-shared", "-std=c++17", "-fPIC", *includes, f"{source}/helpers.cpp", "-o", str(target)]
        subprocess.run(command, check=True)
        spec = importlib.util.spec_from_file_location(name, target)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        blended_datasets.helpers = module
        yield
        del sys.modules[name], blended_datasets.helpers
    else:
        yield


def write_megatron(prefix, documents):
    from mindformers.dataset.blended_datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(prefix) + ".bin", dtype=np.int32)
    for document in documents:
        builder.add_document(np.array(document, np.int32), [len(document)])
    builder.finalize(str(prefix) + ".idx")


@pytest.mark.ci
def test_megatron_files(sets, megatron_helpers, tmp_path):
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(4, 90, rng.integers(5, 30)).tolist(), EOD] for _ in range(40)]
    write_megatron(tmp_path / "text", documents)
    options = {"data_path": [str(tmp_path / "text")], "num_samples": 12, "eod_token_id": EOD, "seq_length": LENGTH, "max_documents": 6}
    whole = rows(sets.KcpMegatronDataset(**options))
    assert len(whole) == 12
    text = {tuple(pair) for document in documents for pair in zip(document, document[1:], strict=False)}
    for row in whole:
        assert np.array_equal(row["input_ids"][1:], row["labels"][:-1])
        ends = np.flatnonzero(row["input_ids"] == EOD) + 1
        bounds = [0, *ends[ends < LENGTH], LENGTH]
        assert row["cu_seqlens"].tolist() == bounds + [LENGTH] * (7 - len(bounds))
        pairs = zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True)
        assert all(pair in text for pair in pairs if pair[0] != EOD)
        assert row["loss_mask"].all() and row["loss_mask"].dtype == np.float32
    # Ranks of one context parallel group read the same samples, and a resumed run goes on with the next one.
    shards = [rows(sets.KcpMegatronDataset(**options, context_parallel=2, num_shards=4, shard_id=rank)) for rank in range(4)]
    for rank in range(4):
        for got, want in zip(shards[rank], whole[rank // 2 :: 2], strict=True):
            assert np.array_equal(got["input_ids"], want["input_ids"])
    later = rows(sets.KcpMegatronDataset(**options, position=(0, 5)))
    assert np.array_equal(later[0]["input_ids"], whole[5]["input_ids"])
    with pytest.raises(DataError, match="can't be used as Megatron data"):
        sets.KcpMegatronDataset(**{**options, "data_path": [str(tmp_path / "none")]})


@pytest.mark.ci
def test_hugging_face_dataset(sets, tmp_path):
    content = [
        {"input_ids": list(range(n, n + LENGTH)), "labels": list(range(n + 1, n + LENGTH + 1)), "actual_seq_len": [5, LENGTH]}
        for n in range(6)
    ]
    content[2]["labels"][3] = -100
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in content))
    load = {"path": "json", "data_files": str(file), "split": "train", "cache_dir": str(tmp_path / "cache")}
    options = {"load": load, "seq_length": LENGTH, "max_documents": 3}
    in_order = rows(sets.KcpHuggingFaceDataset(**options, shuffle=False))
    assert [row["input_ids"][0] for row in in_order] == list(range(6))
    assert in_order[2]["labels"][3] == -100 and in_order[2]["loss_mask"].sum() == LENGTH - 1
    assert in_order[0]["cu_seqlens"].tolist() == [0, 5, LENGTH, LENGTH]
    shuffled = [row["input_ids"][0] for row in rows(sets.KcpHuggingFaceDataset(**options, seed=1))]
    assert sorted(shuffled) == list(range(6)) and shuffled != list(range(6))
    renamed = [{"type": "rename_column", "original_column_name": "labels", "new_column_name": "targets"}]
    with pytest.raises(DataError, match="rows have no labels, only input_ids"):
        sets.KcpHuggingFaceDataset(**options, handler=renamed)
    with pytest.raises(DataError, match="can't be loaded"):
        sets.KcpHuggingFaceDataset(load={**load, "data_files": str(tmp_path / "none.jsonl")})
    with pytest.raises(DataError, match="seq_length = 16 of each are needed"):
        sets.as_sample([1, 2], [2, 3], None, (), LENGTH, 3)
    with pytest.raises(DataError, match="a row has 4 documents, max_documents = 3"):
        sets.as_sample([1] * LENGTH, [2] * LENGTH, None, (2, 4, 6), LENGTH, 3)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """A word-level tokenizer written by the tokenizers library."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "one", "two", "three"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder / "tokenizer.json"


@pytest.mark.ci
def test_tokenizers_from_files(tokenizer_file, tmp_path):
    whole = FileTokenizer(tokenizer_file.parent)
    assert whole.encode("one three two").tolist() == [1, 4, 6, 5, 2] and whole.decode([1, 4, 6, 5, 2]) == "one three two"
    assert (whole.pad_token_id, whole.bos_token_id, whole.eos_token_id, whole.vocab_size) == (0, 1, 2, 7)
    bare = FileTokenizer(tokenizer_file)
    assert bare.encode(b"two one").tolist() == [5, 4] and bare.eos_token_id is None and bare.pad_token_id == 0
    samples = PackedSamples([b"one two", b"three"], 4, max_documents=3, shuffle=False, num_samples=2, tokenizer=whole)
    ids, labels, mask, bounds = samples.sample(0, 0)
    assert ids.tolist() == [1, 4, 5, 1] and labels.tolist() == [4, 5, 2, 6] and bounds.tolist() == [0, 3, 4, 4] and mask.all()
    (tmp_path / "broken.json").write_text("{")
    for path, reason in ((tmp_path / "broken.json", "can't be read as a tokenizer.json"), (tmp_path / "none", "no such file")):
        with pytest.raises(DataError, match=reason):
            FileTokenizer(path)
