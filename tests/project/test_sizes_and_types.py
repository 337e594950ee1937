"""Impossible sizes and wrong types, with right hashes, end commands in words, and take no memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardprep.format import plan as plan_file
from shardprep.format.attempts import folder_identity, read_attempts
from shardprep.format.checked_json import content_sha256
from shardprep.format.idx import read_idx
from shardprep.format.plan import need_plan
from tests.conftest import forge_shard, seal
from tests.faults.commands import REFUSING, command
from tests.faults.forked_case import Ended, run_forked

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes

READERS = ("report", "peek", "status", "load", "verify", "export nanogpt", "export hf", "stage")


@pytest.fixture(scope="module")
def forms(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows: dict[str, Any] = {"record": "packed", "seq_len": 64}
    options: dict[str, dict[str, Any]] = {
        "documents": {},
        "concat": rows,
        "best_fit": rows | {"pack": "best_fit"},
    }
    return prep.make_forms(sample_dir, tmp_path_factory.mktemp("forms"), options, num_shards=2)


@pytest.fixture
def place(forms: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a workplace whose data/ is a copy of a data set of this form."""

    def make(form: str) -> Path:
        shutil.copytree(forms / form, tmp_path / "data")
        return tmp_path

    return make


def ended_in_words(work: Callable[[], tuple[int, Any]]) -> Ended:
    ended = run_forked(work)
    assert ended.how == "ended", ended
    assert ended.code in {0, *REFUSING}, ended
    assert "which nobody expected" not in ended.text, ended
    return ended


WRONG_PLACES = {
    "num_bytes": (0, 3, 2**31, 2**32 - 1),
    "num_tokens": (2**31, 2**32 - 1),
    "offset": (1, 2**62, 2**64 - 1),
    "source": (2**32 - 1,),
    "source_offset": (2**63, 2**64 - 1),
    "starts_offset": (0, 2**62, 2**64 - 1),
    "num_starts": (2**20, 2**32 - 1),
}


