"""Input of every format: an independent reader's documents, bad records with their place, equal bytes."""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from preprocess.make.resources import WorkerSettings
from preprocess.make.worker import Worker, load_worker
from preprocess.plan.listing import list_inputs
from preprocess.read import arrow
from preprocess.read.documents import read_documents
from preprocess.read.inputs import OpenInput
from shardprep.errors import BadInput, NotFound, UsageError
from shardprep.format.idx import read_idx
from shardprep.format.index import read_index
from shardprep.format.manifest import read_manifest
from shardprep.format.options import PlanOptions, PrepConfig
from shardprep.format.plan import ByteRange, need_plan
from tests.checkout import ROOT
from tests.children import run_child
from tests.input_writers import bgzip, seekable_zstd
from tests.random_inputs import FORMATS, WIDE, compare

if TYPE_CHECKING:
    from tests.conftest import Prep

TEXTS = [f"문서 {number}: the kettle sings\n\ttwice. " * (number % 7 + 1) for number in range(60)]


def json_lines(texts: list[str]) -> bytes:
    rows = [{"id": f"d{number}", "text": text, "lang": "ko"} for number, text in enumerate(texts)]
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def write_table(path: Path, columns: dict[str, Any], rows_per_group: int = 9) -> None:
    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=rows_per_group, compression="zstd")
        return
    opened = pyarrow.ipc.new_file if "file" in path.name else pyarrow.ipc.new_stream
    with opened(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_per_group)


def write_every_format(raw: Path) -> list[str]:
    """The same documents in each format, under names that sort; the names."""
    raw.mkdir()
    lines = json_lines(TEXTS)
    compressed: dict[str, bytes] = {
        "a.jsonl": lines,
        "b.jsonl.gz": gzip.compress(lines),
        "c.json.zst": zstandard.ZstdCompressor().compress(lines),
        "d.ndjson.xz": lzma.compress(lines),
        "e.jsonl.zst": seekable_zstd(lines, [900]),
        "f.jsonl.gz": bgzip(lines, [700]),
        "g.txt.gz": gzip.compress("".join(" ".join(text.split()) + "\n" for text in TEXTS).encode()),
    }
    for name, data in compressed.items():
        (raw / name).write_bytes(data)
    columns = {"id": range(len(TEXTS)), "text": TEXTS}
    for name in ("h.parquet", "i.stream.arrow", "j.file.arrow"):
        write_table(raw / name, columns)
    return sorted(path.name for path in raw.iterdir())


def documents(prep: Prep, folder: Path) -> list[tuple[str, str, list[int]]]:
    """(input, text, ids) of every sample of a data set with text, in the order of the tars."""
    plan = need_plan(folder)
    found = []
    for shard_id in range(plan.num_shards):
        members = prep.members(folder / f"shard-{shard_id:05d}.tar")
        sources = read_idx(folder, plan.spec, shard_id)["source"].tolist()
        for source, text, ids in zip(sources, members[0::2], members[1::2], strict=True):
            found.append((plan.inputs[source].path, text[1].decode(), json.loads(ids[1])))
    return found


