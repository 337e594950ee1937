"""Impossible sizes and wrong types with correct hashes end commands with a message and take no memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.faults.forked_case import ForkedRun
from tests.faults.judging import verdict_of_end
from tests.faults.small_data_sets import command
from tests.forged import rewrite_json
from tests.oracle.test_done import BROKEN, forge
from tests.slurm.fake_slurm import Desk, array, ended, failure
from tests.world import World

pytestmark = [pytest.mark.long, pytest.mark.processes]

READERS = ("report", "peek", "status", "load", "verify", "export nanogpt", "export hf", "stage")
FORMS: dict[str, dict[str, Any]] = {
    "documents": {},
    "best_fit": {"record": "packed", "seq_len": 64, "pack": "best_fit"},
}
SHARD = f"shard-{BROKEN:05d}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    texts = "".join(f"line {number} {'of text ' * (number % 9)}\n" for number in range(200))
    root = tmp_path_factory.mktemp("made")
    return {
        name: World(root / name).raw({"a.txt": texts}).plan(num_shards=2, **options).run()
        for name, options in FORMS.items()
    }


@pytest.fixture
def world(made: dict[str, World], tmp_path: Path, request: pytest.FixtureRequest) -> World:
    """A copy of a data set, by default of documents."""
    return made[getattr(request, "param", "documents")].copy(tmp_path)


each_form = pytest.mark.parametrize("world", FORMS, indirect=True)


def exit_codes(world: World, *names: str) -> dict[str, int]:
    """Run commands in forks with limits, fail on a traceback, and return their exit codes."""
    ends = {name: ForkedRun(command(name, world.data_dir.parent, [])).end() for name in names}
    for each in ends.values():
        verdict_of_end(each)
    return {name: each.code for name, each in ends.items()}


WRONG_NUMBERS = {
    "num_bytes": (0, 3, 2**31, 2**32 - 1),
    "num_tokens": (2**31, 2**32 - 1),
    "offset": (1, 2**62, 2**64 - 1),
    "input_number": (2**32 - 1,),
    "input_offset": (2**63, 2**64 - 1),
    "starts_offset": (0, 2**62, 2**64 - 1),
    "num_starts": (2**20, 2**32 - 1),
}


@each_form
@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_an_idx_with_an_impossible_number_is_refused_or_without_effect(world: World, name: str) -> None:
    """In one record, or in all of them."""
    files = [world.data_dir / f"{SHARD}.{suffix}" for suffix in ("idx", "json")]
    originals = [path.read_bytes() for path in files]
    for number, value in enumerate(WRONG_NUMBERS[name]):
        for path, data in zip(files, originals, strict=True):
            path.write_bytes(data)

        def changed(records: Any, number: int = number, value: int = value) -> Any:
            if name in records.dtype.names:  # only rows have starts
                records[name][slice(None) if number % 2 else len(records) // 2] = value
            return records

        forge(world, "records", changed)
        codes = exit_codes(world, "verify", READERS[number % len(READERS)])
        # verify does not compare starts and source offsets.
        assert codes["verify"] == 65 or "starts" in name or name == "input_offset", value


def test_overlapping_samples_take_no_memory_each(world: World) -> None:
    """Each sample is the whole tar, a sparse file of 1 GiB."""

    def changed(records: Any) -> Any:
        records["offset"] = np.arange(len(records))
        records["num_bytes"] = (1 << 30) - len(records)
        return records

    forge(world, "records", changed)
    os.truncate(world.data_dir / f"{SHARD}.tar", 1 << 30)
    rewrite_json(world.data_dir / f"{SHARD}.json", **{"tar.num_bytes": 1 << 30})
    codes = exit_codes(world, "load", "peek", "export nanogpt", "report")
    assert codes["load"] == codes["export nanogpt"] == 65


INDEXES: dict[str, Callable[[Any], object]] = {
    "samples": lambda it: [row.__setitem__(slice(0, 5), [2**40, 2**40, 9, 1024, 0]) for row in it["shards"]],
    "tar bytes": lambda it: [row.__setitem__(3, 512 * 2**50) for row in it["shards"]],
    "samples of one": lambda it: it["shards"][0].__setitem__(0, 2**40),
    "seq_len": lambda it: it["spec"].update(seq_len=2**27),
    "vocabulary": lambda it: it["spec"]["tokenizer"].update(vocab_size=2**32 - 1),
}


@each_form
def test_an_index_or_a_manifest_of_impossible_sizes_takes_no_memory(world: World) -> None:
    content = (world.verify().data_dir / "index.json").read_bytes()
    for change in INDEXES.values():
        values = json.loads(content)
        change(values)
        rewrite_json(world.data_dir / "index.json", shards=values["shards"], spec=values["spec"])
        exit_codes(world, "load")
    (world.data_dir / "index.json").unlink()
    rewrite_json(world.data_dir / f"{SHARD}.json", **{"counts.length_histogram": [1] * 300_000})
    exit_codes(world, "report", "verify", "load")


def test_an_index_of_millions_of_empty_lists_takes_status_no_memory(world: World) -> None:
    """``status`` compares only the counts in it."""
    world.verify()
    path = world.data_dir / "index.json"
    spec = json.loads(path.read_bytes())["spec"]
    path.write_text(f'{{"spec": {json.dumps(spec)}, "shards": [{"[]," * 20_000_000}0]}}', encoding="ascii")
    found = ForkedRun(lambda: (world.main("status", world.data_dir).code, None), memory_bytes=1 << 30).end()
    assert (found.how, found.code) == ("ended", 0)


def test_a_side_file_of_one_endless_line_is_refused(tmp_path: Path) -> None:
    lines = [{"text": f"text {number}", "id": f"i{number}"} for number in range(9)]
    world = World(tmp_path).raw({"a.jsonl": lines}).plan(num_shards=1, id_field="id").run()
    os.truncate(world.data_dir / "ids/shard-00000.jsonl", 60 << 30)  # a sparse file
    found = ForkedRun(lambda: (world.main("peek", world.data_dir, "id:none").code, None)).end()
    assert (found.how, found.code) == ("ended", 65)


def _code_of(world: World, words: list[object]) -> tuple[int, None]:
    return world.main(*words).code, None


def test_millions_of_ids_in_one_shard_take_no_memory_each(tmp_path: Path) -> None:
    """Their hash is right, and ``peek`` and ``blank`` look for another one."""
    world = (
        World(tmp_path).raw({"a.jsonl": [{"text": "a", "id": "i0"}]}).plan(num_shards=1, id_field="id").run()
    )
    path, listed = world.data_dir / "ids/shard-00000.jsonl", tmp_path / "listed"
    path.write_bytes(b'[0,0,"i0"]\n' * 1_500_000)
    stamp = {"num_bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    rewrite_json(world.data_dir / "shard-00000.json", ids=stamp)
    listed.write_text("none\n", encoding="ascii")
    for words in (
        ["peek", world.data_dir, "id:none"],
        ["blank", world.data_dir, "--ids", listed, "--output", "new"],
    ):
        found = ForkedRun(partial(_code_of, world, words), memory_bytes=150 << 20).end()
        assert (found.how, found.code) == ("ended", 66), words[0]


def test_ids_that_are_no_places_or_missing_are_refused_with_what_to_type(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.jsonl": [{"text": "a", "id": "i0"}]})
    path = world.plan(num_shards=1, id_field="id").run().data_dir / "ids/shard-00000.jsonl"
    names = tmp_path / "names"
    names.write_text("i0\n")
    for line in (b'[0,99999999999999999999,"i0"]\n', b'[-1,0,"i0"]\n', b""):
        path.write_bytes(line) if line else path.unlink()
        for words in (["peek", world.data_dir, "id:i0"], ["blank", world.data_dir, "--ids", names]):
            options = {"output": tmp_path / "new"} if words[0] == "blank" else {}
            ended = world.main(*words, **options).ends(65 if line else 66, path)
            remedy = str(ended.error and ended.error.remedy)
            assert remedy.startswith("shardprep --shard_id 0 ")
            assert remedy.endswith(" --again")


def test_digests_that_end_within_one_are_refused(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "one\ntwo\n"}).plan(num_shards=1, digests=True).run()
    path = world.data_dir / "digests/shard-00000.digests"
    raw = path.read_bytes() + b"xyz"
    path.write_bytes(raw)
    stamp = {"digests.num_bytes": len(raw), "digests.sha256": hashlib.sha256(raw).hexdigest()}
    rewrite_json(world.data_dir / "shard-00000.json", **stamp)
    world.main("duplicates", world.data_dir, output=tmp_path / "names").ends(65, path)


def test_shards_that_a_submission_names_again_and_again_take_no_memory(world: World) -> None:
    desk = Desk(data=world.data_dir, place=world.data_dir)
    desk.submitted(array(tasks=["0-99998"] * 3000))
    assert exit_codes(world, "status") == {"status": 65}
    desk.submitted(*[array(tasks=["0-99998"])] * 3)
    assert exit_codes(world, "status") == {"status": 65}


def many_events(desk: Desk) -> None:
    path = desk.data / "jobs" / "history.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"time":1,"event":"x"}\n' * (2 << 20))


def record_of_many_names(desk: Desk) -> None:
    desk.record("1_0", "".join(f"{number}=1\n" for number in range(10**6)))


def record_of_many_lines(desk: Desk) -> None:
    path = desk.record("1_0")
    path.write_bytes(path.read_bytes() + b"\n" * (30 << 20))


def record_of_many_failures(desk: Desk) -> None:
    line = '{"shard":%d,"exit_code":74,"reason":""}\n'
    desk.record("1_0", "".join(line % number for number in range(10**6, 1_600_000)))


def records_of_all_shards(desk: Desk) -> None:
    for number in range(50):
        desk.record(f"{number}_0", shards=f"{number}-99998")


@pytest.mark.parametrize(
    "write",
    [
        many_events,
        record_of_many_names,
        record_of_many_lines,
        record_of_many_failures,
        records_of_all_shards,
    ],
)
def test_records_of_jobs_take_status_no_more_memory_than_they_are_worth(
    world: World, write: Callable[[Desk], None]
) -> None:
    (world.data_dir / "shard-00000.json").unlink()
    write(Desk(data=world.data_dir, place=world.data_dir))
    work = partial(_code_of, world, ["status", world.data_dir, "--json"])
    found = ForkedRun(work, memory_bytes=100 << 20).end()
    assert (found.how, found.code) == ("ended", 0)


def test_of_very_many_records_the_newest_and_those_of_own_jobs_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of others use up nothing of this user's. The folder is not opened for each."""
    world = World(tmp_path).raw({"a.txt": "\n".join(map(str, range(99)))}).plan(num_shards=31)
    desk = Desk(data=world.data_dir, place=world.data_dir)
    of_others = range(3, 31, 3) if os.geteuid() == 0 else ()
    for number in range(1, 31):
        path = desk.record(f"{number}_{number}", ended(exit_code=74))
        if number in of_others:
            os.chown(path, 12345, -1)

    def read() -> set[int]:
        state = json.loads(world.main("status", world.data_dir, json=True).ends(0).out)
        failed: set[int] = set()
        for words in state["failed"].split(","):
            first, _, last = words.partition("-")
            failed |= {*range(int(first), int(last or first) + 1)}
        return failed

    with mock.patch.object(os, "open", side_effect=os.open) as opened:
        assert read() == {*range(1, 31)}
    assert sum(call.args[0] == "attempts" for call in opened.call_args_list) < 10
    monkeypatch.setattr("shardprep.format.attempts.MAX_FILES", 5)
    own = [number for number in range(1, 31) if number not in of_others]
    with mock.patch.object(os, "stat", side_effect=os.stat) as looked_at:
        assert read() == {*own[-5:], *list(of_others)[-5:]}
    if of_others:  # both have their five by then
        seen = {str(call.args[0]) for call in looked_at.call_args_list}
        assert not {f"{number}_{number}.r0" for number in range(1, 15)} & seen
    desk.submitted(array("99", tasks=["0"]), verify="4")
    assert {4, *own[-5:]} <= read()


