"""``shardprep report``: what it says of a data set as a page and as JSON, and what it never says."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import itertools
import json
import math
import os
import random
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from preprocess.attempts import folder_identity
from shardprep.__main__ import main
from shardprep.format.index import merge_manifests
from shardprep.format.manifest import ShardCounts, read_manifest
from shardprep.format.names import idx_path, manifest_path, quarantine_path, tar_path
from shardprep.format.plan import need_plan
from slurm.request import JobRequest
from slurm.submissions import append_event, publish_submission
from tests.checkout import ROOT
from tests.conftest import seal
from tests.slurm.fake_slurm import FakeSlurm, ended, submission, submitted, write_record

if TYPE_CHECKING:
    from tests.conftest import Prep

NAMES = ("뉴스 <b>굵게", "code", "웹문서")
UNFINISHED = "Not finished: {done} of {total} shards are done, and all numbers are theirs. Missing: {missing}"
BAD = "<script>alert('깨짐')</script> https://user:hunter2@host/?api_token=abc \x1b[31m"


@pytest.fixture(scope="module")
def folder(prep: Prep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four packed shards of three sources, with documents left out, one of them with markup. Read only."""
    raw = tmp_path_factory.mktemp("raw")
    for number, name in enumerate(NAMES):
        (raw / name).mkdir()
        lines = [f"문서 {line} of {name} " * (1 + line % 7) for line in range(150 * (number + 1))]
        (raw / name / "글 1.txt").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    with (raw / NAMES[0] / "글 1.txt").open("ab") as file:
        file.write(BAD.encode() + b"\xff\n" + b"caf\xe9 again\n")
    out = tmp_path_factory.mktemp("data") / "자료 <i>"
    out.mkdir()
    prep.plan(
        raw,
        out,
        num_shards=4,
        recursive=True,
        record="packed",
        seq_len=64,
        pack="best_fit",
        max_bad_fraction=0.5,
    )
    prep.make(out)
    return out


@pytest.fixture
def own_folder(folder: Path, tmp_path: Path) -> Path:
    """A copy that may be changed; its files are links, so put new ones in their place."""
    for path in folder.rglob("*"):
        target = tmp_path / "own" / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            target.symlink_to(path)
    return tmp_path / "own"