@pytest.fixture(scope="module")
def every_format(prep: Prep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DATA of all formats in one folder, 7 shards, made."""
    folder = tmp_path_factory.mktemp("every")
    write_every_format(folder / "raw")
    prep.plan(folder / "raw", folder / "data", num_shards=7)
    prep.make(folder / "data")
    return folder


def test_all_formats_in_one_folder_give_each_document_once_with_the_reference_ids(
    prep: Prep, every_format: Path
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(prep.model_dir / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    found = documents(prep, every_format / "data")
    assert prep.command("verify", every_format / "data").code == 0
    names = {name for name, _, _ in found}
    assert names == {path.name for path in (every_format / "raw").iterdir()}
    for name in names:
        texts = [text for path, text, _ in found if path == name]
        expected = [" ".join(text.split()) for text in TEXTS] if ".txt" in name else TEXTS
        assert texts == expected, name
    for _, text, ids in found:
        assert ids == tokenizer.encode(text).ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "batch_bytes", "num_cpus", "memory_gb"),
    [("tokenizers", 3_000, 4, None), ("gigatoken", 64, 2, None), ("auto", None, 8, 0.25)],
)
def test_shards_of_all_formats_have_equal_bytes_for_other_engines_batches_cpus_and_memory(
    prep: Prep,
    every_format: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: Any,
    batch_bytes: int | None,
    num_cpus: int,
    memory_gb: float | None,
) -> None:
    if batch_bytes is not None:
        monkeypatch.setattr(WorkerSettings, "batch_bytes", batch_bytes)
    shutil.copy(every_format / "data" / "plan.json", tmp_path)
    shutil.copytree(every_format / "data" / "tokenizer", tmp_path / "tokenizer")
    settings = WorkerSettings(engine=engine, memory_gb=memory_gb)
    plan = need_plan(tmp_path)
    worker = load_worker(plan, tmp_path, settings, num_cpus=num_cpus, warn=pytest.fail)
    for shard_id in range(plan.num_shards):
        worker.run_shard(worker.plan.shard(shard_id), lambda _: None)
    assert prep.contents(tmp_path) == prep.contents(every_format / "data")


@pytest.mark.processes
def test_a_new_process_plans_parquet_and_arrow_files_that_lie_side_by_side(
    prep: Prep, tmp_path: Path, raw: Path
) -> None:
    """Threads that import two parts of pyarrow at once find half of it, which reads as a missing library."""
    for name in ("a.parquet", "b.arrow", "c.parquet", "d.arrow"):
        write_table(raw / name, {"text": TEXTS})
    command = [sys.executable, "-m", "preprocess", "plan", "--input_dir", str(raw), "--num_shards", "2"]
    command += ["--output_dir", str(tmp_path / "data"), "--model_id", str(prep.model_dir)]
    run_child(command, env={**prep.environ(), "PYTHONPATH": str(ROOT)})


def test_a_worker_without_the_library_of_its_inputs_ends_before_any_work_and_others_go_on(
    prep: Prep, every_format: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = every_format / "data"
    plan = need_plan(folder)

    def load(shard_id: int) -> Worker:
        settings = WorkerSettings()
        return load_worker(plan, folder, settings, num_cpus=1, warn=pytest.fail, shard=plan.shard(shard_id))

    needing = [
        shard_id
        for shard_id in range(plan.num_shards)
        if any(part.path.name.endswith(("parquet", "arrow")) for part in plan.ranges(shard_id))
    ]
    assert 0 < len(needing) < plan.num_shards
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("columns", "parquet", "arrow"):
        monkeypatch.delitem(sys.modules, f"preprocess.read.{name}", raising=False)
    for shard_id in range(plan.num_shards):
        if shard_id in needing:
            with pytest.raises(UsageError, match=r"needs pyarrow, which is not installed; run: pip install"):
                load(shard_id)
        else:
            load(shard_id)


def test_files_that_say_where_they_may_be_entered_are_cut_and_others_are_packed_evenly(
    prep: Prep, tmp_path: Path, raw: Path
) -> None:
    lines = json_lines(TEXTS)
    (raw / "a.jsonl.zst").write_bytes(seekable_zstd(lines, [300]))
    (raw / "b.jsonl.gz").write_bytes(bgzip(lines, [300]))
    for number, share in enumerate([40, 5, 30, 10, 20, 15]):
        (raw / f"c{number}.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS[:share]), 1))
    plan = prep.plan(raw, tmp_path / "data", num_shards=8)
    inside = {plan.inputs[cut.input_number].path for cut in plan.cuts if cut.byte}
    assert inside == {"a.jsonl.zst", "b.jsonl.gz"}
    whole = [
        sorted(part.path.name for part in plan.ranges(shard_id))
        for shard_id in range(plan.num_shards)
        if plan.ranges(shard_id)[0].path.name.startswith("c")
    ]
    assert sorted(itertools.chain.from_iterable(whole)) == [f"c{number}.jsonl.gz" for number in range(6)]
    assert ["c0.jsonl.gz"] in whole or len(whole) < 4, "the largest with few others"
    prep.make(tmp_path / "data")
    found = documents(prep, tmp_path / "data")
    for name in ("a.jsonl.zst", "b.jsonl.gz"):
        assert [text for path, text, _ in found if path == name] == TEXTS


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FORMATS, *WIDE])
def test_random_files_are_read_as_an_independent_reader_reads_them(form: str, tmp_path: Path) -> None:
    """Some are damaged: then they are refused. ``python -m tests.random_inputs`` tries 20,000 of each."""
    results = [compare(form, seed, tmp_path) for seed in range(40)]
    assert {result for result in results if result.startswith("WRONG")} == set()
    assert results.count("equal") >= 20


def table_bytes(name: str, columns: dict[str, Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder) / name, columns)
        return (Path(folder) / name).read_bytes()


def broken_files() -> dict[str, tuple[str, bytes]]:
    """Name and content of each."""
    lines = json_lines(TEXTS)
    packed = gzip.compress(lines)
    table = table_bytes("b.parquet", {"text": TEXTS})
    stream = table_bytes("b.stream.arrow", {"text": TEXTS})
    name_at = table.rfind(b"text")
    return {
        "cut gzip": ("a.jsonl.gz", packed[:-30]),
        "gzip cut unseen by the plan": ("a.jsonl.gz", gzip.compress(lines * 1000)[:-30]),
        "gzip with garbage behind": ("a.jsonl.gz", packed + b"garbage behind it"),
        "gzip with a flipped bit": ("a.jsonl.gz", packed[:200] + bytes([packed[200] ^ 4]) + packed[201:]),
        "plain text named gz": ("a.jsonl.gz", lines),
        "cut zstd": ("a.txt.zst", zstandard.ZstdCompressor().compress(lines)[:-9]),
        "cut xz": ("a.txt.xz", lzma.compress(lines)[:-9]),
        "cut seekable zstd": ("a.jsonl.zst", seekable_zstd(lines, [500])[:-400]),
        "text named parquet": ("a.parquet", lines),
        "text named arrow": ("a.arrow", lines),
        "parquet without footer": ("b.parquet", table[:-12]),
        "broken name of a column": ("b.parquet", table[:name_at] + b"\xe5" + table[name_at + 1 :]),
        "cut arrow": ("b.stream.arrow", stream[:-300]),
        "arrow cut in its schema": ("b.stream.arrow", stream[: int.from_bytes(stream[4:8], "little") + 5]),
        "column of another type": ("b.parquet", table_bytes("b.parquet", {"text": [1, 2]})),
        "no such column": ("b.parquet", table_bytes("b.parquet", {"body": ["a"], "title": ["b"]})),
    }


BROKEN_FILES = broken_files()


@pytest.mark.slow
@pytest.mark.parametrize("kind", BROKEN_FILES)
def test_a_file_that_cannot_be_read_further_ends_in_65_by_its_name_and_counts_nothing(
    prep: Prep, tmp_path: Path, raw: Path, kind: str
) -> None:
    name, content = BROKEN_FILES[kind]
    (raw / name).write_bytes(content)
    flags = ["--input_dir", raw, "--output_dir", tmp_path / "data", "--model_id", prep.model_dir]
    ended = prep.command("plan", *flags)
    if "unseen" in kind:
        assert ended.code == 0, ended.text
        ended = prep.command("--shard_id", 0, "--output_dir", tmp_path / "data")
    assert ended.code == 65, ended.text
    assert str(raw / name) in ended.text
    assert "Traceback" not in ended.text
    assert not list(tmp_path.glob("data/**/shard-*"))
    if kind == "no such column":
        assert "has no column text, but body, title; choose with --text_field" in ended.text


def test_a_large_record_batch_is_read_some_rows_at_a_time_and_gives_what_the_whole_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows = 3_000
    texts = [None if n % 7 == 0 else f"문서 {n} " + "word " * (n % 90) for n in range(num_rows)]
    meta = [
        None if n % 11 == 0 else {"from": f"s{n % 3}", "is": n % 2 == 0, "in": {"note": f"n{n}"}}
        for n in range(num_rows)
    ]
    columns = {
        "messages": [[{"role": "user", "content": "a"}] * (n % 3) for n in range(num_rows)],
        "score": range(num_rows),
        "text": pyarrow.array(texts, pyarrow.large_string()),
        "meta": meta,
    }
    path = tmp_path / "a.stream.arrow"
    write_table(path, columns, rows_per_group=num_rows)
    options = PrepConfig(text_template="{text} {meta.in.note}", id_field="score", source_field="meta.from")
    part = ByteRange(input_number=0, path=path, start=0, end=path.stat().st_size)
    reads: list[int] = []
    read_all = OpenInput.read_all

    def recorded(self: OpenInput, start: int, end: int) -> bytes:
        reads.append(end - start)
        return read_all(self, start, end)

    monkeypatch.setattr(OpenInput, "read_all", recorded)

    def found(large_bytes: int) -> tuple[list[Any], list[Any], int]:
        monkeypatch.setattr(arrow, "_LARGE_BYTES", large_bytes)
        reads.clear()
        rows: list[Any] = []
        bad: list[Any] = []
        num_bytes = 0
        for item in read_documents([part], options.plan_options(), batch_bytes=2_000):
            columns = item.columns
            rows += zip(item.texts, columns["id"], columns["source"], item.offsets, strict=True)
            bad += item.bad
            num_bytes += item.num_bytes
        assert num_bytes == part.end
        return rows, bad, max(reads, default=0)

    whole, by_rows = found(part.end), found(0)
    assert by_rows[:2] == whole[:2]
    assert len(whole[0]) + len(whole[1]) == num_rows
    assert whole[2] > 100_000
    assert by_rows[2] < 20_000


@pytest.mark.parametrize("large_bytes", [0, 1 << 30], ids=["by rows", "whole"])
def test_nulls_that_no_bit_says_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_bytes: int
) -> None:
    monkeypatch.setattr(arrow, "_LARGE_BYTES", large_bytes)
    path = tmp_path / "a.stream.arrow"
    write_table(path, {"text": ["한글"] * 5}, rows_per_group=5)
    data, no_null, some_null = path.read_bytes(), struct.pack("<qq", 5, 0), struct.pack("<qq", 5, 2)
    assert data.count(no_null) == 1  # the column's node in the header of the record batch
    path.write_bytes(data.replace(no_null, some_null))
    part = ByteRange(input_number=0, path=path, start=0, end=len(data))
    with pytest.raises(BadInput, match=re.escape(str(path))):
        list(read_documents([part], PlanOptions(), batch_bytes=2_000))


def test_a_record_batch_that_says_it_is_a_schema_is_refused_and_not_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.stream.arrow"
    write_table(path, {"text": ["한글"] * 5}, rows_per_group=5)
    data = path.read_bytes()
    _, batch = arrow.messages_of(OpenInput(path))
    header = data[batch.start + 8 : batch.body_start]
    kind = arrow._slot(header, struct.unpack_from("<I", header)[0], 1) + batch.start + 8
    assert data[kind] == arrow.BATCH
    path.write_bytes(data[:kind] + bytes([arrow.SCHEMA]) + data[kind + 1 :])
    part = ByteRange(input_number=0, path=path, start=0, end=len(data))
    with pytest.raises(BadInput, match="a schema stands within a stream"):
        list(read_documents([part], PlanOptions(), batch_bytes=2_000))


def test_empty_files_of_every_format_hold_no_documents(prep: Prep, tmp_path: Path, raw: Path) -> None:
    suffixes = ("txt", "jsonl", "json", "txt.gz", "jsonl.zst", "txt.xz", "txt.bz2", "parquet", "arrow")
    names = [f"a{number}.{suffix}" for number, suffix in enumerate(suffixes)]
    for name in names:
        (raw / name).write_bytes(b"")
    (raw / "j.txt").write_text("one\n")
    prep.plan(raw, tmp_path / "data", num_shards=2)
    prep.make(tmp_path / "data")
    assert [(name, text) for name, text, _ in documents(prep, tmp_path / "data")] == [("j.txt", "one")]


def test_ids_are_kept_with_their_place_and_sources_are_counted(prep: Prep, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for folder, name in (("web", "a.jsonl"), ("code", "b.jsonl.gz")):
        (raw / folder).mkdir(parents=True)
        data = json_lines([*TEXTS[:20], ""]) + b'{"id": "bad"}\n'
        (raw / folder / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (raw / "top.txt").write_text("one line\n")
    options: dict[str, Any] = {"recursive": True, "id_field": "id", "max_bad_fraction": 0.1}
    plan = prep.plan(raw, tmp_path / "data", num_shards=2, record="packed", seq_len=64, **options)
    prep.make(tmp_path / "data")
    rows = [
        json.loads(line)
        for path in sorted((tmp_path / "data" / "ids").iterdir())
        for line in path.read_text().splitlines()
    ]
    web = [row for row in rows if plan.inputs[row[0]].path == "web/a.jsonl"]
    assert [row[2] for row in web] == [f"d{number}" for number in range(20)]
    raw_bytes = (raw / "web" / "a.jsonl").read_bytes()
    assert all(raw_bytes[offset:].startswith(f'{{"id": "{name}"'.encode()) for _, offset, name in web)
    verified = prep.command("verify", tmp_path / "data")
    assert verified.code == 0
    assert "  web: 20 documents, " in verified.text
    sources = read_index(tmp_path / "data").sources
    assert {name: counts.num_documents for name, counts in sources.items()} == {"web": 20, "code": 20, ".": 1}
    assert {name: counts.num_quarantined for name, counts in sources.items()} == {"web": 1, "code": 1, ".": 0}
    assert sources["web"].num_bytes == len(raw_bytes)
    manifests = [read_manifest(tmp_path / "data", shard_id).counts for shard_id in range(2)]
    assert sum(counts.num_tokens for counts in sources.values()) == sum(each.num_tokens for each in manifests)
    (tmp_path / "data" / "ids" / "shard-00000.jsonl").write_text("")
    assert prep.command("verify", "--fast", tmp_path / "data").code != 0


def test_a_field_may_name_the_source(prep: Prep, tmp_path: Path, raw: Path) -> None:
    rows = [
        {"text": "가 b", "from": "web"},
        {"text": "c", "from": "code"},
        {"text": "d"},
        {"text": "e", "from": "web"},
        {"text": 5, "from": "web"},
        {"from": "images"},
        {"text": None},
    ]
    (raw / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prep.plan(raw, tmp_path / "data", source_field="from", max_bad_fraction=0.5)
    prep.make(tmp_path / "data")
    sources = read_manifest(tmp_path / "data", 0).counts.sources
    found = {name: (of.num_documents, of.num_bytes, of.num_quarantined) for name, of in sources.items()}
    assert found == {".": (1, 1, 1), "code": (1, 1, 0), "images": (0, 0, 1), "web": (2, 6, 1)}
    (bad, *_) = (tmp_path / "data" / "quarantine" / "shard-00000.jsonl").read_text().splitlines()
    assert list(json.loads(bad)) == ["source", "source_offset", "num_bytes", "line", "reason", "detail"]


def test_more_sources_than_a_manifest_can_name_are_refused(prep: Prep, tmp_path: Path, raw: Path) -> None:
    (raw / "a.jsonl").write_text("".join(f'{{"text": "a", "from": {number}}}\n' for number in range(1001)))
    with pytest.raises(BadInput, match=r"more than 1000 sources.*choose a --source_field with fewer values"):
        prep.plan(raw, tmp_path / "data", source_field="from")


def test_the_notes_that_datasets_puts_beside_its_files_are_no_input(tmp_path: Path) -> None:
    for name in ("dataset_info.json", "state.json", "dataset_dict.json", "README.md"):
        (tmp_path / name).write_text("{}")
    write_table(tmp_path / "data-00000-of-00001.arrow", {"text": ["a"]})
    assert [path.name for path in list_inputs(tmp_path, recursive=False)] == ["data-00000-of-00001.arrow"]
    (tmp_path / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(NotFound, match=r"nor any other input \(\.txt, \.jsonl"):
        list_inputs(tmp_path, recursive=False)


def test_planning_opens_each_file_once(
    prep: Prep, tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        (raw / f"{number:03d}.jsonl").write_bytes(json_lines(TEXTS[number % 50 :][:3]))
    opened: list[str] = []
    opens: Callable[..., None] = OpenInput.__init__

    def counted(self: OpenInput, path: Path) -> None:
        opened.append(path.name)
        opens(self, path)

    monkeypatch.setattr(OpenInput, "__init__", counted)
    prep.plan(raw, tmp_path / "data", num_shards=4)
    times = {name: opened.count(name) for name in opened}
    assert len(times) == 300
    assert sum(count > 1 for count in times.values()) <= 3 + 16, "but where shards begin, and for two samples"


def test_a_worker_says_which_field_too_many_documents_lack(prep: Prep, tmp_path: Path, raw: Path) -> None:
    (raw / "a.jsonl").write_text('{"text": "a"}\n' + '{"body": "a"}\n' * 4)
    prep.plan(raw, tmp_path / "data")
    worker = load_worker(
        need_plan(tmp_path / "data"), tmp_path / "data", WorkerSettings(), num_cpus=1, warn=pytest.fail
    )
    with pytest.raises(BadInput, match=r"have no field for 'text', .* Is it another --text_field\?"):
        worker.run_shard(worker.plan.shard(0), lambda _: None)


def test_planning_warns_of_a_sample_without_the_field(prep: Prep, tmp_path: Path, raw: Path) -> None:
    (raw / "a.jsonl").write_text('{"text": "a"}\n' + '{"body": "a"}\n' * 4)
    ended = prep.command(
        "plan", "--input_dir", raw, "--output_dir", tmp_path / "data", "--model_id", prep.model_dir
    )
    assert ended.code == 0, ended.text
    assert "warning: 80% of the documents in a sample have no field for 'text'" in ended.text


WRITTEN = ROOT / "tests" / "data" / "written_by_others"
OTHERS_TEXTS = ["The kettle sings.\nTwice.", "바닷가 마을의 겨울은 길다.", "tab\there"]


def test_what_datatrove_and_dolma_wrote_goes_in_as_it_is(prep: Prep, tmp_path: Path, raw: Path) -> None:
    """Small files that their own writers wrote: datatrove 0.10.1, dolma 1.2.1's mixer."""
    # Under names of their own: one that is another in a compressed form would be left out.
    names = [f"{number}-{path.name}" for number, path in enumerate(sorted(WRITTEN.iterdir()))]
    assert len(names) >= 3
    for name, path in zip(names, sorted(WRITTEN.iterdir()), strict=True):
        shutil.copyfile(path, raw / name)
    prep.plan(raw, tmp_path / "data", id_field="id")
    prep.make(tmp_path / "data")
    found = documents(prep, tmp_path / "data")
    for name in names:
        assert [text for path, text, _ in found if path == name] == OTHERS_TEXTS, name
    ids = [path.read_text() for path in sorted((tmp_path / "data" / "ids").iterdir())]
    assert all(lines.endswith(',"d2"]\n') for lines in ids)