VALUES: tuple[Any, ...] = (
    3, None, "x", [], {}, [1], {"a": 1}, {"a": {}}, 2**70, -1, 1.5, True, float("nan"), "\ud800", [[]],
    {"a": {"shards": 3, "nodes": {}}}, {"a": {"shards": "0-", "nodes": {}}},
    {"a": {"shards": "0", "nodes": 4}}, {"a": {"shards": "0", "nodes": {"n": "x"}}},
    {"a": {"shards": "0-9999999", "nodes": {}}},
)  # fmt: skip
TEXTS = ("", "x", "-7", str(2**70), "9" * 5000, "1e300", "inf", "nan", "0-9999999", "\0", "\ud800", "1_0")


def test_a_history_with_wrong_types_breaks_no_command(world: World) -> None:
    path = world.data_dir / "jobs" / "history.jsonl"
    path.parent.mkdir()
    good = {"time": 1.0, "event": "retry", "user": "u", "round": 1, "jobs": ["1"], "why": "w", "report": "r"}
    good |= {"causes": {"x": {"shards": "0", "nodes": {"n": 1}}}, "number": 1, "failed_core_s": 1.0}
    texts = [json.dumps({**good, name: value}) for name in good for value in VALUES]
    path.write_text("\n".join([json.dumps(good), *texts, "[" * 10**5, "null", '"x"', "{", "\0"]))
    assert set(exit_codes(world, "status", "report").values()) == {0}


