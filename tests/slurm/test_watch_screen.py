"""The screen of status --watch, sources, and the documented fields of --json."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

import pytest

from shardprep.console import source_lines
from shardprep.format.manifest import read_manifest
from slurm.status import screen_rows
from tests.checkout import ROOT
from tests.conftest import Prep
from tests.slurm.fake_slurm import QUEUES, FakeSlurm, slurm, squeue_line, status, submitted, write_log

pytestmark = pytest.mark.processes


@pytest.fixture
def shown(fake: FakeSlurm, data_dir: Path) -> list[str]:
    """Shards that run, wait and failed, one with a long line of Korean and a terminal's codes in its log."""
    folder = data_dir.rename(data_dir.with_name("한국어 코퍼스 " + "폴더" * 20))
    submitted(folder)
    fake.answers("squeue", QUEUES["24.11.5"])
    write_log(folder, "1_1.log", "시작 \033[31m" + "긴 줄 " * 60 + "끝에 있는 이유\n")
    return slurm("status", folder).splitlines()


def cells(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_watch_draws_what_status_prints_in_rows_that_fit_whatever_a_log_holds(
    shown: list[str], width: int
) -> None:
    rows = screen_rows(shown, width, 1000)
    assert max(map(cells, rows)) <= width
    assert not re.search(r"[\x00-\x1f\x7f]", "".join(rows))
    assert re.sub(r"\s", "", "".join(rows)) == re.sub(r"\s", "", "".join(shown))


def test_where_the_screen_is_too_small_what_to_type_next_stays_whole_at_its_bottom(shown: list[str]) -> None:
    rows = screen_rows(shown, 40, 12)
    assert len(rows) == 11
    assert re.sub(r"\s", "", "".join(rows)).endswith(re.sub(r"\s", "", shown[-1]))
    assert rows[0].startswith(shown[0][:20])


def test_every_field_of_json_is_documented_and_every_documented_field_is_there(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    fake.answers("squeue", squeue_line("0", "PENDING", "Resources") + QUEUES["24.11.5"])
    found = status(data_dir)
    page = (ROOT / "docs" / "status_json.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert documented == set(found)


def test_status_counts_documents_tokens_bytes_and_quarantined_per_source(
    fake: FakeSlurm, prep: Prep, tmp_path: Path
) -> None:
    raw, folder = tmp_path / "raw", tmp_path / "data"
    sizes = {"ko": [3, 5], "en": [2], "bad\033[2J": [1]}
    for name, files in sizes.items():
        (raw / name).mkdir(parents=True)
        for number, num_lines in enumerate(files):
            lines = ['{"text": "' + "a b c " * (number + 1) + '"}\n'] * num_lines
            (raw / name / f"{number}.jsonl").write_text("".join([*lines, '{"text": null}\n']))
    prep.plan(raw, folder, num_shards=4, recursive=True, max_bad_fraction=0.9)
    prep.make(folder)
    found = json.loads(slurm("status", folder, "--json"))["sources"]
    num_tokens = sum(read_manifest(folder, shard).counts.num_tokens for shard in range(4))
    for name, files in sizes.items():
        inputs = list((raw / name).iterdir())
        assert found[name]["num_documents"] == sum(files)
        assert found[name]["num_quarantined"] == len(files)
        assert found[name]["num_bytes"] == sum(path.stat().st_size for path in inputs)
    assert sum(each["num_tokens"] for each in found.values()) == num_tokens
    shown = slurm("status", folder)
    tokens, size = found["ko"]["num_tokens"], found["ko"]["num_bytes"]
    assert f"  ko: 8 documents, {tokens} tokens, {size} B, 2 left out\n" in shown
    assert "  bad\\x1b[2J: 1 documents" in shown
    assert "\033" not in shown
    assert next(line for line in shown.splitlines() if "left out" in line).startswith("  ko: ")


def test_of_many_sources_the_largest_are_shown_and_one_alone_has_no_line() -> None:
    counts = {"num_documents": 1, "num_bytes": 1, "num_quarantined": 0}
    many = {f"s{number:02d}": {**counts, "num_tokens": number} for number in range(20)}
    lines = source_lines(many, all_in="index.json")
    assert [line.split(":")[0].strip() for line in lines[:-1]] == [f"s{19 - n:02d}" for n in range(12)]
    assert lines[-1] == "  and 8 more sources: index.json has them all"
    assert source_lines({".": many["s01"]}, all_in="index.json") == []
