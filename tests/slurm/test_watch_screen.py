"""The screen of status --watch, the metrics file, and the documented fields of --json."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from shardprep.format.manifest import read_manifest
from shardprep.format.shard_making import source_lines
from slurm.status import cut, metrics_text, screen_lines
from tests.checkout import ROOT
from tests.conftest import Prep
from tests.slurm.fake_slurm import QUEUES, FakeSlurm, slurm, squeue_line, status, submitted, write_log

pytestmark = pytest.mark.processes

COUNTS = dict.fromkeys(("num_done", "num_running", "num_pending", "num_failed", "num_not_visible"), 0)
COUNTS["num_not_submitted"] = 0


@pytest.fixture
def data(fake: FakeSlurm, data_dir: Path) -> dict[str, Any]:
    """Shards that run, wait and failed, one with a long line of Korean and a terminal's codes in its log."""
    folder = data_dir.rename(data_dir.with_name("한국어 코퍼스 " + "폴더" * 20))
    submitted(folder)
    fake.answers("squeue", QUEUES["24.11.5"])
    write_log(folder, "1_1.log", "시작 \033[31m" + "긴 줄 " * 60 + "끝에 있는 이유\n")
    found: dict[str, Any] = json.loads(slurm("status", folder, "--json"))
    return found


def cells(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_every_line_of_the_screen_fits_and_has_no_codes_whatever_a_log_holds(
    data: dict[str, Any], width: int
) -> None:
    lines = screen_lines(data, width=width)
    assert max(map(cells, lines)) <= width
    assert len(lines) <= 23
    assert not re.search(r"[\x00-\x1f\x7f]", "".join(lines))
    if width == 80:
        text = "\n".join(lines)
        for words in ("2 running", "1 pending", "2 failed", "1 bad input (65): shard 0", "끝에 있는 이유"):
            assert words in text
        assert "shard 4: as many run at once as --max_parallel allows" in text


def test_what_somebody_should_look_at_is_on_the_screen_and_fits_with_everything_else(
    data: dict[str, Any],
) -> None:
    node_away = {"shards": "4", "reason": "ReqNodeNotAvail, UnavailableNodes:n[1-200]"}
    node_away |= {"means": "the nodes that it needs are down, drained or reserved; sinfo -R"}
    pressing = {"suspended": "2", "wrong": "0", "accounts_away": "down", "clock_difference_s": 240}
    pressing |= {"waits_for": [{**node_away, "starts": "2026-11-22T18:05:00"}]}
    text = "\n".join(screen_lines({**data, **pressing}))
    for words in (
        "suspended: shard 2;",
        "found wrong by verify: shard 0;",
        "clocks are 4 min",
        "accounts give no",
    ):
        assert words in text
    assert "shard 4: expected at 18:05; the nodes" in text
    full = {
        "waits_for": [{**node_away, "starts": ""}] * 9,
        "causes": {f"exit code {number}": "0" for number in range(9)},
        "restarts": {f"NODE_FAIL on n{number}": 1 for number in range(9)},
        "slow_nodes": [{"node": "n1", "speed": 0.5}] * 3,
        "stray_jobs": ["9"],
        "slurm_away": "squeue gets no answer: " + "Unable to contact slurm controller " * 9,
        "not_visible": "4",
        "why_not_visible": "Slurm gives no answer",
    }
    lines = screen_lines({**data, **pressing, **full})
    assert len(lines) <= 23
    kinds = {line[:13].strip() for line in lines}
    assert {
        "Slurm",
        "not visible",
        "note",
        "waits for",
        "failed",
        "restarted",
        "slow nodes",
        "last failed",
    } <= kinds
    assert lines[-1].startswith("Ctrl-C")


def test_while_slurm_gives_no_answer_the_screen_does_not_say_to_type_the_same_again(
    data: dict[str, Any],
) -> None:
    away = {"slurm_away": "down", "running": "", "pending": "", "not_visible": "1-4", "why_not_visible": "x"}
    assert screen_lines({**data, **away})[-1].startswith("Ctrl-C"), "the watch asks again by itself"


def test_the_screen_is_drawn_in_ascii_where_the_terminal_has_no_utf8(data: dict[str, Any]) -> None:
    assert screen_lines({**data, "folder": "/data", "failures": []}, ascii_only=True)[1].isascii()


def test_the_bar_shows_every_kind_and_fills_the_width(data: dict[str, Any]) -> None:
    counts = {**COUNTS, "num_shards": 100_000, "num_done": 99_990, "num_failed": 1, "num_running": 9}
    drawn = screen_lines({**data, **counts}, ascii_only=True)[1]
    assert (len(drawn), drawn.count("="), drawn.count("x")) == (80, 1, 1)
    all_done = {**COUNTS, "num_shards": 7, "num_done": 7}
    assert screen_lines({**data, **all_done}, ascii_only=True)[1] == "#" * 80


def test_a_line_is_cut_by_the_cells_it_takes() -> None:
    assert cut("한국어", 6) == "한국어"
    assert cut("한국어 코퍼스", 9) == "한국어..."
    assert cut("a\tb\033c", 80) == r"a\tb\x1bc"


def test_metrics_are_prometheus_text_whole_and_without_what_is_not_known(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    submitted(data_dir)
    fake.answers("squeue", QUEUES["24.11.5"])
    path = tmp_path / "shardprep.prom"
    slurm("status", data_dir, "--metrics", path)
    lines = path.read_text().splitlines()
    assert f'shardprep_shards{{folder="{data_dir}",state="running"}} 2.0' in lines
    assert f'shardprep_shards_failed{{folder="{data_dir}",cause="bad input (65)"}} 1.0' in lines
    assert not any("tokens_per_second" in line for line in lines), "nothing is made yet"
    sample = re.compile(r'shardprep_\w+\{folder="[^"]*"(,\w+="[^"]*")*\} -?\d+(\.\d+)?')
    named = [line for line in lines if not line.startswith("#")]
    assert named
    assert all(sample.fullmatch(line) for line in named)
    assert len({line.split("{")[0] for line in named}) == sum(line.startswith("# TYPE") for line in lines)
    assert [each.name for each in tmp_path.glob(".*")] == []


def test_labels_are_escaped_as_prometheus_wants(data: dict[str, Any]) -> None:
    text = metrics_text({**data, "folder": 'a"b\\c\nd'})
    assert 'folder="a\\"b\\\\c\\nd"' in text


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
