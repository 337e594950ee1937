"""Arrow as others write it: streams behind each other, without an end mark, of before 0.15; and no more."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
import pyarrow.ipc
import pytest

if TYPE_CHECKING:
    from tests.conftest import Ended, Prep

END_MARK = b"\xff\xff\xff\xff\0\0\0\0"
FIRST = [f"first {n}" for n in range(20)]
SECOND = [f"둘째 {n}" for n in range(13)]


def arrow_bytes(table: pyarrow.Table, *, is_file: bool = False, is_old: bool = False, rows: int = 6) -> bytes:
    sink = io.BytesIO()
    opened = pyarrow.ipc.new_file if is_file else pyarrow.ipc.new_stream
    options = pyarrow.ipc.IpcWriteOptions(use_legacy_format=is_old, emit_dictionary_deltas=not is_file)
    with opened(sink, table.schema, options=options) as writer:
        for start in range(0, len(table), rows):
            # Each with a dictionary of its own: a stream replaces it, or adds to it.
            chunk = table.slice(start, rows)
            writer.write_table(chunk if is_file else chunk.unify_dictionaries())
    return sink.getvalue()


def of_text(texts: list[str]) -> pyarrow.Table:
    return pyarrow.table({"text": texts})


def of_dictionary(texts: list[str]) -> pyarrow.Table:
    """Another schema, whose texts are numbers of a dictionary that differs from batch to batch."""
    chunks = [pyarrow.array(texts[n : n + 6]).dictionary_encode() for n in range(0, len(texts), 6)]
    return pyarrow.table({"n": range(len(texts)), "text": pyarrow.chunked_array(chunks)})


def plan_of(prep: Prep, raw: Path, *flags: object) -> Ended:
    return prep.command(
        "plan", "--input_dir", raw, "--output_dir", raw.parent / "data", "--model_id", prep.model_dir, *flags
    )


def texts_in(prep: Prep, data: Path) -> list[str]:
    members = [member for tar in sorted(data.glob("shard-*.tar")) for member in prep.members(tar)]
    return [text.decode() for name, text in members if name.endswith(".text.txt")]


READ = {
    "two streams": (arrow_bytes(of_text(FIRST)) + arrow_bytes(of_text(SECOND)), FIRST + SECOND),
    "the second with another schema": (
        arrow_bytes(of_text(FIRST)) + arrow_bytes(of_dictionary(SECOND)),
        FIRST + SECOND,
    ),
    "the first with dictionaries": (
        arrow_bytes(of_dictionary(FIRST)) + arrow_bytes(of_text(SECOND)),
        FIRST + SECOND,
    ),
    "one without rows between": (
        arrow_bytes(of_text(FIRST)) + arrow_bytes(of_text([])) + arrow_bytes(of_text(SECOND)),
        FIRST + SECOND,
    ),
    "no end mark": (arrow_bytes(of_text(FIRST)).removesuffix(END_MARK), FIRST),
    "no end mark behind the second": (
        arrow_bytes(of_text(FIRST)) + arrow_bytes(of_text(SECOND)).removesuffix(END_MARK),
        FIRST + SECOND,
    ),
    "before 0.15": (arrow_bytes(of_dictionary(FIRST), is_old=True), FIRST),
    "before 0.15 and behind it": (
        arrow_bytes(of_text(FIRST), is_old=True) + arrow_bytes(of_text(SECOND)),
        FIRST + SECOND,
    ),
    "a file of before 0.15": (arrow_bytes(of_text(FIRST), is_file=True, is_old=True), FIRST),
}


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("kind", READ)
def test_all_streams_of_a_file_are_read_wherever_shards_begin(
    prep: Prep, raw: Path, kind: str, num_shards: int
) -> None:
    data, texts = READ[kind]
    if kind == "a file of before 0.15":
        try:
            options = pyarrow.ipc.IpcReadOptions(included_fields=[0])
            pyarrow.ipc.open_file(data, options=options).get_batch(0)
        except OSError:
            pytest.skip("this pyarrow cannot read some columns of it")
    (raw / "a.arrow").write_bytes(data)
    ended = plan_of(prep, raw, "--num_shards", num_shards)
    assert ended.code == 0, ended.text
    prep.make(raw.parent / "data")
    assert texts_in(prep, raw.parent / "data") == texts


STREAM, FILE = arrow_bytes(of_text(FIRST)), arrow_bytes(of_text(FIRST), is_file=True)
REFUSED = {
    "zeros behind the end mark": STREAM + bytes(8),
    "text behind the end mark": STREAM + b'{"text": "lost"}\n',
    "an end mark alone behind it": STREAM + END_MARK,
    "a cut stream behind it": STREAM + arrow_bytes(of_text(SECOND))[:-70],
    "a stream behind one without end mark": STREAM.removesuffix(END_MARK) + STREAM,
    "a record batch without a schema behind it": STREAM + STREAM[STREAM.index(b"\xff\xff\xff\xff", 8) :],
    "a file behind a stream": STREAM + FILE,
    "a stream behind a file": FILE + STREAM,
    "two equal files": FILE + FILE,
    "two files": FILE + arrow_bytes(of_text(SECOND), is_file=True),
    "no schema": END_MARK,
    "zeros": bytes(4),
    "Feather of before Arrow": b"FEA1" + bytes(60) + b"FEA1",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_pyarrow_would_leave_out_is_refused_by_name(prep: Prep, raw: Path, kind: str) -> None:
    (raw / "a.arrow").write_bytes(REFUSED[kind])
    ended = plan_of(prep, raw, "--num_shards", 2)  # which looks for places between shards
    assert ended.code == 65, ended.text
    assert str(raw / "a.arrow") in ended.text
    assert "Traceback" not in ended.text


def test_a_stream_that_is_cut_within_a_message_is_refused(prep: Prep, raw: Path) -> None:
    """Behind a message it may be whole, for the end mark is optional."""
    sink = io.BytesIO()
    whole = [0]
    with pyarrow.ipc.new_stream(sink, of_text(FIRST).schema) as writer:
        whole.append(sink.tell())
        for batch in of_text(FIRST).to_batches(max_chunksize=7):
            writer.write_batch(batch)
            whole.append(sink.tell())
    data = sink.getvalue()
    for end in sorted({*range(3, len(data), 61), *(each + by for each in whole[1:] for by in (-1, 4))}):
        (raw / "a.arrow").write_bytes(data[:end])
        ended = plan_of(prep, raw, "--num_shards", 2, "--dry_run")
        assert ended.code == 65, (end, ended.text)


def test_one_shard_refuses_what_stands_behind_the_end_mark(prep: Prep, raw: Path) -> None:
    (raw / "a.arrow").write_bytes(STREAM + b"garbage")
    if (code := plan_of(prep, raw).code) == 0:
        code = prep.command("--shard_id", 0, "--output_dir", raw.parent / "data").code
    assert code == 65
