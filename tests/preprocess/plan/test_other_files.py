"""What ``plan`` says about files that no input format reads, and about a sample without usable documents."""

from __future__ import annotations

import gzip
import io
import shlex
import sqlite3
import zipfile
from pathlib import Path

import pytest

from tests.chat_sets import PLAIN
from tests.world import World, save_tokenizer


def zipped(text: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", text)
    return file.getvalue()


ZIP = zipped("hello\n" * 99)
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
# Name of a file -> its content, and words of what is said about it.
OTHERS = {
    "a.zip": (ZIP, "unzip"),
    "a.docx": (ZIP, "pandoc"),
    "a.pdf": (b"%PDF-1.7\n%\xe2\xe3\n", "pdftotext"),
    "a.psv": (b'id|text\n1|"first, with comma"\n', "duckdb"),
    "a.psv.gz": (gzip.compress(b"id|text\n1|first\n"), "duckdb"),
    "a.xlsx": (ZIP, "read_excel"),
    "a.wat.gz": (gzip.compress(b"WARC/1.0\r\n"), "web archive"),
    "a.tar.zst": (b"\x28\xb5\x2f\xfd", "tar -xf"),
    "a.parquet.gz": (gzip.compress(b"PAR1"), "decompress"),
    "a.png": (PNG, "no text"),
    "a.mp4": (b"\x00\x00\x00 ftypisom", "no text"),
    "a.npy": (b"\x93NUMPY\x01\x00", "write its texts"),
    # The suffix says nothing, the first bytes do.
    "photo": (PNG, "no text"),
    "download": (ZIP, "unzip"),
    "part-00000": (b"PAR1\x15\x00", ".parquet"),
    "corpus.raw": (b"\x1f\x8b\x08\x00", ".gz"),
    "a.dat": (b"\x01\x00\x02\x00" * 99, "not text"),
    "utf16.asc": ("text".encode("utf-16"), "iconv -f utf-16"),
    "empty.md": (b"", "empty"),
}
TEXTS = {"notes.md": b"# a title\n", "ko.md": "문서\n".encode("cp949"), "LICENSE": b"free\n", "x.md.gz": b""}


@pytest.mark.parametrize("name", OTHERS)
def test_a_binary_file_is_never_advised_as_plain_text(tmp_path: Path, name: str) -> None:
    content, todo = OTHERS[name]
    world = World(tmp_path / "a b").raw({"ok.txt": "a line\n", name: content})
    alone = World(tmp_path / "alone").raw({name: content})
    for said in (world.try_plan(dry_run=True).ends(0).err, alone.try_plan().ends(66).err):
        (line,) = [line for line in said.splitlines() if "left out (unknown suffix)" in line]
        advice = line.partition("left out (unknown suffix): 1, such as ")[2]
        assert todo in advice
        assert "--also" not in advice


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_file_of_another_name_is_advised_with_also(tmp_path: Path, name: str) -> None:
    content = TEXTS[name] or gzip.compress(b"text\n")
    world = World(tmp_path).raw({"ok.txt": "a line\n", name: content})
    said = world.try_plan(dry_run=True).ends(0).err
    (words,) = [each for each in said.split(";") if "--also" in each]
    pattern = shlex.split(words)[1]
    encoding = "cp949" if name == "ko.md" else "utf-8"
    assert "left out" not in world.try_plan(dry_run=True, also=pattern, encoding=encoding).ends(0).err


def test_marks_of_spark_are_not_advised_as_inputs_and_a_text_beside_them_is(tmp_path: Path) -> None:
    marks = dict.fromkeys(("_SUCCESS", "_committed_12", "_started_12", "_metadata", "_temporary/0/a"), "")
    world = World(tmp_path).raw({"ok.txt": "a line\n", **marks})
    assert "--also" not in world.try_plan(dry_run=True).ends(0).err
    world.raw({"_notes.txt": "text\n"})
    assert "--also '_notes.txt'" in world.try_plan(dry_run=True).ends(0).err


def test_a_database_and_an_archive_are_each_explained(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"ok.txt": "a line\n", "b.zip": ZIP, "c.md": "text\n"})
    with sqlite3.connect(world.raw_dir / "a.db") as database:
        database.execute("create table t (a)")
    said = world.try_plan(dry_run=True).ends(0).err
    for each in ("a.db is a database", "b.zip is a zip archive", "--also '*.md'"):
        assert each in said


JSON_IN_CP949 = '{"text": "문서"}\n'.encode("cp949") * 5


def test_json_in_another_encoding_is_refused_and_read_as_the_flag_says(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.jsonl": JSON_IN_CP949})
    world.try_plan().ends(65, "undecodable", "--encoding auto")
    assert world.make(num_shards=1, encoding="cp949").texts() == ["문서"] * 5
    World(tmp_path / "text").raw({"a.txt": "문서\n".encode("cp949") * 5}).try_plan().ends(
        65, "--encoding auto"
    )


def test_a_shard_with_json_in_another_encoding_names_the_file_and_the_flag(tmp_path: Path) -> None:
    others = '{"text": "это русский текст"}\n'.encode("koi8-r") * 9
    world = World(tmp_path).raw({"a.jsonl": [{"text": "right"}] * 9, "b.jsonl": b'{"text": "a"}\n' + others})
    assert "b.jsonl" in world.try_plan(dry_run=True).ends(0).err
    world.plan(num_shards=1)
    world.try_shard().ends(65, "b.jsonl", "--encoding utf-8")


SPOKEN = {
    "other names": ("speaker", "utterance", "user"),
}


@pytest.mark.processes
@pytest.mark.parametrize("form", SPOKEN)
def test_conversations_with_other_keys_are_refused_with_a_function_that_maps_them(
    tmp_path: Path, form: str
) -> None:
    speaker, said, user = SPOKEN[form]
    turns = [{speaker: user, said: "the"}, {speaker: "gpt" if user == "human" else "assistant", said: "a"}]
    records = [{"talk": {"turns": turns}}] * 20
    model = save_tokenizer(tmp_path / "model", chat_template=PLAIN)
    world = World(tmp_path, tokenizer=model).raw({"a.jsonl": records})
    ended = world.try_plan(record="chat", text_field="talk.turns", seq_len=64).ends(65, speaker, said)
    function = "def transform" + ended.err.partition("def transform")[2].splitlines()[0]
    if form == "other names":  # placeholders, which the user has to replace
        function = function.replace("SPEAKER", speaker).replace("TEXT", said)
    (tmp_path / "t.py").write_text(function)
    world.try_plan(record="chat", seq_len=64, transform=tmp_path / "t.py", num_shards=1).ends(0)