@pytest.mark.parametrize("form", ["documents", "concat", "best_fit"])
@pytest.mark.parametrize("name", WRONG_PLACES)
def test_an_idx_with_an_impossible_number_is_refused_or_without_effect(
    place: Callable[[str], Path], form: str, name: str
) -> None:
    folder = place(form)
    data = folder / "data"
    records = read_idx(data, need_plan(data).spec, 0)
    if name not in (records.dtype.names or ()):
        return
    for number, value in enumerate(WRONG_PLACES[name]):
        changed = records.copy()
        if number % 2:
            changed[name] = value  # all of them
        else:
            changed[name][len(records) // 2] = value
        forge_shard(data, 0, records=changed)
        for reader in ("verify", READERS[number % len(READERS)]):
            ended = ended_in_words(command(reader, folder, []))
            is_seen = name not in (
                "starts_offset",
                "source_offset",
            )  # where these begin, verify does not compare
            assert not is_seen or reader != "verify" or ended.code == 65, (name, value)


def test_samples_that_lie_on_one_another_take_no_memory_for_each(place: Callable[[str], Path]) -> None:
    """Each is the whole tar."""
    folder = place("documents")
    data = folder / "data"
    records = read_idx(data, need_plan(data).spec, 0)
    with (data / "shard-00000.tar").open("r+b") as tar:
        tar.truncate(1 << 30)  # of which nothing is on disk
    records["offset"] = np.arange(len(records))
    records["num_bytes"] = (1 << 30) - len(records)
    forge_shard(data, 0, records=records)
    for name in ("load", "peek", "export nanogpt", "report"):
        ended = ended_in_words(command(name, folder, []))
        assert name == "report" or ended.code == 65, name


@pytest.mark.parametrize(
    "change",
    [
        lambda it: [row.__setitem__(slice(0, 5), [2**40, 2**40, 9, 1024, 0]) for row in it["shards"]],
        lambda it: [row.__setitem__(3, 512 * 2**50) for row in it["shards"]],
        lambda it: it["shards"][0].__setitem__(0, 2**40),
        lambda it: it["spec"].update(seq_len=2**27),
        lambda it: it["spec"]["tokenizer"].update(vocab_size=2**32 - 1),
    ],
    ids=["samples", "tar bytes", "samples of one", "seq_len", "vocabulary"],
)
@pytest.mark.parametrize("form", ["documents", "concat"])
def test_an_index_of_impossible_sizes_takes_no_memory(
    place: Callable[[str], Path], form: str, change: Callable[[Any], object], prep: Prep
) -> None:
    folder = place(form)
    assert prep.command("verify", folder / "data").code == 0
    path = folder / "data" / "index.json"
    content = json.loads(path.read_text())
    change(content)
    content["content_sha256"] = content_sha256(content)
    path.write_text(json.dumps(content))
    ended_in_words(command("load", folder, []))


def test_a_histogram_of_lengths_that_no_document_has_is_refused(place: Callable[[str], Path]) -> None:
    folder = place("documents")
    path = folder / "data" / "shard-00000.json"
    content = json.loads(path.read_text())
    content["counts"]["length_histogram"] = [1] * 300_000
    path.write_text(json.dumps(content))
    seal(path)
    for name in ("report", "verify", "load"):
        ended_in_words(command(name, folder, []))


def test_a_side_file_of_one_endless_line_is_refused(prep: Prep, raw: Path, tmp_path: Path) -> None:
    (raw / "a.jsonl").write_text("".join(f'{{"text": "text {n}", "id": "i{n}"}}\n' for n in range(9)))
    data = tmp_path / "data"
    prep.plan(raw, data, num_shards=1, id_field="id")
    prep.make(data)
    os.truncate(data / "ids/shard-00000.jsonl", 60 << 30)  # of which nothing is on disk
    assert ended_in_words(partial(_command, prep, ["peek", data, "id:none"])).code == 65


def _command(prep: Prep, words: list[object]) -> tuple[int, None]:
    done = prep.command(*words)
    print(done.text)
    return done.code, None


def test_a_plan_whose_blocks_are_all_the_same_bytes_is_refused(
    planned_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prep: Prep, sample_dir: Path
) -> None:
    monkeypatch.setattr(plan_file, "_MOST_WHOLE", 1)
    prep.plan(sample_dir, tmp_path / "data", num_shards=3)
    path = tmp_path / "data" / "plan.json"
    line, _, rest = path.read_bytes().partition(b"\n")
    head = json.loads(line + b"}")
    table = head["parts"]["inputs"]
    table["num_rows"], table["blocks"] = 512 * 5000, table["blocks"] * 5000
    head["parts"]["mtimes_ns"]["num_rows"] = 512 * 5000
    head["content_sha256"] = content_sha256(head)
    path.write_bytes(json.dumps(head, separators=(",", ":")).encode()[:-1] + b"\n" + rest)
    done = prep.command("verify", tmp_path / "data")
    assert (done.code, "plan.json" in done.text) == (65, True)


VALUES: tuple[Any, ...] = (
    3,
    None,
    "x",
    [],
    {},
    [1],
    {"a": 1},
    {"a": {}},
    2**70,
    -1,
    1.5,
    True,
    float("nan"),
    "\ud800",
    [[]],
)


def test_a_history_of_wrong_types_ends_no_command(place: Callable[[str], Path]) -> None:
    folder = place("documents")
    path = folder / "data" / "jobs" / "history.jsonl"
    path.parent.mkdir()
    good = {"time": 1.0, "event": "retry", "user": "u", "round": 1, "jobs": ["1"], "why": "w", "report": "r"}
    good |= {"causes": {"x": "0"}, "number": 1}
    lines = [{**good, name: value} for name in good for value in VALUES]
    texts = [json.dumps(each) for each in [good, *lines, good]]
    path.write_text("\n".join([*texts, "[" * 10**5, "null", '"x"', "{", "\0"]))
    for name in ("status", "report"):
        ended = ended_in_words(command(name, folder, []))
        assert ended.code == 0, ended


def test_records_of_attempts_of_wrong_values_end_no_command(place: Callable[[str], Path]) -> None:
    """A record for each value of each name, and one that is right."""
    folder = place("documents")
    data = folder / "data"
    (data / "shard-00000.json").unlink()
    begin = {
        "by": "run",
        "plan_id": need_plan(data).plan_id,
        "identity": folder_identity(data),
        "shards": "0",
    }
    begin |= {"time": "1000.0", "node": "n", "user": "u", "num_cpus": "1", "pid": "1", "pid_began": "3"}
    begin |= {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_MEM_PER_CPU": "5", "log": "/x"}
    end = {"time": "1001.0", "exit_code": "65", "stage": "work", "killed_by": "9", "signal": "s"}
    end |= {"stopped_by": "x", "stopped": "1001", "limit": "5:00"}
    failure = {"shard": 0, "exit_code": 65, "reason": "r"}
    texts = ["", "x", "-7", str(2**70), "9" * 5000, "1e300", "inf", "nan", "0-9999999", "\0", "\ud800", "1_0"]

    def record(begin: dict[str, str], failure: object, end: dict[str, str]) -> str:
        parts = [["begin", *(f"{name}={value}" for name, value in begin.items())], [json.dumps(failure)]]
        parts.append(["end", *(f"{name}={value}" for name, value in end.items())])
        return "\n".join(line for part in parts for line in part) + "\n"

    right = record(begin, failure, end)
    attempts = [right, right[:-40], "[" * 10**5, "begin\n" + "[" * 10**5]
    for text in texts:
        attempts += [record({**begin, name: text}, failure, end) for name in begin]
        attempts += [record(begin, failure, {**end, name: text}) for name in end]
    for value in (*VALUES, 2**70, 1e300):
        attempts += [record(begin, value, end)]
        attempts += [record(begin, {**failure, name: value}, end) for name in failure]
    (data / "jobs" / "attempts").mkdir(parents=True)
    for number, text in enumerate(attempts):
        path = data / "jobs" / "attempts" / f"7_{number}.r0"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for reader in ("status", "report"):
        assert ended_in_words(command(reader, folder, [])).code == 0
    assert len(read_attempts(data, need_plan(data).plan_id).own) > 100, "the others are told, too"