def said(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> str:
    """What ``report`` prints."""
    capsys.readouterr()
    assert main(["report", *map(str, args)]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def data_of(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    found = json.loads(said(capsys, *args, "--json"))
    assert isinstance(found, dict)
    return found


def page_of(capsys: pytest.CaptureFixture[str], tmp_path: Path, *args: object) -> str:
    said(capsys, *args, "--output", tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def text_of(capsys: pytest.CaptureFixture[str], tmp_path: Path, *args: object) -> str:
    """The text of the page."""
    return Page(page_of(capsys, tmp_path, *args)).text


def noted_opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are opened from now on."""
    opened: list[str] = []
    really = os.open

    def noted(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(Path(path).name if isinstance(path, str | Path) else "")
        return really(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", noted)
    return opened


class Page(HTMLParser):
    """What a browser makes of a page: its elements, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: dict[str, set[str]] = {}
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_numbers_are_the_sums_of_the_manifests(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = data_of(capsys, folder)
    manifests = [read_manifest(folder, shard_id) for shard_id in range(4)]
    own = found["data"]
    for name in ("num_samples", "num_documents", "num_tokens", "num_pad_tokens", "input_bytes"):
        assert own[name] == sum(getattr(each.counts, name) for each in manifests) > 0, name
    assert own["num_left_out"] == sum(each["num_documents"] for each in found["left_out"]) == 2
    assert sum(each["num_documents"] for each in found["lengths"]) == own["num_documents"]
    assert {each["name"] for each in found["sources"]} == set(NAMES)
    assert sum(each["num_tokens"] for each in found["sources"]) == own["num_tokens"]
    assert own["tar_bytes"] == sum(each.tar.num_bytes for each in manifests)


def test_left_out_documents_have_bytes_place_and_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (reason,) = data_of(capsys, folder)["left_out"]
    first, second = reason["examples"]
    plan = need_plan(folder)
    raw = (plan.input_dir / first["input"]).read_bytes()
    assert reason["reason"] == "undecodable"
    assert not reason["num_bytes_is_estimate"]
    assert reason["num_bytes"] == first["num_bytes"] + second["num_bytes"]
    assert raw[second["offset"] :].startswith(b"caf\xe9")
    assert second["text"] == "caf\N{REPLACEMENT CHARACTER} again"
    none = data_of(capsys, folder, "--num_examples", 0)
    assert none["left_out"][0]["examples"] == none["sources"][0]["examples"] == []


def test_a_row_of_a_table_that_is_left_out_has_no_bytes(
    prep: Prep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    raw, out = tmp_path / "raw", tmp_path / "data"
    raw.mkdir()
    table = pyarrow.table({"text": ["a text"] * 9 + [None]})
    pytest.importorskip("pyarrow.parquet").write_table(table, raw / "a.parquet")
    prep.plan(raw, out, max_bad_fraction=0.5)
    prep.make(out)
    (found,) = data_of(capsys, out)["left_out"]
    assert (found["num_bytes"], found["examples"][0]["num_bytes"]) == (None, None)
    text = text_of(capsys, tmp_path, out)
    assert "a.parquet:9 (row 9)" in text
    assert (
        "a.parquet:9 was left out of shard 00000 as null_field: "
        in prep.command("peek", out, "a.parquet:9").text
    )
    assert "1 B" not in text


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_what_was_left_out_is_shown_where_it_can_be_read_at_its_place(
    prep: Prep, tmp_path: Path, raw: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    out, path = tmp_path / "data", raw / f"a{suffix}"
    rows = [{"text": f"text {number}" if number != 40 else None, "id": number} for number in range(80)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if suffix == ".jsonl.gz" else lines)
    prep.plan(raw, out, max_bad_fraction=0.5)
    prep.make(out)
    (example,) = data_of(capsys, out)["left_out"][0]["examples"]
    assert example["text"] == ("" if suffix == ".jsonl.gz" else '{"text": null, "id": 40}')
    address = example["address"]
    assert f"{address} (byte {example['offset']}" in text_of(capsys, tmp_path, out)
    peeked = prep.command("peek", out, address, f"a{suffix}:0")
    assert (
        f"{address} was left out of shard 00000 as null_field, {example['num_bytes']} bytes: " in peeked.text
    )
    assert ("text 0" in peeked.text, example["text"] in peeked.text) == (True, True)
    path.unlink()
    os.mkfifo(path)
    (example,) = data_of(capsys, out)["left_out"][0]["examples"]
    assert example["text"] == "", "a FIFO is not opened, which would wait for ever"


def test_bytes_left_out_are_estimated_where_not_all_files_are_read(
    own_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = [n for n in range(4) if read_manifest(own_folder, n).counts.quarantined]
    whole = data_of(capsys, own_folder)["left_out"][0]
    path = quarantine_path(own_folder, shards[0])
    lines = path.read_bytes().splitlines(keepends=True)
    path.unlink()
    path.write_bytes(lines[0] + b"{broken\n")
    (found,) = data_of(capsys, own_folder)["left_out"]
    assert found["num_documents"] == whole["num_documents"], "which the manifests say"
    assert found["num_bytes_is_estimate"]
    assert found["num_bytes"] == 2 * found["examples"][0]["num_bytes"]
    path.unlink()
    (found,) = data_of(capsys, own_folder)["left_out"]
    assert found["num_bytes"] is None
    assert "not known" in text_of(capsys, tmp_path, own_folder)


def test_markup_in_names_and_documents_stays_text(
    own_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = '"><img src=x onerror="alert(1)'
    change(
        manifest_path(own_folder, 1), lambda it: it["run"].update(host=node, engine="<b>fast|tokens{x}</b>")
    )
    change(manifest_path(own_folder, 2), lambda it: it["counts"]["quarantined"].update({"<i>|{y}": 2}))
    page = page_of(capsys, tmp_path, own_folder)
    seen = Page(page)
    assert not seen.elements.keys() & {"script", "b", "i", "img", "iframe", "link", "object"}
    for text in ("<script>alert('깨짐')</script>", NAMES[0], node, "<b>fast|tokens{x}</b>", "<i>|{y}"):
        assert text in seen.text, "it is shown as it is"
    drawing = {"viewbox", "preserveaspectratio", "role", "aria-label", "d", "x", "y", "width", "height"}
    assert seen.attributes.keys() - drawing == {
        "lang",
        "charset",
        "tabindex",
        "http-equiv",
        "content",
        "name",
        "class",
        "style",
    }
    assert "default-src 'none'" in page


def test_the_page_loads_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = page_of(capsys, tmp_path, folder)
    assert not Page(page).attributes.keys() & {"src", "href", "srcset", "xlink:href", "action"}
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert "prefers-color-scheme: dark" in style
    assert not re.search(r"url\(|@import", style)


def test_neither_secrets_nor_control_characters_come_through(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forms = [said(capsys, folder, "--json"), page_of(capsys, tmp_path, folder)]
    for form in forms:
        assert "***@host" in form, "the document is shown"
        assert "hunter2" not in form
        assert "api_token=abc" not in form
        assert "\x1b" not in form


def test_an_unfinished_data_set_says_so_and_counts_what_is_done(
    own_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest_path(own_folder, 2).unlink()
    found = data_of(capsys, own_folder)["data"]
    assert (found["num_done"], found["missing"]) == (3, "2")
    assert found["num_tokens"] == sum(read_manifest(own_folder, n).counts.num_tokens for n in (0, 1, 3))
    words = UNFINISHED.format(done=3, total=4, missing="2")
    assert words in Page(page_of(capsys, tmp_path, own_folder)).text


def index_of(folder: Path) -> bytes:
    return merge_manifests(folder, (read_manifest(folder, shard_id) for shard_id in range(4))).to_json()


def test_where_only_manifests_are_missing_the_index_tells_the_sums(
    own_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = data_of(capsys, own_folder)
    (own_folder / "index.json").write_bytes(index_of(own_folder))
    for shard_id in range(4):
        manifest_path(own_folder, shard_id).unlink()
    found = data_of(capsys, own_folder)
    assert found["data"]["without_manifest"] == "0-3"
    assert found["data"]["index"]["num_tokens"] == whole["data"]["num_tokens"] > 0
    counted = {"num_documents", "num_tokens", "num_bytes", "num_quarantined", "token_share", "name"}
    for one, before in zip(found["sources"], whole["sources"], strict=True):
        assert {name: one[name] for name in counted} == {name: before[name] for name in counted}
        assert {one[name] for name in before.keys() - counted - {"examples"}} == {None}, (
            "which only manifests have"
        )
    page = Page(page_of(capsys, tmp_path, own_folder)).text
    assert "Only the manifests (shard-*.json) of these shards are missing: 0-3" in page
    assert "No document was left out as bad." not in page, "which is not known"
    assert UNFINISHED.format(done=0, total=4, missing="0-3") not in page
    (own_folder / "shard-00002.tar").unlink()
    text = text_of(capsys, tmp_path, own_folder)
    assert UNFINISHED.format(done=0, total=4, missing="0-3") in text, "a shard is missing, too"
    assert "(shard-*.json)" in text
    assert "0-1, 3" in text


def test_an_index_that_is_broken_or_of_another_plan_is_believed_in_nothing(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = index_of(own_folder)
    (own_folder / "index.json").write_bytes(index)
    assert data_of(capsys, own_folder)["data"]["verified"]
    (own_folder / "index.json").write_bytes(index[:-9])
    assert not data_of(capsys, own_folder)["data"]["verified"]
    (own_folder / "index.json").write_bytes(index.replace(need_plan(own_folder).plan_id.encode(), b"0" * 64))
    seal(own_folder / "index.json")
    assert not data_of(capsys, own_folder)["data"]["verified"]


def test_a_data_set_without_a_shard_has_a_report_in_every_form(
    planned_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data_of(capsys, planned_dir)["data"]["missing"] == "0-4"
    assert "0 / 5" in text_of(capsys, tmp_path, planned_dir)


def test_broken_manifests_and_those_of_another_plan_are_named_and_not_counted(
    own_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest_path(own_folder, 0).unlink()
    manifest_path(own_folder, 0).write_text('{"run": 1}')
    text = manifest_path(own_folder, 1).read_text(encoding="utf-8")
    manifest_path(own_folder, 1).unlink()
    plan_id = need_plan(own_folder).plan_id
    manifest_path(own_folder, 1).write_text(text.replace(plan_id, "0" * 64), encoding="utf-8")
    seal(manifest_path(own_folder, 1))
    text = manifest_path(own_folder, 3).read_text(encoding="utf-8")
    manifest_path(own_folder, 3).unlink()
    text = re.sub(r'"began": [\d.]+', '"began": 1e17', text)
    manifest_path(own_folder, 3).write_text(text, encoding="utf-8")
    found = data_of(capsys, own_folder)["data"]
    assert (found["done"], found["not_read"], found["other_plan"]) == ("2", "0,3", "1")
    assert "cannot be read, and which no number counts: 0, 3." in text_of(capsys, tmp_path, own_folder)


def test_each_manifest_is_read_once_and_no_shard(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = noted_opens(monkeypatch)
    page_of(capsys, tmp_path, folder, "--num_examples", 0)
    assert [opened.count(f"shard-0000{n}.json") for n in range(4)] == [1, 1, 1, 1]
    assert not [name for name in opened if name.endswith((".tar", ".idx"))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_shards": 2, "keep_text": False, "append_eos": True, "encoding": "cp949"},
        {"num_shards": 3, "record": "packed", "seq_len": 8192, "append_eos": False, "hash_inputs": True},
        {"num_shards": 2, "text_template": "{text} {title}", "min_chars": 3, "normalize": "NFC"},
    ],
)
def test_the_command_that_is_told_makes_the_same_plan_again(
    prep: Prep, sample_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    first = prep.plan(sample_dir, tmp_path / "first one", **options)
    words = shlex.split(data_of(capsys, tmp_path / "first one")["again"]["commands"][0])
    assert words[:2] == ["shardprep", "plan"]
    ended = prep.command(*words[1:], "--output_dir", tmp_path / "second")
    assert ended.code == 0, ended.text
    assert need_plan(tmp_path / "second").plan_id == first.plan_id


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Put an edited JSON file in the place of ``path``."""
    data = json.loads(path.read_text(encoding="utf-8"))
    edit(data)
    path.unlink()
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    seal(path)


@pytest.fixture(scope="module")
def large(prep: Prep, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Makes a data set of so many shards: 300 sources, 100 nodes, a retry nine hours later; no real tars."""

    def make(num_shards: int) -> Path:
        raw, out = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("large")
        (raw / "a.txt").write_text("\n".join(f"line {n}" for n in range(4 * num_shards)))
        prep.plan(raw, out, num_shards=num_shards)
        prep.make(out, 0)
        manifest = json.loads(manifest_path(out, 0).read_text(encoding="utf-8"))
        counts = {"num_documents": 7, "num_tokens": 480_000_000}
        source = {**counts, "num_bytes": 2 * 10**9, "num_quarantined": 0}
        manifest["counts"].update(counts, input_bytes=2 * 10**9, length_histogram=[1] * 40)
        manifest["run"].update(cpu_s=4000, num_cpus=8)
        for number in range(num_shards):
            late_s = 9 * 3600 if number >= num_shards * 0.98 else 0
            manifest["counts"]["sources"] = {f"출처 {number % 300}": source}
            manifest["tar"]["num_bytes"] = 2 * 10**9 + number
            manifest["run"].update(host=f"n{number % 100:03d}", wall_s=550 + number % 40)
            manifest["run"]["began"] = 1.7e9 + late_s + number // 100 * 600
            manifest["shard_id"] = number
            manifest_path(out, number).write_text(json.dumps(manifest), encoding="utf-8")
            seal(manifest_path(out, number))
            for path, name in ((tar_path, "tar"), (idx_path, "idx")):  # of their size, without their bytes
                path(out, number).touch()
                os.truncate(path(out, number), manifest[name]["num_bytes"])
        return out

    return functools.cache(make)


@pytest.mark.slow
def test_a_page_of_many_shards_is_small_and_one_of_twice_as_many_no_larger(
    large: Callable[[int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [page_of(capsys, tmp_path, large(number)) for number in (500, 1000)]
    assert all(sum(Page(page).elements.values()) < 2200 for page in pages)
    assert len(pages[0]) < 150_000
    assert len(pages[1]) < 1.1 * len(pages[0])


def test_time_in_which_nothing_was_made_is_left_out_of_the_axis_and_named(
    large: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    work = data_of(capsys, large(1000))["work"]
    (gap,) = work["gaps"]
    assert 7 * 3600 < gap["left_out_s"] < 9.5 * 3600
    assert work["worked_s"] == pytest.approx(work["ended"] - work["began"] - gap["left_out_s"], rel=1e-6)
    assert (work["num_nodes"], len(work["nodes"])) == (100, 40)
    speeds = [node["bytes_per_s"] for node in work["nodes"]]
    assert speeds == sorted(speeds), "of many nodes the slowest are shown"
    tokens = sum(step["tokens_per_s"] for step in work["steps"]) * work["step_s"]
    assert tokens == pytest.approx(1000 * 480_000_000, rel=1e-3)
    busy_s = sum(step["num_shards"] for step in work["steps"]) * work["step_s"]
    assert busy_s == pytest.approx(sum(550 + number % 40 for number in range(1000)), rel=0.01)


def test_of_many_quarantine_files_some_are_read_evenly_over_the_shards(
    large: Callable[[int], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = large(200)
    for number in range(200):
        change(manifest_path(out, number), lambda it: it["counts"]["quarantined"].update(undecodable=5))
    opened = noted_opens(monkeypatch)
    (found,) = data_of(capsys, out)["left_out"]
    read = [int(name[6:11]) for name in opened if re.match(r"shard-.*\.jsonl$", name)]
    assert found["num_documents"] == 1000
    assert 20 < len(read) <= 64
    assert read == list(range(0, 200, read[1]))


def test_a_short_pause_stays_on_the_axis(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        times = {"began": 1.7e9 + 520 * number, "wall_s": 500}
        change(manifest_path(own_folder, number), lambda it, times=times: it["run"].update(times))  # type: ignore[misc]
    work = data_of(capsys, own_folder)["work"]
    assert work["gaps"] == []
    assert work["worked_s"] == pytest.approx(4 * 500 + 3 * 20)


def test_labels_of_a_chart_that_read_alike_are_shown_once(
    large: Callable[[int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = page_of(capsys, tmp_path, large(200))
    assert page.count('<span class="first" style="left:0.00%">2.00 GB</span>') == 1
    assert page.count(">2.00 GB</span>") == 1


@pytest.mark.processes
def test_on_a_narrow_page_lists_wrap_and_flags_are_not_broken_at_their_dashes(
    fake: FakeSlurm, own_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake.place / "away").touch()
    (own_folder / "jobs").mkdir()
    submitted(own_folder)
    page = page_of(capsys, tmp_path, own_folder)
    assert '<td class="">8 CPUs, 100 MB</td>' in page
    assert "<span>--num_shards</span> <span>4</span>" in page


@pytest.mark.processes
def test_each_submission_is_told_with_where_its_tasks_failed_and_none_of_the_free_text(
    fake: FakeSlurm, own_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first had a task that went over its memory on n1; its verify job, which took longer, is no task."""
    (fake.place / "away").touch()
    (own_folder / "jobs").mkdir()
    request = JobRequest(notify="curl https://hook/T0/SECRET", sbatch_args="--export=ALL,HF_TOKEN=hf_secret")
    first = submission(plan_id=need_plan(own_folder).plan_id, identity=folder_identity(own_folder))
    array = dataclasses.replace(first.arrays[0], request=request, tasks=["0", "1", "2", "3"], time_min=5)
    publish_submission(own_folder, dataclasses.replace(first, arrays=[array]))
    again = dataclasses.replace(array, job_id="3", tasks=["1", "3"], mem_mb=2048)
    publish_submission(
        own_folder, dataclasses.replace(first, number=1, arrays=[again], verify_job_id="4", submitted=99.0)
    )
    write_record(own_folder, "1_1", ended(75, stopped_by="OUT_OF_MEMORY"))
    shards = {"OUT_OF_MEMORY": "1", "TIMEOUT": "3"}
    causes = {cause: {"shards": ids, "nodes": {"n1": 1}} for cause, ids in shards.items()}
    append_event(own_folder, "retry", number=1, causes=causes)
    data = data_of(capsys, own_folder)
    found = data["attempts"]
    names = ("num_shards", "mem_mb", "num_failed_tasks")
    used = [tuple(each[name] for name in names) for each in found["submissions"]]
    assert used == [(4, 100, 1), (2, 2048, 0)]
    assert {each["cause"]: each["shards"] for each in found["retried"]} == shards
    assert [each["nodes"] for each in found["retried"]] == [{"n1": 1}] * 2
    assert found["failed_tasks_of_nodes"] == {"n1": 1}
    assert found["slurm_away"]
    page = page_of(capsys, tmp_path, own_folder)
    assert "OUT_OF_MEMORY" in page
    assert "SECRET" not in page
    assert "hf_secret" not in page


def test_slurm_is_not_asked_where_nothing_was_submitted(
    fake: FakeSlurm, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data_of(capsys, folder)["attempts"]["submissions"] == []
    assert [fake.calls(name) for name in ("squeue", "scontrol")] == [[], []]


def test_names_that_are_no_input_are_counted_by_reason_and_named(
    prep: Prep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, out = tmp_path / "raw", tmp_path / "data"
    raw.mkdir()
    for name in ("a.txt", "LICENSE.txt", ".hidden.txt", *(f"{number}.log" for number in range(7))):
        (raw / name).write_text("a line\n", encoding="utf-8")
    prep.plan(raw, out)
    found = data_of(capsys, out)["data"]["inputs_left_out"]
    assert {reason: each["num_names"] for reason, each in found.items()} == {
        "unknown suffix": 7,
        "file of a repository": 1,
        "hidden": 1,
    }
    assert sorted(found["unknown suffix"]["names"]) == [f"{number}.log" for number in range(7)]
    text = text_of(capsys, tmp_path, out)
    assert "LICENSE.txt" in text
    assert "and 2 more" in text


@pytest.mark.parametrize(
    "options",
    [{}, {"record": "packed", "seq_len": 32}, {"record": "packed", "seq_len": 64, "pack": "best_fit"}],
)
def test_examples_of_a_source_are_beginnings_of_its_documents_and_stand_where_they_say(
    prep: Prep, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    for name in ("가", "b"):
        (tmp_path / "raw" / name).mkdir(parents=True)
        lines = [f"{name} {number} {name * (number % 50)}" for number in range(200)]
        (tmp_path / "raw" / name / "0.txt").write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "data"
    out.mkdir()
    prep.plan(tmp_path / "raw", out, num_shards=3, recursive=True, **options)
    prep.make(out)
    for source in data_of(capsys, out, "--num_examples", 4)["sources"]:
        # Of rows of best_fit only the first document is sure to be of the row's input.
        assert len(source["examples"]) == 4 or ("pack" in options and source["examples"])
        for example in source["examples"]:
            text = re.sub("⟦.*?(⟧|$)", "", example["text"].removesuffix("..."))
            assert re.match(rf"{source['name']} \d+\b", text), "it begins as a document of its source"
            shown = prep.command("peek", out, example["address"], "--chars", 0).text
            assert text in " ".join(shown.split())


@pytest.mark.parametrize("record", ["documents", "packed"])
def test_a_recount_of_the_texts_gives_the_numbers_of_the_report(
    prep: Prep, tmp_path: Path, capsys: pytest.CaptureFixture[str], record: str
) -> None:
    """Equal documents in four formats give equal numbers: those that transformers and plain Python give."""
    chooser, texts = random.Random(7), dict[str, list[str]]()
    words = ["영화", "좋아요", "the", "film", "😀", "naïve", "1,234"]
    for name in ("가", "b"):
        sizes = [1 + int(chooser.paretovariate(0.8)) % 900 for _ in range(200)]
        texts[name] = [" ".join(chooser.choices(words, k=size)) for size in sizes]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(prep.model_dir / "tokenizer.json"))
    for form in ("txt", "jsonl", "jsonl.gz", "parquet"):
        raw, out = tmp_path / f"raw {form}", tmp_path / f"data {form}"
        for name, some in texts.items():
            (raw / name).mkdir(parents=True)
            path = raw / name / f"0.{form}"
            lines = "".join(
                f"  {text} \n" if form == "txt" else f"{json.dumps({'text': text})}\n" for text in some
            )
            if form == "parquet":
                pyarrow.parquet.write_table(pyarrow.table({"text": some}), path, row_group_size=32)
            else:
                path.write_bytes(gzip.compress(lines.encode()) if form == "jsonl.gz" else lines.encode())
        out.mkdir()
        prep.plan(
            raw,
            out,
            num_shards=3,
            recursive=True,
            record=record,
            **{"seq_len": 64} if record == "packed" else {},
        )
        prep.make(out)
        found = data_of(capsys, out)
        num_added = int(record == "packed")  # the EOS between documents
        lengths = {
            name: [len(tokenizer.encode(text)) + num_added for text in some] for name, some in texts.items()
        }
        every = list(itertools.chain(*lengths.values()))
        for name, counts in [(None, found["data"]), *((each["name"], each) for each in found["sources"])]:
            some = list(itertools.chain(*texts.values())) if name is None else texts[name]
            own = every if name is None else lengths[name]
            assert counts["num_documents"] == len(own)
            assert counts["num_tokens"] == sum(own)
            assert counts["num_text_bytes"] == len("".join(some).encode())
            assert counts["num_chars"] == sum(map(len, some))
            assert counts["bytes_per_token"] == round(counts["num_text_bytes"] / sum(own), 5)
            assert counts["chars_per_token"] == round(counts["num_chars"] / sum(own), 5)
            assert counts["tokens_per_document"] == round(statistics.mean(own), 5)
            for percent in (50, 90, 99):
                exact = sorted(own)[math.ceil(len(own) * percent / 100) - 1]
                assert exact <= counts[f"length_p{percent}"] <= exact * 1.125
            if name is not None:
                assert counts["token_share"] == round(sum(own) / sum(every), 5)
        for each in found["lengths"]:
            there = [number for number in every if each["from"] <= number < each["to"]]
            assert (each["num_documents"], each["num_tokens"]) == (len(there), sum(there))


def test_every_field_of_json_is_documented_and_every_documented_field_is_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = data_of(capsys, folder)
    page = (ROOT / "docs" / "report_json.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(found)
    counts = {item.name for item in dataclasses.fields(ShardCounts)}
    inner = {name for part in ("data", "work", "attempts") for name in found[part]} - counts
    assert [name for name in sorted(inner) if f"`{name}`" not in page] == []


def test_wrong_places_and_numbers_are_errors_with_their_codes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "plan.json" in said(capsys, tmp_path, code=66)
    assert "cannot be written" in said(capsys, folder, "--output", tmp_path / "none" / "x.html", code=73)
    assert "--num_examples" in said(capsys, folder, "--num_examples", -1, code=2)


def test_a_report_writes_a_page_into_the_current_folder_and_nothing_into_the_data_set(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(folder.rglob("*"))
    monkeypatch.chdir(tmp_path)
    said(capsys, folder)
    assert (tmp_path / "report.html").is_file()
    assert sorted(folder.rglob("*")) == before
