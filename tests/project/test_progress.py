"""What long work tells of itself: a bar on a terminal, lines in a log, in bytes or in what is counted."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from preprocess.look import train_tokenizer as training
from shardprep import console as module
from shardprep.console import Progress, progress_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_tells_share_speed_and_what_is_left_of_bytes_and_of_shards() -> None:
    line = progress_line("shard 00007", 25_000_000, 100_000_000, "bytes", 10.0)
    assert line == "shard 00007: 25% of 100 MB, 2.50 MB/s, 30 s left"
    line = progress_line("verifying", 30, 40, "shards", 60.0)
    assert line == "verifying: 75% of 40 shards, 0.5 shards/s, 20 s left"
    line = progress_line("verifying", 0, 1, "shards", 60.0)
    assert line == "verifying: 0% of 1 shard, 0.0 shards/s", "nobody knows how long it takes"
    line = progress_line("shard 00007", 66_000_000_000, 6_600_000_000_000, "bytes", 6000.0)
    assert line == "shard 00007: 1% of 6.60 TB, 11.0 MB/s, 165 h left"


def test_a_log_gets_a_line_now_and_then_and_not_one_a_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 10.0, 29.9, 30.0, 59.0, 60.5])
    # Not of time itself, which threads of other tests may ask.
    monkeypatch.setattr("shardprep.console.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Progress("x", 100, unit="shards") as progress:
        for _ in range(5):
            progress.add(10)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["x: 30% of 100 shards", "x: 50% of 100 shards"]


def test_a_terminal_gets_a_bar_and_lines_stand_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("x", 4, unit="shards") as progress:
        progress.add(1)
        progress.say("shard 2 failed")
        progress.add(3)
    text = terminal.getvalue()
    assert "\rshard 2 failed\n" in text.replace(" ", "").replace("shard2failed", "shard 2 failed")
    assert "4.00/4.00" in text
    assert "shards/s" in text


def test_training_a_tokenizer_tells_that_it_reads_and_that_it_merges(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sample_dir: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "LOG_EVERY_S", 0.0)
    monkeypatch.setattr(training, "LOG_EVERY_S", 0.001)
    training.train_tokenizer(input_dir=sample_dir, vocab_size=1500, output_dir=tmp_path / "tokenizer")
    lines = capsys.readouterr().err.splitlines()
    reading = [line for line in lines if line.startswith("reading: ")]
    assert re.search(r"100% of \d+ kB", reading[-1])
    assert any("its pairs are merged" in line for line in lines)
