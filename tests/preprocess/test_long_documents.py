"""A document too long to be held gives the bytes that it would give if it were held."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess import options as options_of_workers
from preprocess.make.engines import Engine, can_be_cut, gigatoken_engine, tokenizers_engine
from preprocess.read import long_documents
from preprocess.read.documents import read_documents
from preprocess.read.format import DocumentBatch, Reading
from preprocess.read.long_documents import (
    CUT,
    MOST_UNCUT_CHARS,
    LongDocument,
    UncuttableText,
    encodable_pieces,
)
from shardprep.format.plan import ByteRange, need_plan

OPTIONS: list[dict[str, Any]] = [
    {"token_format": "json"},
    {"token_format": "npy", "keep_text": False, "append_eos": True},
    {"record": "packed", "seq_len": 64},
    {"record": "packed", "seq_len": 64, "pack": "best_fit"},
]


def write_long_lines(path: Path) -> None:
    """Long lines of every kind between short ones: padded with space, ended by CRLF and CR, undecodable."""
    rng = random.Random(3)
    korean = " ".join(
        rng.choices(["다리는", "겨울이", "오기", "전에", "문을", "닫는다.", "ㅋㅋ", "1234"], k=4000)
    )
    english = " ".join(rng.choices(["the", "bridge  ", "didn't", "open", "\tuntil", "9:30!", "é"], k=6000))
    path.write_bytes(
        b"short one\n"
        + f"  \u3000 {korean}  \t \r\n\n{english}\rtail\nbad ".encode()
        + b"\xff"
        + f"{english}\n{' ' * 30_000}\nx {korean}".encode()
    )


def make_with(prep: Any, folder: Path, patch: pytest.MonkeyPatch, long_bytes: int, block_bytes: int) -> None:
    patch.setattr(long_documents, "LONG_BYTES", long_bytes)
    patch.setattr(long_documents, "_READ_BYTES", block_bytes)
    patch.setattr(options_of_workers, "BATCH_BYTES", block_bytes)
    prep.make(folder)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_long_documents_give_the_bytes_of_held_ones(
    prep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    raw, folder = tmp_path / "raw", tmp_path / "data"
    raw.mkdir()
    write_long_lines(raw / "a.txt")
    prep.plan(raw, folder, max_bad_fraction=0.5, **options)
    with monkeypatch.context() as patch:
        make_with(prep, folder, patch, long_bytes=1 << 30, block_bytes=1 << 20)
    held = prep.contents(folder)
    counts = json.loads((folder / "shard-00000.json").read_bytes())["counts"]
    assert (counts["num_documents"], counts["num_empty_lines"]) == (5, 2)
    assert counts["quarantined"] == {"undecodable": 1}
    yielded = []
    original = LongDocument.text

    def counted(document: LongDocument) -> Iterator[str]:
        yielded.append(document.place.line)
        return original(document)

    for block_bytes in (1_000, 5_001, 20_000):
        with monkeypatch.context() as patch:
            patch.setattr(LongDocument, "text", counted)
            make_with(prep, folder, patch, long_bytes=20_000, block_bytes=block_bytes)
        assert prep.contents(folder) == held
    assert len(set(yielded)) >= 4, "the long lines went the long way"


def test_a_whole_file_goes_the_long_way_too(
    prep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, folder = tmp_path / "raw", tmp_path / "data"
    raw.mkdir()
    write_long_lines(raw / "bad.txt")
    text = (raw / "bad.txt").read_bytes().replace(b"\xff", b"")
    (raw / "good.txt").write_bytes(text)
    prep.plan(raw, folder, num_shards=1, doc="file", max_bad_fraction=0.5)
    with monkeypatch.context() as patch:
        make_with(prep, folder, patch, long_bytes=1 << 30, block_bytes=1 << 20)
    held = prep.contents(folder)
    with monkeypatch.context() as patch:
        make_with(prep, folder, patch, long_bytes=20_000, block_bytes=3_333)
    assert prep.contents(folder) == held
    (_, written), _ = prep.members(folder / "shard-00000.tar")
    assert written.decode() == text.decode().replace("\r\n", "\n").replace("\r", "\n").strip()


ADVERSARIAL = st.text(
    alphabet="ab S'sSſTtlL 0123가힣ㅋ漢字。、，！？）（「…かカกहअя"
    '\u0301\n\r\t .,;:!?"()+/=-|_<>#\u3000\u00a0é½Ⅷ🙂',
    max_size=14,
)


@pytest.mark.slow
@settings(max_examples=400)
@given(st.lists(ADVERSARIAL, max_size=10))
def test_pieces_encode_to_the_ids_of_the_whole(
    llama3_engines: list[Engine], small_engines: list[Engine], pieces: list[str]
) -> None:
    whole = "".join(pieces)
    for engine in [*llama3_engines, *small_engines]:
        found = engine.encode_long(iter(pieces), can_be_cut=True).tolist()
        assert found == engine.encode([whole]).ids.tolist()


@pytest.mark.slow
@settings(max_examples=400)
@given(st.lists(ADVERSARIAL, max_size=10))
def test_a_text_may_be_cut_at_every_place_that_is_taken_for_one(
    llama3_engines: list[Engine], pieces: list[str]
) -> None:
    whole = "".join(pieces)
    cuts = [0, *(match.end() - 1 for match in CUT.finditer(whole)), len(whole)]
    parts = [whole[begin:end] for begin, end in itertools.pairwise(cuts)]
    for engine in llama3_engines:
        assert engine.encode_bare(parts).ids.tolist() == engine.encode_bare([whole]).ids.tolist()


@pytest.fixture(scope="module")
def small_engines(prep_model: Path) -> list[Engine]:
    path = prep_model / "tokenizer.json"
    return [make(path, allow_special_tokens=False) for make in (gigatoken_engine, tokenizers_engine)]


@pytest.fixture(scope="module")
def llama3_engines(shared_dir: Path) -> list[Engine]:
    path = shared_dir / "tokenizers" / "llama3" / "tokenizer.json"
    assert can_be_cut(json.loads(path.read_bytes()))
    return [make(path, allow_special_tokens=False) for make in (gigatoken_engine, tokenizers_engine)]


def test_chinese_without_a_blank_is_encoded_in_small_pieces() -> None:
    text = "第一章，天地玄黄。宇宙洪荒！日月盈昃：辰宿列张\n" * 4000
    blocks = (text[start : start + 1000] for start in range(0, len(text), 1000))
    pieces = list(encodable_pieces(blocks, can_be_cut=True))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 1100


@pytest.mark.slow
@pytest.mark.parametrize("can_be_cut", [True, False])
def test_text_that_cannot_be_cut_is_refused_above_a_fixed_size_and_never_held(can_be_cut: bool) -> None:
    block, taken = "a" * (1 << 20), 0

    def blocks() -> Iterator[str]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield block

    with pytest.raises(UncuttableText):
        list(encodable_pieces(blocks(), can_be_cut=can_be_cut))
    assert taken == MOST_UNCUT_CHARS // len(block) + 1


@pytest.mark.parametrize("record", ["documents", "packed"])
def test_a_document_that_cannot_be_cut_is_left_out_with_its_reason(
    prep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    raw, folder = tmp_path / "raw", tmp_path / "data"
    raw.mkdir()
    (raw / "a.txt").write_bytes(b"first\n" + b"x" * 30_000 + b"\n" + b"fits, " * 6_000 + b"\n")
    prep.plan(raw, folder, record=record, max_bad_fraction=0.5)
    monkeypatch.setattr(long_documents, "MOST_UNCUT_CHARS", 20_000)
    with monkeypatch.context() as patch:
        make_with(prep, folder, patch, long_bytes=20_000, block_bytes=3_000)
    counts = json.loads((folder / "shard-00000.json").read_bytes())["counts"]
    assert (counts["num_documents"], counts["quarantined"]) == (2, {"uncuttable": 1})
    (bad,) = map(json.loads, (folder / "quarantine" / "shard-00000.jsonl").read_text().splitlines())
    assert (bad["source_offset"], bad["num_bytes"], bad["reason"]) == (6, 30_001, "uncuttable")
    assert "more than 20000 characters without a place where the tokenizer may be cut" in bad["detail"]


def test_short_lines_come_in_batches_bounded_by_their_number(tmp_path: Path) -> None:
    """Each of them is two headers and two blocks of a tar, however short it is."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\n" * 300_000)
    part = ByteRange(input_number=0, path=path, start=0, end=600_000)
    batches = list(read_documents([part], Reading(doc="line", encoding="utf-8", batch_bytes=512 << 10)))
    texts = [item.texts for item in batches if isinstance(item, DocumentBatch)]
    assert [text for batch in texts for text in batch] == ["a"] * 300_000
    assert max(map(len, texts)) <= 16_384
    starts = [int(byte) for item in batches for byte in item.input_offsets]  # type: ignore[union-attr]
    assert starts == list(range(0, 600_000, 2))
    assert sum(item.num_bytes for item in batches) == 600_000


