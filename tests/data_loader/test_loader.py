"""The loader as MindFormers builds it: registered, columns, dtypes, one sample for all ranks of a context group."""

import subprocess
import sys

import numpy as np
import pytest

LIGHT = """
import sys
import kcp.data, kcp.data.text, kcp.data.packing, kcp.data.tokenizer, kcp.config
loaded = [name for name in ("mindspore", "mindformers") if name in sys.modules]
sys.exit(f"imports {loaded}" if loaded else 0)
"""


def test_text_modules_import_neither_mindspore_nor_mindformers():
    subprocess.run([sys.executable, "-c", LIGHT], check=True)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"document {number} " * (number + 1))
    pytest.importorskip("mindformers")
    from mindformers.tools.register import MindFormerConfig

    import kcp.data.loader  # noqa: F401

    def loader(**options):
        from mindformers.dataset.dataloader.build_dataloader import build_dataset_loader

        config = MindFormerConfig(type="KcpTextDataset", seq_length=64, max_documents=8, **options.pop("config", {}))
        return build_dataset_loader(config, default_args={"dataset_dir": str(folder), **options})

    return loader


def rows(dataset, epochs=1):
    iterator = dataset.create_dict_iterator(num_epochs=epochs, output_numpy=True)
    return [[row for row in iterator] for _ in range(epochs)]


def test_columns_and_dtypes(build):
    dataset = build()
    row = rows(dataset)[0][0]
    assert {name: (value.dtype.name, value.shape) for name, value in row.items()} == {
        "input_ids": ("int32", (64,)),
        "labels": ("int32", (64,)),
        "loss_mask": ("float32", (64,)),
        "cu_seqlens": ("int32", (9,)),
    }


def test_ranks_of_a_context_group_read_the_same_samples_and_groups_share_them_out(build):
    def ids(rank):
        config = {"context_parallel": 2}
        return [row["input_ids"] for row in rows(build(config=config, num_shards=4, shard_id=rank))[0]]

    ranks = [ids(rank) for rank in range(4)]
    assert np.array_equal(ranks[0], ranks[1]) and np.array_equal(ranks[2], ranks[3])
    whole = [row["input_ids"] for row in rows(build())[0]]
    count = len(whole) // 2
    assert np.array_equal(ranks[0], whole[0::2][:count]) and np.array_equal(ranks[2], whole[1::2][:count])


def test_epochs_are_reshuffled_although_shapes_were_read_before(build):
    dataset = build().batch(2)
    dataset.output_shapes()
    dataset.get_dataset_size()
    first, second = rows(dataset, epochs=2)
    fresh, _ = rows(build().batch(2), epochs=2)
    assert np.array_equal(first[0]["input_ids"], fresh[0]["input_ids"])
    assert not all(np.array_equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, second, strict=True))


def test_wrong_columns_and_degrees_are_refused(build):
    with pytest.raises(ValueError, match="input_columns"):
        build(column_names=["input_ids"])
    with pytest.raises(ValueError, match="context_parallel = 2: a divisor of the 3 workers"):
        build(config={"context_parallel": 2}, num_shards=3, shard_id=0)
