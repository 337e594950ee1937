"""Impossible sizes and wrong types, with right hashes, end commands in words, and take no memory."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.commands import command
from tests.faults.forked_case import Ended, run_forked
from tests.faults.judging import refusal
from tests.forged import rewrite_json
from tests.oracle.test_done import BROKEN, forge
from tests.world import World

pytestmark = pytest.mark.processes

READERS = ("report", "peek", "status", "load", "verify", "export nanogpt", "export hf", "stage")
FORMS: dict[str, dict[str, Any]] = {
    "documents": {},
    "best_fit": {"record": "packed", "seq_len": 64, "pack": "best_fit"},
}
SHARD = f"shard-{BROKEN:05d}"


@functools.cache
def made(root: Path, form: str) -> Path:
    texts = "".join(f"line {number} {'of text ' * (number % 9)}\n" for number in range(200))
    return World(root / form).raw({"a.txt": texts}).plan(num_shards=2, **FORMS[form]).run().data_dir


@pytest.fixture
def copy(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    """Makes a world whose data/ is a copy of a data set of this form."""

    def make(form: str) -> World:
        shutil.copytree(made(tmp_path_factory.getbasetemp() / "sizes", form), tmp_path / "data")
        return World(tmp_path)

    return make


def ended_in_words(world: World, names: Iterable[str]) -> dict[str, int]:
    """Run commands in forks with limits; their exit codes."""
    codes = {}
    for name in names:
        ended: Ended = run_forked(command(name, world.data_dir.parent, []))
        assert ended.how == "ended", (name, ended)
        assert not ended.code or refusal(ended)[0] == "refused", (name, ended)
        codes[name] = ended.code
    return codes


WRONG_NUMBERS = {
    "num_bytes": (0, 3, 2**31, 2**32 - 1),
    "num_tokens": (2**31, 2**32 - 1),
    "offset": (1, 2**62, 2**64 - 1),
    "source": (2**32 - 1,),
    "source_offset": (2**63, 2**64 - 1),
    "starts_offset": (0, 2**62, 2**64 - 1),
    "num_starts": (2**20, 2**32 - 1),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_an_idx_with_an_impossible_number_is_refused_or_without_effect(
    copy: Callable[[str], World], form: str, name: str
) -> None:
    """In one record, and in all of them."""
    if form == "documents" and "starts" in name:
        return
    world = copy(form)
    original = (world.data_dir / f"{SHARD}.idx").read_bytes(), (world.data_dir / f"{SHARD}.json").read_bytes()
    for number, value in enumerate(WRONG_NUMBERS[name]):
        for suffix, data in zip(("idx", "json"), original, strict=True):
            (world.data_dir / f"{SHARD}.{suffix}").write_bytes(data)

        def changed(records: Any, number: int = number, value: int = value) -> Any:
            records[name][slice(None) if number % 2 else len(records) // 2] = value
            return records

        forge(world, records=changed)
        codes = ended_in_words(world, {"verify", READERS[number % len(READERS)]})
        # Where starts and sources begin, verify does not compare.
        assert codes["verify"] == 65 or name in ("starts_offset", "source_offset"), value


def test_samples_that_lie_on_one_another_take_no_memory_for_each(copy: Callable[[str], World]) -> None:
    """Each is the whole tar, of 1 GiB of which nothing is on disk."""
    world = copy("documents")

    def changed(records: Any) -> Any:
        records["offset"] = np.arange(len(records))
        records["num_bytes"] = (1 << 30) - len(records)
        return records

    forge(world, records=changed)
    os.truncate(world.data_dir / f"{SHARD}.tar", 1 << 30)
    rewrite_json(world.data_dir / f"{SHARD}.json", **{"tar.num_bytes": 1 << 30})
    codes = ended_in_words(world, ["load", "peek", "export nanogpt", "report"])
    assert {name for name, code in codes.items() if code == 65} >= {"load", "export nanogpt"}


INDEXES: dict[str, Callable[[Any], object]] = {
    "samples": lambda it: [row.__setitem__(slice(0, 5), [2**40, 2**40, 9, 1024, 0]) for row in it["shards"]],
    "tar bytes": lambda it: [row.__setitem__(3, 512 * 2**50) for row in it["shards"]],
    "samples of one": lambda it: it["shards"][0].__setitem__(0, 2**40),
    "seq_len": lambda it: it["spec"].update(seq_len=2**27),
    "vocabulary": lambda it: it["spec"]["tokenizer"].update(vocab_size=2**32 - 1),
}


@pytest.mark.parametrize("name", INDEXES)
@pytest.mark.parametrize("form", ["documents", "best_fit"])
def test_an_index_of_impossible_sizes_takes_no_memory(
    copy: Callable[[str], World], form: str, name: str
) -> None:
    world = copy(form)
    world.verify()
    content = json.loads((world.data_dir / "index.json").read_bytes())
    INDEXES[name](content)
    rewrite_json(world.data_dir / "index.json", shards=content["shards"], spec=content["spec"])
    ended_in_words(world, ["load"])


def test_a_histogram_of_lengths_that_no_document_has_is_refused(copy: Callable[[str], World]) -> None:
    world = copy("documents")
    rewrite_json(world.data_dir / f"{SHARD}.json", **{"counts.length_histogram": [1] * 300_000})
    ended_in_words(world, ["report", "verify", "load"])


def test_a_side_file_of_one_endless_line_is_refused(tmp_path: Path) -> None:
    lines = "".join(f'{{"text": "text {number}", "id": "i{number}"}}\n' for number in range(9))
    world = World(tmp_path).raw({"a.jsonl": lines}).plan(num_shards=1, id_field="id").run()
    os.truncate(world.data_dir / "ids/shard-00000.jsonl", 60 << 30)  # of which nothing is on disk
    ended = run_forked(lambda: (world.main("peek", world.data_dir, "id:none").code, None))
    assert (ended.how, ended.code) == ("ended", 65)


VALUES: tuple[Any, ...] = (
    3, None, "x", [], {}, [1], {"a": 1}, {"a": {}}, 2**70, -1, 1.5, True, float("nan"), "\ud800", [[]],
)  # fmt: skip
CAUSES = (
    {"a": {"shards": 3, "nodes": {}}},
    {"a": {"shards": "0-", "nodes": {}}},
    {"a": {"shards": "0", "nodes": 4}},
    {"a": {"shards": "0", "nodes": {"n": "x"}}},
    {"a": {"shards": "0-9999999", "nodes": {}}},
)


def test_a_history_of_wrong_types_ends_no_command(copy: Callable[[str], World]) -> None:
    world = copy("documents")
    path = world.data_dir / "jobs" / "history.jsonl"
    path.parent.mkdir()
    good = {"time": 1.0, "event": "retry", "user": "u", "round": 1, "jobs": ["1"], "why": "w", "report": "r"}
    good |= {"causes": {"x": {"shards": "0", "nodes": {"n": 1}}}, "number": 1, "failed_core_s": 1.0}
    lines = [{**good, name: value} for name in good for value in VALUES]
    lines += [{**good, "causes": value} for value in CAUSES]
    texts = [json.dumps(each) for each in [good, *lines, good]]
    path.write_text("\n".join([*texts, "[" * 10**5, "null", '"x"', "{", "\0"]))
    assert set(ended_in_words(world, ["status", "report"]).values()) == {0}


def test_records_of_attempts_of_wrong_values_end_no_command(copy: Callable[[str], World]) -> None:
    """A record for each value of each name, and one that is right."""
    world = copy("documents")
    (world.data_dir / "shard-00000.json").unlink()
    plan_id = json.loads((world.data_dir / "plan.json").read_bytes())["plan_id"]
    number = os.statvfs(world.data_dir).f_fsid  # stat prints its halves the other way round
    identity = f"{world.data_dir.stat().st_ino}.{(number & 0xFFFFFFFF) << 32 | number >> 32:x}"
    begin = {
        "by": "run", "plan_id": plan_id, "identity": identity, "shards": "0",
        "time": "1000.0", "node": "n", "user": "u", "num_cpus": "1", "pid": "1", "pid_began": "3",
        "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_MEM_PER_CPU": "5", "log": "/x",
    }  # fmt: skip
    end = {"time": "1001.0", "exit_code": "65", "stage": "work", "killed_by": "9", "signal": "s"}
    end |= {"stopped_by": "x", "stopped": "1001", "limit": "5:00"}
    failure = {"shard": 0, "exit_code": 65, "reason": "r"}
    texts = ["", "x", "-7", str(2**70), "9" * 5000, "1e300", "inf", "nan", "0-9999999", "\0", "\ud800", "1_0"]

    def record(begin: dict[str, str], failure: object, end: dict[str, str]) -> str:
        lines = ["begin", *(f"{name}={value}" for name, value in begin.items()), json.dumps(failure)]
        return "\n".join([*lines, "end", *(f"{name}={value}" for name, value in end.items()), ""])

    right = record(begin, failure, end)
    attempts = [right, right[:-40], "[" * 10**5, "begin\n" + "[" * 10**5]
    for text in texts:
        attempts += [record({**begin, name: text}, failure, end) for name in begin]
        attempts += [record(begin, failure, {**end, name: text}) for name in end]
    for value in (*VALUES, 2**70, 1e300):
        attempts += [record(begin, {**failure, name: value}, end) for name in failure]
        attempts += [record(begin, value, end)]
    folder = world.data_dir / "jobs" / "attempts"
    folder.mkdir(parents=True)
    for number, text in enumerate(attempts):
        (folder / f"7_{number}.r0").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert set(ended_in_words(world, ["status", "report"]).values()) == {0}
    found = json.loads(world.main("status", world.data_dir, "--json").out)
    assert sum(found["restarts"].values()) > 100, "those that are right are told"
