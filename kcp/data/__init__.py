"""Text for training: byte tokens, packed into samples of a fixed length.

`kcp.data.text`, `kcp.data.tokenizer` and `kcp.data.packing` need NumPy alone; `kcp.data.loader` registers the loader
`KcpTextDataset` with MindFormers.
"""

from kcp.data.packing import EpochView, PackedSamples
from kcp.data.text import DataError, TextCorpus
from kcp.data.tokenizer import ByteTokenizer

__all__ = ["ByteTokenizer", "DataError", "EpochView", "PackedSamples", "TextCorpus"]
