"""A plan puts every byte into exactly one shard, is frozen, and refuses to become another."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.make.engines import tokenizers_engine
from preprocess.plan import divide as shard_boundaries
from preprocess.plan.cost_estimate import CostEstimate, measure
from preprocess.plan.divide import divide, even_places, stamp_inputs
from preprocess.plan.listing import list_inputs
from preprocess.read import inputs as input_files
from preprocess.read import lines as line_ends
from preprocess.read.format import Inspected
from preprocess.read.inputs import OpenInput
from preprocess.read.lines import LineEnds, first_line_start
from shardprep.errors import Refused, UsageError
from shardprep.format.index import read_index
from shardprep.format.manifest import read_manifest
from shardprep.format.options import PlanOptions
from shardprep.format.plan import Cut, InputFile, Plan, file_cuts, need_plan, plan_json
from tests.waiting import HANG_S

if TYPE_CHECKING:
    from tests.conftest import Prep

LINES = [b"a\n", b"bc\r\n", b"\n", b"\r", b"d\r", "가나다라마\n".encode(), b"x" * 30 + b"\n", b"tail"]
FILES = st.lists(st.lists(st.sampled_from(LINES), max_size=12).map(b"".join), min_size=1, max_size=6)


OPTIONS = PlanOptions()


def estimate_of(plan: Plan, folder: Path) -> CostEstimate:
    """The estimate of a data set that is planned in ``folder``, with its own tokenizer."""
    path = folder / "tokenizer" / "tokenizer.json"
    return measure(plan, tokenizers_engine(path, allow_special_tokens=plan.options.encodes_control_tokens))


def write_files(folder: Path, contents: list[bytes]) -> list[InputFile]:
    """The contents as 00.txt, 01.txt, ..., and nothing else in the folder."""
    for path in folder.glob("*.txt"):
        path.unlink()
    for number, data in enumerate(contents):
        (folder / f"{number:02d}.txt").write_bytes(data)
    return stamp_inputs(folder, list_inputs(folder, recursive=False), OPTIONS)[0]


def even_cuts(folder: Path, inputs: list[InputFile], num_shards: int) -> list[Cut]:
    inspected = [Inspected(text_bytes=item.num_bytes, is_whole=False) for item in inputs]
    return divide(folder, inputs, inspected, num_shards, OPTIONS).cuts


def line_starts(data: bytes) -> set[int]:
    return {0, *(match.end() for match in re.finditer(rb"\r\n|\n|\r", data))} - {len(data)} | {0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@pytest.mark.slow
@settings(max_examples=200)
@given(contents=FILES, num_shards=st.integers(1, 30), first=st.integers(1, 5))
def test_a_shard_begins_with_the_first_line_at_or_behind_its_even_share(
    folder: Path, contents: list[bytes], num_shards: int, first: int
) -> None:
    """Whatever is read at once, and however many shares lie in one line."""
    inputs = write_files(folder, contents)
    ends = list(itertools.accumulate(map(len, contents)))
    total = ends[-1]
    starts = {total}
    for end, data in zip(ends, contents, strict=True):
        starts |= {end - len(data) + byte for byte in line_starts(data)} if data else set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_ends, "_FIRST_SCAN_BYTES", first + 1)
        patch.setattr(shard_boundaries, "_MOST_AT_ONCE", first)
        cuts = even_cuts(folder, inputs, num_shards)
    places = [(ends[cut.input_number - 1] if cut.input_number else 0) + cut.byte for cut in cuts]
    shares = [total * number // num_shards for number in range(num_shards + 1)]
    assert places == [min(start for start in starts if start >= share) for share in shares]


@pytest.mark.slow
@settings(max_examples=100)
@given(contents=FILES, num_shards=st.integers(1, 12))
def test_every_byte_is_in_exactly_one_shard(
    folder: Path, planned_dir: Path, contents: list[bytes], num_shards: int
) -> None:
    inputs = write_files(folder, contents)
    cuts = even_cuts(folder, inputs, num_shards)
    frozen = need_plan(planned_dir)
    plan = dataclasses.replace(frozen, input_dir=folder, inputs=inputs, cuts=cuts)
    found = [b""] * len(contents)
    for shard_id in range(num_shards):
        ranges = plan.ranges(shard_id)
        for part in ranges:
            assert part.start == len(found[part.input_number]), (
                "the next byte, neither one again nor a later one"
            )
            found[part.input_number] += part.path.read_bytes()[part.start : part.end]
        assert plan.shard_bytes()[shard_id] == sum(part.end - part.start for part in ranges)
    assert found == contents


@pytest.mark.parametrize("shift", [-2, -1, 0, 1])
@pytest.mark.parametrize("num_kib", [16, 16 + 64, 16 + 2 * 64])
def test_a_line_end_on_the_edge_of_a_read_is_not_cut_in_two(tmp_path: Path, num_kib: int, shift: int) -> None:
    """first_line_start reads 16 KiB, then 64 KiB each time."""
    num_bytes = (num_kib << 10) + shift
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * num_bytes + b"\r\nb\n")
    assert first_line_start(OpenInput(path), 1, sys.maxsize, LineEnds(with_cr=True)) == num_bytes + 2
    path.write_bytes(b"x" * num_bytes + b"\rb\n")
    assert first_line_start(OpenInput(path), 1, sys.maxsize, LineEnds(with_cr=True)) == num_bytes + 1
    path.write_bytes(b"x" * num_bytes + b"\r")
    assert first_line_start(OpenInput(path), 1, sys.maxsize, LineEnds(with_cr=True)) == num_bytes + 1
    assert first_line_start(OpenInput(path), 1, sys.maxsize, LineEnds(with_cr=False)) == num_bytes + 1, (
        "its end"
    )


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_cutting_long_lines_reads_little_more_than_the_way_to_the_next_line_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    line_bytes, num_shards = 250_000, 17
    path = tmp_path / name
    path.write_bytes((b"x" * (line_bytes - 1) + b"\n") * 32)
    size = path.stat().st_size
    reads: list[int] = []
    hints: list[int] = []
    read = OpenInput.read
    monkeypatch.setattr(
        OpenInput, "read", lambda file, start, end: reads.append(end - start) or read(file, start, end)
    )
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: hints.append(words[3]))
    inputs = [InputFile(path=name, num_bytes=size, mtime_ns=0, sha256="")]
    inspected = [Inspected(text_bytes=size, is_whole=False)]
    places = even_places(tmp_path, inputs, inspected, num_shards, OPTIONS)
    targets = [size * number // num_shards for number in range(1, num_shards)]
    ways = [start.byte - target for target, (_, start) in zip(targets, places[1:-1], strict=True)]
    assert all(0 <= way < line_bytes for way in ways)
    assert sum(reads) <= sum(ways) + (num_shards - 1) * (64 << 10)
    assert len(reads) <= sum(2 + way // (64 << 10) for way in ways)
    assert hints == [os.POSIX_FADV_RANDOM], "and the system reads nothing ahead"


@pytest.mark.parametrize("options", [{"doc": "file"}], ids=str)
def test_whole_file_documents_are_never_cut(tmp_path: Path, prep: Prep, options: dict[str, Any]) -> None:
    (tmp_path / "raw").mkdir()
    text = "가나 다라\n" * 200
    for number in range(7):
        data = text.encode(options.get("encoding", "utf-8"))
        (tmp_path / "raw" / f"{number}.txt").write_bytes(data)
    plan = prep.plan(tmp_path / "raw", tmp_path / "data", num_shards=3, **options)
    assert list(plan.cuts) == [Cut(0, 0), Cut(2, 0), Cut(5, 0), Cut(7, 0)]
    prep.plan(tmp_path / "raw", tmp_path / "cut", num_shards=3, encoding="cp949")
    assert any(cut.byte for cut in need_plan(tmp_path / "cut").cuts), "and others are"


def test_without_a_number_of_shards_one_file_is_one_shard(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    plan = prep.plan(sample_dir, tmp_path / "data")
    assert [part.path.name for shard in range(6) for part in plan.ranges(shard)] == prep.names(sample_dir)
    assert plan.cuts == file_cuts(plan.inputs)


def test_a_size_of_shards_decides_their_number(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    total = sum(path.stat().st_size for path in sample_dir.iterdir())
    plan = prep.plan(sample_dir, tmp_path / "data", shard_bytes=total // 4 + 1)
    assert plan.num_shards == 4
    for name in ("shard_bytes", "num_shards"):
        with pytest.raises(UsageError, match=f"--{name} is 0, expected at least 1"):
            prep.plan(sample_dir, tmp_path / "other", **{name: 0})


def test_the_size_that_a_refusal_names_is_taken(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    words = ["plan", "--input_dir", sample_dir, "--output_dir", tmp_path / "data"]
    words += ["--model_id", prep.model_dir, "--shard_bytes"]
    refused = prep.command(*words, "1")
    assert refused.code == 2
    assert "99999" in refused.text
    assert not (tmp_path / "data").exists()
    size = re.search(r"--shard_bytes (\w+)", refused.text)
    assert size
    assert prep.command(*words, size[1]).code == 0


def test_an_equal_second_plan_changes_no_byte(prep: Prep, sample_dir: Path, data_dir: Path) -> None:
    before = (data_dir / "plan.json").read_bytes()
    plan = prep.plan(sample_dir, data_dir, num_shards=5)
    assert plan_json(plan) == before
    assert (data_dir / "plan.json").read_bytes() == before
    assert prep.names(data_dir) == ["plan.json", "tokenizer"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--num_shards", "6"], "5 shards, now 6"),
        (["--num_shards", "5", "--encoding", "cp949"], "--encoding was utf-8, now cp949"),
        (["--num_shards", "5", "--no-keep_text"], "--keep_text was True, now False"),
        (["--num_shards", "5", "--record", "packed"], "--record was documents, now packed"),
        (["--num_shards", "5", "--allow-special-tokens"], "--allow_special_tokens was False, now True"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_another_plan_is_refused_naming_what_differs_and_what_to_do(
    prep: Prep, sample_dir: Path, data_dir: Path, change: list[str], named: str
) -> None:
    before = (data_dir / "plan.json").read_bytes()
    words = [
        "plan",
        "--input_dir",
        sample_dir,
        "--output_dir",
        data_dir,
        "--model_id",
        prep.model_dir,
        *change,
    ]
    ended, dry = prep.command(*words), prep.command(*words, "--dry_run")
    assert (ended.code, dry.code) == (78, 78)
    assert named in ended.text
    assert named in dry.text
    assert "and give the loader a list of folders" in ended.text
    assert (data_dir / "plan.json").read_bytes() == before


@pytest.mark.slow
def test_other_inputs_are_refused_by_name(
    prep: Prep, sample_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    raw = Path(shutil.copytree(sample_dir, tmp_path / "raw"))
    for change, named in (
        (lambda: (raw / "zz.txt").write_text("more\n"), r"1 input\(s\) added, such as zz\.txt"),
        (
            lambda: [(raw / name).unlink() for name in ("zz.txt", "en_1.txt")],
            r"1 input\(s\) gone, such as en_1",
        ),
        (lambda: shutil.copyfile(raw / "en_0.txt", raw / "en_1.txt"), r"1 input\(s\) changed, such as en_1"),
    ):
        change()
        with pytest.raises(Refused, match=named):
            prep.plan(raw, data_dir, num_shards=5)


def test_a_dry_run_prints_the_costs_and_writes_nothing(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    ended = prep.command(
        "plan", "--input_dir", sample_dir, "--output_dir", tmp_path / "data", "--model_id", prep.model_dir,
        "--num_shards", "3", "--dry_run",
    )  # fmt: skip
    assert ended.code == 0
    for said in ("3 shards of", "core hours", " on disk"):
        assert said in ended.text
    assert not (tmp_path / "data").exists()


def records(folder: Path, record: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "a.jsonl").write_text(f"{json.dumps(record)}\n" * 50, encoding="utf-8")
    return folder


MESSAGES = [{"role": "user", "content": "Sing?"}, {"role": "assistant", "content": "The kettle sings."}]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"id": 1, "body": "The kettle sings.", "meta": {"title": "Kettle"}},
            "a string; their fields are: id, body, meta, meta.title; plan with --text_field body",
        ),
        ({"messages": MESSAGES}, "their fields are: messages; plan with --record chat"),
        ({"talk": MESSAGES}, "plan with --record chat --text_field talk"),
    ],
    ids=["body", "messages", "talk"],
)
def test_a_plan_whose_field_no_record_has_is_refused_with_the_fields_that_they_have(
    prep: Prep, tmp_path: Path, record: dict[str, Any], said: str
) -> None:
    words = ["plan", "--input_dir", records(tmp_path / "raw", record), "--output_dir", tmp_path / "data"]
    words += ["--model_id", prep.model_dir]
    ended = prep.command(*words)
    assert ended.code == 65, ended.text
    assert said in ended.text
    assert not (tmp_path / "data" / "plan.json").exists()
    hint = ended.text.rpartition("plan with ")[2].split()
    if "chat" not in hint:  # this tokenizer has no chat template
        assert prep.command(*words, *hint).code == 0


def test_a_trials_estimate_is_that_of_its_documents(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    plan = prep.plan(sample_dir, tmp_path / "data", num_shards=2, limit=9)
    prep.make(tmp_path / "data")
    assert prep.command("verify", tmp_path / "data").code == 0
    found = int(read_index(tmp_path / "data").column("num_tokens").sum())
    folder = tmp_path / "data"
    assert found / 3 < estimate_of(plan, folder).num_tokens < found * 3


def test_the_estimate_of_tokens_and_disk_is_near_what_comes(
    prep: Prep, sample_dir: Path, data_dir: Path
) -> None:
    ended = prep.command(
        "plan", "--input_dir", sample_dir, "--output_dir", data_dir, "--model_id", prep.model_dir,
        "--num_shards", "5",
    )  # fmt: skip
    estimate = re.search(r"about (\S+) tokens, (\S+) ([kMG]?B) on disk", ended.text)
    assert estimate, ended.text
    prep.make(data_dir)
    manifests = [json.loads(path.read_bytes()) for path in data_dir.glob("shard-*.json")]
    tokens = sum(item["counts"]["num_tokens"] for item in manifests)
    num_bytes = sum(item["tar"]["num_bytes"] + item["idx"]["num_bytes"] for item in manifests)
    assert float(estimate[1]) == pytest.approx(tokens, rel=0.1)
    unit = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[estimate[3]]
    assert float(estimate[2]) * unit == pytest.approx(num_bytes, rel=0.1)


def test_the_estimate_is_near_where_the_heads_of_equal_files_differ_from_the_rest(
    prep: Prep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of each file is of long words that are one token, the rest of letters that are one each."""
    monkeypatch.setattr("preprocess.plan.cost_estimate._SAMPLE_BYTES", 64 << 10)
    raw, data = tmp_path / "raw", tmp_path / "data"
    raw.mkdir()
    for number in range(8):
        (raw / f"{number}.txt").write_text("the the the the\n" * 800 + "Q7Z9X3Q7Z9X3Q7Z\n" * 7_200)
    plan = prep.plan(raw, data)
    prep.make(data, 0)
    num_tokens = 8 * read_manifest(data, 0).counts.num_tokens
    assert estimate_of(plan, data).num_tokens == pytest.approx(num_tokens, rel=0.25)


