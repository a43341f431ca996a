"""A tokenizer that needs no files: one token a byte."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class ByteTokenizer:
    """UTF-8 bytes as tokens 0..255, then three special tokens.

    Attributes:
        pad_token_id: 256, fills a sample that the text does not.
        bos_token_id: 257, starts a document.
        eos_token_id: 258, ends a document.
        vocab_size: 259.
    """

    pad_token_id = 256
    bos_token_id = 257
    eos_token_id = 258
    vocab_size = 259

    def encode(self, text: str | bytes, *, add_special_tokens: bool = True) -> np.ndarray:
        """Tokens of a text.

        Args:
            text: text, or its UTF-8 bytes.
            add_special_tokens: put bos before and eos after.

        Returns:
            int32 ``[n]``.
        """
        data = text.encode("utf-8") if isinstance(text, str) else text
        tokens = np.frombuffer(data, dtype=np.uint8).astype(np.int32)
        if not add_special_tokens:
            return tokens
        return np.concatenate(([self.bos_token_id], tokens, [self.eos_token_id])).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens; special tokens are left out, bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: for a token outside the vocabulary.
        """
        values = np.asarray(list(tokens), dtype=np.int64)
        bad = values[(values < 0) | (values >= self.vocab_size)]
        if bad.size:
            raise ValueError(f"tokens holds {int(bad[0])}, 0 to {self.vocab_size - 1} are allowed")
        return bytes(values[values < 256].astype(np.uint8)).decode("utf-8", errors="replace")
