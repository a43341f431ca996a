"""Synthetic samples for the training tests."""

import numpy as np
from mindspore.dataset import GeneratorDataset


def install_loader():
    """Register ``SyntheticTokens``: arithmetic sequences modulo 259, ten in a hundred labels invalid."""
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

    @MindFormerRegister.register(MindFormerModuleType.DATASET_LOADER)
    class SyntheticTokens:
        def __new__(cls, seq_length, num_samples, context_parallel, column_names, num_shards=1, shard_id=0, **kwargs):
            rng = np.random.RandomState(0)
            rows = []
            for _ in range(num_samples):
                tokens = (rng.randint(259) + rng.randint(1, 4) * np.arange(seq_length + 1)) % 259
                tokens = tokens.astype(np.int32)
                mask = (rng.rand(seq_length) > 0.1).astype(np.int32)
                labels = np.where(mask, tokens[1:], -100).astype(np.int32)
                boundaries = np.array([0, seq_length, seq_length], np.int32)
                rows.append((tokens[:-1], labels, mask, boundaries))
            shards, shard = (num_shards or 1) // context_parallel, (shard_id or 0) // context_parallel
            return GeneratorDataset(rows[shard::shards], column_names, shuffle=False)
