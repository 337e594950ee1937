"""benchmarks/gpu_check.py with a tiny model, so that it runs where somebody has a GPU for four minutes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.world import World, hostile_text


@pytest.mark.processes
def test_the_check_for_a_gpu_measures_on_a_cpu_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = World(tmp_path).raw({"a.txt": hostile_text(400)}).make(record="packed", seq_len=64).data_dir
    words = ["--tiny", "--data", str(data), "--seconds", "0.05", "--seq_len", "64"]
    monkeypatch.setattr("sys.argv", ["gpu_check.py", *words])
    script = runpy.run_path(str(ROOT / "benchmarks" / "gpu_check.py"))
    assert script["main"]() == 0
    printed = capsys.readouterr().out
    waits = re.findall(r"^\| (\d) \| [\d.]+ \| ([\d.]+)% \| [\d,]+ \|$", printed, re.MULTILINE)
    assert [number for number, _ in waits] == ["0", "2", "4"]
    assert all(0 <= float(share) <= 100 for _, share in waits)
    assert re.search(r"^\| sdpa \| yes \| [\d.]+ \| [\d.]+ \|$", printed, re.MULTILINE)
    assert printed.count("no GPU") == 3  # two copies, and flash attention
