"""A tokenizer's folder may bring Python code; it is never run, whoever says yes on standard input."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loader.shards import ShardSet
from loader.tokenizer import choose_tokenizer
from shardprep.errors import NotFound
from tests.waiting import HANG_S

if TYPE_CHECKING:
    from tests.conftest import Prep

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import PreTrainedTokenizerFast
class StrangeTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def strange_dir(prep: Prep, tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder whose tokenizer is a class of its own, with 'y' on standard input."""
    folder = Path(shutil.copytree(prep.model_dir, tmp_path / "strange"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_bytes()) if path.exists() else {}
    config["tokenizer_class"] = "StrangeTokenizer"
    config["auto_map"] = {"AutoTokenizer": [None, "strange.StrangeTokenizer"]}
    path.write_text(json.dumps(config))
    (folder / "strange.py").write_text(CODE.format(marker=str(marker)))
    (folder / "config.json").write_text(json.dumps({"model_type": "strange", "auto_map": config["auto_map"]}))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    return folder


@pytest.mark.processes
def test_planning_runs_no_code_of_a_tokenizers_folder(
    prep: Prep, strange_dir: Path, sample_dir: Path, tmp_path: Path, marker: Path
) -> None:
    flags = ["--input_dir", sample_dir, "--output_dir", tmp_path / "data", "--model_id", strange_dir]
    process = prep.start("plan", *flags, stdin=subprocess.PIPE)
    text, _ = process.communicate("y\n" * 9, timeout=HANG_S)
    assert not marker.exists(), "its code ran"
    assert process.returncode == 66, text
    assert f"no usable tokenizer was found in the folder {strange_dir}" in text
    assert "Traceback" not in text


def test_the_loader_runs_no_code_of_a_tokenizers_folder(strange_dir: Path, marker: Path) -> None:
    with pytest.raises(NotFound, match="no usable tokenizer was found in the folder"):
        choose_tokenizer(ShardSet([]), strange_dir)
    assert not marker.exists(), "its code ran"
