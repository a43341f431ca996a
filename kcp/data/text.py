"""Documents from text files: ``.txt .md .py`` are one document a file, ``.jsonl`` one document a line.

Without any file at hand there is the standard library: its own sources are on every machine with Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

STDLIB = "stdlib"
EXTENSIONS = (".txt", ".md", ".py", ".jsonl")
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class DataError(ValueError):
    """The text can't be read; one line that names the file and, where there is one, the line."""


class TextCorpus:
    """All documents of some files and folders, in a fixed order.

    Args:
        sources: ``"stdlib"``, a file, a folder, or a list of them. Folders are searched recursively in sorted order;
            hidden files and folders and other extensions are passed over.

    Attributes:
        documents: the documents' bytes. All of the text is held in memory, one byte a token.

    Raises:
        DataError: a source is missing, of another kind, binary, not UTF-8, a bad jsonl line, or gives no text.
    """

    def __init__(self, sources: str | Path | Sequence[str | Path]) -> None:
        self.sources = _as_list(sources)
        self.documents: list[bytes] = []
        for source in self.sources:
            before = len(self.documents)
            for file in find_files(source):
                self.documents.extend(read_documents(file))
            if len(self.documents) == before:
                raise DataError(f"{source}: every file is empty, at least one document is needed")

    def __len__(self) -> int:
        return len(self.documents)

    def digest(self) -> str:
        """SHA-256 of the documents and their order: equal on ranks that read the same text."""
        state = hashlib.sha256()
        for document in self.documents:
            state.update(len(document).to_bytes(8, "little"))
            state.update(document)
        return state.hexdigest()


def check_sources(sources: str | Path | Sequence[str | Path]) -> None:
    """Raise `DataError` when a source is missing or holds no text file; reads no text."""
    for source in _as_list(sources):
        find_files(source)


def find_files(source: str | Path) -> list[Path]:
    """Text files of one source, sorted.

    Raises:
        DataError: nothing is there, or nothing that is text.
    """
    if source == STDLIB:
        return list(_walk(Path(sysconfig.get_path("stdlib")), (".py",), _STDLIB_SKIPPED))
    path = Path(source)
    if path.is_file():
        if path.suffix.lower() not in EXTENSIONS:
            raise DataError(f"{path}: file type {path.suffix or '(none)'}, {' '.join(EXTENSIONS)} are allowed")
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder ('{STDLIB}' names the standard library's sources)")
    files = list(_walk(path, EXTENSIONS, set()))
    if not files:
        raise DataError(f"{path}: the folder holds no {' '.join(EXTENSIONS)} file")
    return files


def read_documents(file: Path) -> list[bytes]:
    """Documents of one file; empty ones are passed over.

    Raises:
        DataError: the file is binary, not UTF-8, or a jsonl line is not an object with a `text`.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: can't be read: {error.strerror}") from None
    if b"\0" in data:
        raise DataError(f"{file}, line {_line_of(data, data.index(0))}: binary data (a zero byte), text is needed")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = _line_of(data, error.start)
        raise DataError(f"{file}, line {line}: not UTF-8 text (byte 0x{data[error.start]:02x})") from None
    documents = _jsonl_texts(file, text) if file.suffix.lower() == ".jsonl" else [data]
    return [document for document in documents if document.strip()]


def _jsonl_texts(file: Path, content: str) -> list[bytes]:
    documents = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        at = f"{file}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", None) or "nested too deeply"
            raise DataError(f"{at}: not valid JSON ({reason}), one object a line is needed") from None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise DataError(f'{at}: an object with a string field "text" is needed')
        try:
            documents.append(record["text"].encode("utf-8"))
        except UnicodeEncodeError:
            raise DataError(f'{at}: "text" holds half a surrogate pair, which is not text') from None
    return documents


def _walk(folder: Path, extensions: Sequence[str], skipped: set[str]) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in extensions:
                yield Path(root, name)


def _line_of(data: bytes, position: int) -> int:
    return data.count(b"\n", 0, position) + 1


def _as_list(sources: str | Path | Sequence[str | Path]) -> list[str | Path]:
    listed = [sources] if isinstance(sources, str | Path) else list(sources)
    if not listed:
        raise DataError("dataset_dir is empty: 'stdlib', a file, a folder or a list of them is needed")
    return listed