def test_the_estimate_of_disk_has_the_digests(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    rows: dict[str, Any] = {"record": "packed", "seq_len": 64}
    plans = {
        digests: prep.plan(sample_dir, tmp_path / str(digests), digests=digests, **rows)
        for digests in (False, True)
    }
    without, with_digests = (estimate_of(plan, tmp_path / str(given)) for given, plan in plans.items())
    num_documents = sum(1 for path in sample_dir.glob("*.txt") for line in path.open() if line.strip())
    assert with_digests.output_bytes - without.output_bytes == pytest.approx(16 * num_documents, rel=0.1)


def test_only_the_files_of_the_tokenizer_are_kept(prep: Prep, planned_dir: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(prep.model_dir, tmp_path / "model"))
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.txt").write_text("a\n")
    prep.plan(tmp_path / "raw", tmp_path / "data", model_id=str(model))
    for folder in (planned_dir, tmp_path / "data"):
        names = set(prep.names(folder / "tokenizer"))
        assert {"tokenizer.json", "tokenizer_config.json"} <= names
        assert names <= {
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
        }


@pytest.mark.processes
def test_tasks_need_neither_hub_nor_the_folder_of_the_model(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(prep.model_dir, tmp_path / "model"))
    prep.plan(sample_dir, tmp_path / "data", num_shards=5, model_id=str(model))
    shutil.rmtree(model)
    ended = prep.cli("--shard_id", 2, "--output_dir", tmp_path / "data", env={"HF_HUB_OFFLINE": "1"})
    assert ended.code == 0, ended.text
    assert (tmp_path / "data" / "shard-00002.json").exists()


@pytest.mark.slow
def test_a_touch_a_copy_and_a_moved_folder_change_nothing(
    prep: Prep, sample_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    prep.make(data_dir, 0)
    moved = tmp_path / "elsewhere" / "raw"
    moved.mkdir(parents=True)
    for path in sample_dir.iterdir():
        shutil.copyfile(path, moved / path.name)
        os.utime(moved / path.name, (1, 1))
    plan = need_plan(data_dir)
    again = prep.plan(moved, tmp_path / "again", num_shards=5)
    assert again.plan_id == plan.plan_id
    assert prep.plan(moved, data_dir, num_shards=5).plan_id == plan.plan_id
    prep.make(tmp_path / "again", 0)
    assert prep.contents(tmp_path / "again") == prep.contents(data_dir)
    ended = prep.command("--shard_id", 3, "--output_dir", data_dir, "--input_dir", moved)
    assert ended.code == 0, ended.text
    assert json.loads((data_dir / "shard-00003.json").read_bytes())["spec"]["plan_id"] == plan.plan_id


def test_a_change_in_each_of_the_three_sampled_parts_changes_the_stamp(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    size = 1 << 20
    path.write_bytes(bytes(size))
    [clean], _ = stamp_inputs(tmp_path, [path], OPTIONS)
    for place in (0, 65535, size // 2, size - 65536, size - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        [changed], _ = stamp_inputs(tmp_path, [path], OPTIONS)
        assert changed.sha256 != clean.sha256, place
        path.write_bytes(bytes(size))
    assert stamp_inputs(tmp_path, [path], OPTIONS)[0][0].sha256 == clean.sha256
    assert size > 3 * input_files._SAMPLE_BYTES, "else the whole file is the sample"


@pytest.mark.processes
def test_planners_that_race_end_with_one_plan(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    flags = ["--input_dir", sample_dir, "--output_dir", tmp_path / "data", "--model_id", prep.model_dir]
    racers = [prep.start("plan", "--num_shards", 4, *flags) for _ in range(2)]
    other = prep.start("plan", "--num_shards", 3, *flags)
    texts = [racer.communicate(timeout=HANG_S)[0] for racer in (*racers, other)]
    codes = [racer.returncode for racer in (*racers, other)]
    plan = need_plan(tmp_path / "data")
    assert codes == ([0, 0, 78] if plan.num_shards == 4 else [78, 78, 0]), texts
    ids = {match for text in texts for match in re.findall(r"^plan (\w{12}):", text, re.MULTILINE)}
    assert ids == {plan.plan_id[:12]}
    assert prep.names(tmp_path / "data") == ["plan.json", "tokenizer"]


def test_a_file_name_that_is_not_utf_8_is_refused(prep: Prep, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "raw") + b"/\xff.txt")).write_text("a\n")
    with pytest.raises(UsageError, match="not UTF-8; rename"):
        prep.plan(tmp_path / "raw", tmp_path / "data")


def test_a_tokenizer_without_an_eos_cannot_end_documents_with_one(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(prep.model_dir, tmp_path / "model"))
    config = json.loads((model / "tokenizer_config.json").read_bytes())
    del config["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError) as caught:
        prep.plan(sample_dir, tmp_path / "data", model_id=str(model), record="packed")
    assert caught.value.remedy == "--no-append_eos"
    plan = prep.plan(sample_dir, tmp_path / "data", model_id=str(model), record="packed", append_eos=False)
    assert not plan.spec.append_eos