def each_value_replaced(record: str) -> Iterable[str]:
    """Yield copies of a record, each with one value of ``name=value`` or ``"name": value`` replaced."""
    for place in re.finditer(r"=(.*)$|: (\S+?)[,}]", record, re.MULTILINE):
        start, end = place.span(1 if place[1] is not None else 2)
        for value in TEXTS if place[1] is not None else map(json.dumps, VALUES):
            yield record[:start] + value + record[end:]


def test_records_of_attempts_with_wrong_values_break_no_command(world: World) -> None:
    """There is a record for each value of each name, and a valid one."""
    (world.data_dir / "shard-00000.json").unlink()
    facts = {"stopped_by": "x", "stopped": 1001, "limit": "5:00", "killed_by": 9, "signal": "s"}
    desk = Desk(data=world.data_dir, place=world.data_dir)
    path = desk.record("7_0", failure(0, 65, "r"), ended(65, **facts), pid=1, pid_began=3)
    valid = path.read_text()
    attempts = [valid[:-40], "[" * 10**5, "begin\n" + "[" * 10**5, *each_value_replaced(valid)]
    for number, text in enumerate(attempts):
        path.with_name(f"7_{number + 1}.r0").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert set(exit_codes(world, "status", "report").values()) == {0}
    found = json.loads(world.main("status", world.data_dir, "--json").out)
    assert sum(found["restarts"].values()) > 100, "valid records are counted"