@pytest.fixture(scope="module")
def prep_model(prep: Any) -> Path:
    return Path(prep.model_dir)


def test_pieces_are_cut_only_behind_a_letter_or_digit_and_before_space_or_punctuation() -> None:
    texts = ["one tw", "o 3 four", "five-.  si", "x 7% 8%", "漢字", "。文\n", "字"]
    pieces = list(encodable_pieces(iter(texts), can_be_cut=True))
    assert pieces == ["one", " two 3", " fourfive-.  six", " 7% 8%漢字。文", "\n字"]


def test_only_tokenizers_whose_ids_do_not_depend_on_more_are_cut(prep_model: Path) -> None:
    known = json.loads((prep_model / "tokenizer.json").read_bytes())
    assert can_be_cut(known)
    split, byte_level = known["pre_tokenizer"]["pretokenizers"]
    split = {**split, "pattern": {"Regex": "\\s"}}
    others: list[dict[str, Any]] = [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}},
        {"model": {**known["model"], "dropout": 0.1}},
        {"model": {"type": "Unigram"}},
        {"added_tokens": [{"content": "a b"}]},
        {"added_tokens": [{"content": "<x>", "lstrip": True}]},
        {"added_tokens": [{"content": "[a.b]"}]},
    ]
    assert not [other for other in others if can_be_cut({**known, **other})]


def test_a_tokenizer_that_cannot_be_cut_gets_the_document_whole(prep_model: Path) -> None:
    engine = tokenizers_engine(prep_model / "tokenizer.json", allow_special_tokens=False)
    ids = engine.encode_long(iter(["one tw", "o 3"]), can_be_cut=False)
    assert ids.tolist() == engine.encode(["one two 3"]).ids.tolist()


def test_the_plan_says_whether_its_tokenizer_can_be_cut(planned_dir: Path) -> None:
    assert need_plan(planned_dir).can_be_cut
