"""``shardprep peek``: samples decoded, with boundaries and places; and a made shard read back."""

from __future__ import annotations

import re
import shlex
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from shardprep.format import shards
from shardprep.format.plan import need_plan
from shardprep.format.shards import ShardSamples

if TYPE_CHECKING:
    from tests.conftest import Prep

HEAD = re.compile(
    r"^shard-(\d{5}) (document|row) (\d+): (\d+) tokens, (?:begins in the document at|from) (.*) byte (\d+)$"
)


@pytest.fixture(scope="module")
def packed(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    prep.plan(sample_dir, folder, num_shards=3, record="packed", seq_len=64)
    prep.make(folder)
    return folder


def heads(text: str) -> list[tuple[int, int, int, str, int]]:
    """(shard, number, tokens, file, byte) of each sample that was printed."""
    found = [match for match in map(HEAD.match, text.splitlines()) if match]
    return [(int(m[1]), int(m[3]), int(m[4]), m[5], int(m[6])) for m in found]


def test_a_document_is_printed_as_its_line_of_the_input_stands_at_its_place(
    prep: Prep, made_dir: Path, sample_dir: Path
) -> None:
    ended = prep.command("peek", made_dir, "--num", 3, "--chars", 0, "--random")
    assert ended.code == 0
    blocks = ended.text.strip().split("\n\n")
    assert len(blocks) == 3
    for block in blocks:
        head, text = block.split("\n", 1)
        ((_, _, _, path, offset),) = heads(head)
        line = (sample_dir / path).read_bytes()[offset:].split(b"\n")[0].decode().strip()
        assert text == f"  ⟦<|begin_of_text|>⟧{line}"


def test_a_row_shows_where_documents_begin_in_it_and_the_rest_of_one_that_began_before(
    prep: Prep, packed: Path
) -> None:
    plan = need_plan(packed)
    with ShardSamples(packed, plan.spec, 1) as samples:
        rows = [f"1:{number}" for number in range(min(400, len(samples.records)))]
        ended = prep.command("peek", packed, *rows, "--chars", 0)
        blocks = ended.text.strip().split("\n\n")
        assert len(blocks) == len(rows)
        assert blocks[0].split("\n")[1] == "  --- a document begins"
        for number, block in enumerate(blocks):
            assert block.count("  --- a document begins") == samples.records["num_starts"][number]
            begins_inside = 0 not in samples.starts(number)
            assert ("--- the rest of a document" in block) == begins_inside
            assert ("begins in the document at" in block) == begins_inside
    assert "⟦<|end_of_text|>⟧" in ended.text


def test_grep_chooses_and_is_told_where_nothing_is_found(prep: Prep, made_dir: Path) -> None:
    found = prep.command("peek", made_dir, "--grep", r"\b7[0-9] lamps", "--num", 2, "--chars", 0)
    assert len(heads(found.text)) == 2
    assert len(re.findall(r"\b7[0-9] lamps", found.text)) >= 2
    nothing = prep.command("peek", made_dir, "--grep", "no such words at all")
    assert nothing.code == 66
    assert "has no sample that was asked for" in nothing.text


def test_random_samples_are_of_all_shards_and_others_each_time(prep: Prep, made_dir: Path) -> None:
    first, other = (heads(prep.command("peek", made_dir, "--random", "--num", 6).text) for _ in range(2))
    assert first != other
    assert {head[0] for head in first} == {0, 1, 2}
    every = heads(prep.command("peek", made_dir, "--random", "--num", 10**6).text)
    assert sorted(every) == heads(prep.command("peek", made_dir, "--num", 10**6).text)


@pytest.mark.parametrize("folder", ["made_dir", "packed"])
def test_a_place_in_an_input_shows_the_samples_that_hold_its_document(
    prep: Prep, folder: str, request: pytest.FixtureRequest, sample_dir: Path
) -> None:
    data = request.getfixturevalue(folder)
    for path in sorted(sample_dir.iterdir()):
        content = path.read_bytes()
        begins = [0, *(place + 1 for place, byte in enumerate(content[:-1]) if byte == ord("\n"))]
        for begin in begins[:: max(1, len(begins) // 4)]:
            line = content[begin:].split(b"\n", 1)[0].decode().strip()
            if line:
                ended = prep.command("peek", data, f"{path.name}:{begin + 1}", "--chars", 0)
                assert ended.code == 0
                shown = [each[2:] for each in ended.text.splitlines() if re.match("  (?!---)", each)]
                text = re.sub("⟦.*?⟧", "", "".join(shown))
                assert any(part in text for part in (line[:20], line[20:40])), "a row's end may cut one"


def test_an_address_prints_its_sample_and_of_a_row_one_document(
    prep: Prep, made_dir: Path, packed: Path
) -> None:
    every = prep.command("peek", made_dir, "--num", 9, "--chars", 0).text.split("\n\n")
    ended = prep.command("peek", made_dir, "0:7", "0:2", "--num", 1, "--chars", 0)
    assert ended.text.split("\n\n")[:2] == [every[7], every[2]]
    row = next(
        block
        for block in prep.command("peek", packed, *(f"1:{n}" for n in range(9)), "--chars", 0).text.split(
            "\n\n"
        )
        if block.count("  --- ") > 1
    )
    ((_, number, *_),) = heads(row)
    head, *documents = re.split(r"^(?=  --- )", row, flags=re.MULTILINE)
    ended = prep.command("peek", packed, f"1:{number}:1", "--chars", 0)
    assert ended.text.strip() == f"{head}{documents[1]}".strip()
    ended = prep.command("peek", packed, f"1:{number}", "--chars", 0)
    assert ended.text.strip() == row.strip()


@pytest.mark.parametrize(
    ("flags", "code", "what"),
    [
        (["--grep", "("], 2, "is no regular expression"),
        (["--num", "0"], 2, "--num is 0"),
        (["0:1", "--random"], 2, "leave out --random"),
        (["shard-00000"], 2, "expected SHARD:SAMPLE, SHARD:ROW:DOCUMENT, FILE:BYTE or id:ID"),
        (["shard-00000:1"], 66, "shard-00000 is no input of the plan"),
        (["0:99999"], 66, "0:99999: shard-00000 has samples 0 to"),
        (["0:1:1"], 66, "0:1:1: that sample has documents 0 to 0"),
        (["77:1"], 2, "the shard of 77:1 is 77, expected ids of 0 to"),
    ],
)
def test_flags_and_addresses_that_cannot_be_are_refused(
    prep: Prep, made_dir: Path, flags: list[str], code: int, what: str
) -> None:
    ended = prep.command("peek", made_dir, *flags)
    assert ended.code == code
    assert what in ended.text


@pytest.mark.processes
def test_a_shard_that_is_not_made_is_66_with_the_command_that_makes_it(prep: Prep, data_dir: Path) -> None:
    folder = data_dir.rename(data_dir.with_name("my data"))
    none = prep.command("peek", folder)
    assert (none.code, "has no finished shard; run: shardprep run" in none.text) == (66, True)
    prep.make(folder, 0)
    one = prep.command("peek", folder, "1:0")
    assert (one.code, "shard 00001 is not made" in one.text) == (66, True)
    command = re.search(r"(shardprep run .*)", one.text)
    assert command
    assert prep.command(*shlex.split(command[1])[1:]).code == 0
    assert prep.command("peek", folder, "1:0").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("read_bytes", [4 << 20, 128])
@pytest.mark.parametrize("pack", ["concat", "best_fit"])
def test_a_packed_shard_is_read_back_as_the_stream_of_its_documents(
    prep: Prep, sample_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: str, read_bytes: int
) -> None:
    prep.plan(sample_dir, tmp_path / "data", num_shards=2, record="packed", seq_len=64, pack=pack)
    plan = prep.make(tmp_path / "data")
    monkeypatch.setattr(shards, "READ_BYTES", read_bytes)
    with ShardSamples(tmp_path / "data", plan.spec, 1) as samples:
        rows = [samples.ids(number) for number in range(len(samples.records))]
        stream = np.concatenate(list(samples.pieces()))
        lengths = samples.document_lengths(rows_hold_wholes=pack == "best_fit")
    assert stream.tolist() == np.concatenate(rows).tolist()
    assert lengths.sum() == len(stream)
    begins = np.cumsum(lengths) - lengths
    bos, eos = plan.tokenizer.bos_token_id, plan.tokenizer.eos_token_id
    counts = (stream == bos).sum()
    if pack == "concat":
        assert len(lengths) == counts
        assert (stream[begins] == bos).all()
        assert (stream[begins + lengths - 1] == eos).all()
    else:
        assert len(lengths) >= counts
        assert set(np.flatnonzero(stream == bos).tolist()) <= set(begins.tolist())


@pytest.mark.parametrize("token_format", ["json", "npy"])
def test_documents_are_read_back_one_by_one_and_as_a_stream(
    prep: Prep, sample_dir: Path, tmp_path: Path, token_format: str
) -> None:
    prep.plan(sample_dir, tmp_path / "data", num_shards=3, token_format=token_format)
    plan = prep.make(tmp_path / "data", 0)
    tokenizer = Tokenizer.from_file(str(tmp_path / "data" / "tokenizer" / "tokenizer.json"))
    with ShardSamples(tmp_path / "data", plan.spec, 0) as samples:
        rows = [samples.ids(number).tolist() for number in range(len(samples.records))]
        assert np.concatenate(list(samples.pieces())).tolist() == list(chain(*rows))
        lengths = samples.document_lengths(rows_hold_wholes=False)
    assert lengths.tolist() == [len(row) for row in rows]
    lines = (sample_dir / plan.inputs[0].path).read_text().splitlines()
    texts = [line.strip() for line in lines if line.strip()]
    assert rows[: len(texts)] == [tokenizer.encode(text).ids for text in texts][: len(rows)]


@pytest.mark.parametrize("pack", [{}, {"validation_fraction": 0.4}], ids=["all", "held"])
def test_a_document_of_a_small_input_is_in_a_row_that_begins_in_another(
    prep: Prep, tmp_path: Path, pack: dict[str, Any]
) -> None:
    (tmp_path / "raw").mkdir()
    for number in range(9):
        text = f"the kettle {number}{number}{number} sings\nthe second line {number}{number}{number}\n"
        (tmp_path / "raw" / f"{number}.txt").write_text(text)
    data = tmp_path / "data"
    prep.plan(tmp_path / "raw", data, num_shards=1, record="packed", seq_len=4096, **pack)
    prep.make(data)
    for number in range(9):
        for place, words in ((0, "kettle"), (len(f"the kettle {number * 111:03} sings\n"), "second line")):
            ended = prep.command("peek", data, f"{number}.txt:{place}", "--chars", 0)
            assert (ended.code, f"{words} {number}{number}{number}" in ended.text) == (0, True), ended.text
