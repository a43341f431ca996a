"""Tokenizers: one that needs no files, one token a byte; and those of `tokenizers` and `transformers` files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kcp.data.text import DataError


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


class FileTokenizer:
    """A tokenizer from files on this machine; nothing is downloaded and no code of theirs is run.

    Args:
        path: a ``tokenizer.json`` of the `tokenizers` library, or a folder that `transformers` reads.

    Attributes:
        pad_token_id: fills a sample that the text does not; the end of a document where the files name no padding, else 0.
        bos_token_id, eos_token_id: start and end a document; None where the files do not name them.
        vocab_size: token ids are below it.

    Raises:
        DataError: there is no tokenizer.
    """

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        path = Path(path).expanduser()
        if not path.exists():
            raise DataError(f"tokenizer = {path}: no such file or folder")
        try:
            if path.is_dir():
                self._tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            else:
                self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
        except Exception as error:  # the libraries raise whatever their parsers do, a bare Exception too
            reason = " ".join(str(error).split())[:160]
            raise DataError(f"tokenizer = {path}: can't be read as a tokenizer.json or a transformers folder: {reason}") from None
        self.bos_token_id: int | None = self._tokenizer.bos_token_id
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        pad = self._tokenizer.pad_token_id
        self.pad_token_id: int = next((token for token in (pad, self.eos_token_id) if token is not None), 0)
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: str | bytes, *, add_special_tokens: bool = True) -> np.ndarray:
        """Tokens of a text, int32 ``[n]``; with ``add_special_tokens`` bos before and eos after, where there are such."""
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        if add_special_tokens:
            around = [[token] if token is not None else [] for token in (self.bos_token_id, self.eos_token_id)]
            tokens = around[0] + tokens + around[1]
        return np.asarray(tokens, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens, special ones left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)
