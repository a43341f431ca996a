"""``kcp report``: what is on the page, that it loads nothing, and what is refused."""

import json
import re
from html.parser import HTMLParser

import pytest
from golden_cases import ROOT

from kcp.cli import main
from kcp.report import ReportError, read_metrics, write_report

HEALTH = {"log_decay_mean": -0.1, "log_decay_min": -2.0, "log_decay_max": -0.001, "beta_mean": 0.5, "output_gate_mean": 0.4}
HEALTH |= {"state_norm": 3.0, "vanished_heads": 0.25}


def rows(steps=12, full=True):
    out = []
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 5.0 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 1000.0 + step, "seconds": 0.5}
        row["skipped"] = step == 5
        if step == 5:
            row["loss"] = None
        if full and step % 4 == 0:
            row["health"] = {f"layer_{layer}": HEALTH for layer in (0, 1)}
            row["moe"] = {"layer_1": {"max_over_mean": 1.5}}
            row |= {"eval_loss": 4.0 / step, "eval_perplexity": 2.0}
        out.append(row)
    return out


def run_folder(folder, content):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return folder


class Page(HTMLParser):
    """Elements, addresses and text of a page; fails on tags that do not close."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.addresses, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_page_shows_everything_and_loads_nothing(tmp_path, capsys):
    folder = run_folder(tmp_path / "a <run>", rows())
    (folder / "config.yaml").write_text((ROOT / "configs" / "tiny_cp2.yaml").read_text())
    assert main(["report", str(folder)]) == 0
    assert "report.html written" in capsys.readouterr().out
    text = (folder / "report.html").read_text()
    page = Page(text)
    words = " ".join(page.words)
    # six of training (loss, speed, norm, rate, perplexity), seven of health, one of experts
    assert page.tags.count("figure") == page.tags.count("svg") == 5 + len(HEALTH) + 1
    for said in ("a <run>", "12 steps", "5.0000 → 0.4167", "evaluation loss at step 12", "layer 1", "auto takes", "linear_head_dim: 32"):
        assert said in words, said
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"@import|url\((?!#)", text)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_page_of_a_plain_run_has_no_empty_pictures(tmp_path):
    page = Page(write_report(run_folder(tmp_path / "run", rows(full=False)), output=tmp_path / "p.html").read_text())
    assert page.tags.count("svg") == 4
    assert not {"KDA layers", "Experts", "Plan", "Configuration"} & set(page.words)


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    folder = run_folder(tmp_path / "run", rows(3))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "can't be read"), ("", "holds no step yet"), ("{}\n", "line 1: has no step"), ("x\n{}\n", "line 1: is not JSON")],
)
def test_what_is_no_run_is_refused_in_a_line(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ReportError, match=message):
        read_metrics(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kcp: error: ") and error.count("\n") == 1


def test_an_old_page_survives_a_failure(tmp_path, monkeypatch):
    folder = run_folder(tmp_path / "run", rows(3))
    page = write_report(folder)
    before = page.read_text()
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ReportError, match="No space left"):
        write_report(folder)
    assert page.read_text() == before
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "report.html"]
