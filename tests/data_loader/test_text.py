"""Documents from files: what is read, what is refused and how the error names file and line."""

import pytest

from kcp.data.text import DataError, TextCorpus, check_sources, find_files, read_documents


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_folder_is_read_in_sorted_order_without_hidden_and_other_files(tmp_path):
    write(tmp_path / "b.txt", "bee")
    write(tmp_path / "a" / "z.md", "zed")
    write(tmp_path / "a" / "c.py", "cee")
    write(tmp_path / "a" / "picture.png", b"\x00\x01")
    write(tmp_path / ".git" / "x.txt", "hidden")
    write(tmp_path / ".hidden.txt", "hidden")
    write(tmp_path / "l.jsonl", '{"text": "one"}\n\n{"text": "zwölf", "other": 2}\n{"text": "  "}')
    assert TextCorpus(str(tmp_path)).documents == [b"bee", b"one", "zwölf".encode(), b"cee", b"zed"]


def test_list_of_sources_keeps_the_given_order(tmp_path):
    second, first = write(tmp_path / "1.txt", "first name"), write(tmp_path / "2.txt", "second name")
    assert TextCorpus([first, second]).documents == [b"second name", b"first name"]


def test_digest_tells_texts_and_their_borders_apart(tmp_path):
    one = TextCorpus(write(tmp_path / "1" / "a.txt", "abc")).digest()
    again = TextCorpus(write(tmp_path / "2" / "b.txt", "abc")).digest()
    other = TextCorpus(write(tmp_path / "3" / "c.txt", "abd")).digest()
    cut = TextCorpus([write(tmp_path / "4" / "d.txt", "ab"), write(tmp_path / "4" / "e.txt", "c")]).digest()
    assert one == again
    assert len({one, other, cut}) == 3


def test_stdlib_has_sources_but_no_tests_and_no_installed_packages():
    files = find_files("stdlib")
    names = {file.name for file in files}
    assert {"argparse.py", "socket.py"} <= names
    assert not any({"site-packages", "dist-packages", "test", "tests"} & set(file.parts[:-1][-3:]) for file in files)
    assert sum(file.stat().st_size for file in files) > 2_000_000


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("bin.txt", b"one\ntwo\x00", "bin.txt, line 2: binary data"),
        ("latin.md", b"a\nb\ncaf\xe9", "latin.md, line 3: not UTF-8 text (byte 0xe9)"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": }', "bad.jsonl, line 2: not valid JSON"),
        ("deep.jsonl", b"[" * 200_000, "deep.jsonl, line 1: not valid JSON"),
        ("list.jsonl", b'{"text": "a"}\n\n["text"]', "list.jsonl, line 3: an object with a string field"),
        ("none.jsonl", b'{"text": null}', "none.jsonl, line 1: an object with a string field"),
        ("half.jsonl", b'{"text": "\\ud800"}', "half.jsonl, line 1: "),
        ("data.csv", b"a,b", "data.csv: file type .csv, .txt .md .py .jsonl are allowed"),
        ("empty.txt", b" \n", "empty.txt: every file is empty"),
    ],
)
def test_bad_file_is_named_with_its_line(tmp_path, name, data, message):
    path = write(tmp_path / name, data)
    with pytest.raises(DataError) as error:
        TextCorpus(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_source_and_folder_without_text(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        check_sources(str(tmp_path / "nowhere"))
    write(tmp_path / "x.png", b"")
    with pytest.raises(DataError, match="the folder holds no"):
        check_sources([str(tmp_path)])
    with pytest.raises(DataError, match="dataset_dir is empty"):
        check_sources([])


def test_text_is_taken_as_it_is(tmp_path):
    data = b"\xef\xbb\xbfone\r\ntwo\xe2\x80\xa8three"
    assert read_documents(write(tmp_path / "a.txt", data)) == [data]
    line = '{"text": "a\u2028b\u0085c"}\n{"text": "d"}'
    assert read_documents(write(tmp_path / "b.jsonl", line)) == ["a\u2028b\u0085c".encode(), b"d"]
