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

from preprocess import documents, line_blocks, long_documents, worker_settings
from preprocess.cuttable_tokenizers import can_be_cut
from preprocess.long_documents import LongDocument, recut
from preprocess.shard_plan import need_plan
from preprocess.token_batches import fastokens_engine, tokenizers_engine

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
    for module in (documents, line_blocks, long_documents):
        patch.setattr(module, "LONG_BYTES", long_bytes)
    patch.setattr(line_blocks, "_SCAN_BYTES", block_bytes)
    patch.setattr(long_documents, "_READ_BYTES", block_bytes)
    patch.setattr(worker_settings, "BATCH_BYTES", block_bytes)
    prep.make(folder)


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
    assert (counts["num_documents"], counts["num_empty_lines"], counts["quarantined"]) == (
        5,
        2,
        {"undecodable": 1},
    )
    yielded = []
    original = LongDocument.text

    def counted(document: LongDocument) -> Iterator[str]:
        yielded.append(document.line)
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


@settings(deadline=None, max_examples=150)
@given(st.lists(st.text(alphabet="ab 가나1'\n\t.é\u3000!s", max_size=12), max_size=12))
def test_pieces_encode_to_the_ids_of_the_whole(prep_model: Path, pieces: list[str]) -> None:
    whole = "".join(pieces)
    for make in (fastokens_engine, tokenizers_engine):
        engine = make(prep_model / "tokenizer.json", allow_special_tokens=False)
        found = [int(i) for ids in engine.encode_pieces(iter(pieces), can_be_cut=True) for i in ids]
        assert found == engine.encode([whole]).ids.tolist()


@pytest.fixture(scope="module")
def prep_model(prep: Any) -> Path:
    return Path(prep.model_dir)


def test_pieces_are_cut_between_a_letter_and_a_space_only() -> None:
    pieces = list(recut(iter(["one tw", "o 3 four", "five.  si", "x 7 8"])))
    assert "".join(pieces) == "one two 3 fourfive.  six 7 8"
    assert len(pieces) == 4
    for before, after in itertools.pairwise(pieces):
        assert before[-1].isalpha()
        assert after[0] == " "


def test_only_tokenizers_whose_ids_do_not_depend_on_more_are_cut(prep_model: Path) -> None:
    known = json.loads((prep_model / "tokenizer.json").read_bytes())
    assert can_be_cut(known)
    split, byte_level = known["pre_tokenizer"]["pretokenizers"]
    split = {**split, "pattern": {"Regex": "\\s"}}
    others: list[dict[str, Any]] = [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [split, byte_level],
            }
        },
        {"model": {**known["model"], "dropout": 0.1}},
        {"model": {"type": "Unigram"}},
        {"added_tokens": [{"content": "a b"}]},
        {"added_tokens": [{"content": "<x>", "lstrip": True}]},
    ]
    assert not [other for other in others if can_be_cut({**known, **other})]


def test_a_tokenizer_that_cannot_be_cut_gets_the_document_whole(prep_model: Path) -> None:
    engine = tokenizers_engine(prep_model / "tokenizer.json", allow_special_tokens=False)
    pieces = list(engine.encode_pieces(iter(["one tw", "o 3"]), can_be_cut=False))
    assert [ids.tolist() for ids in pieces] == [engine.encode(["one two 3"]).ids.tolist()]


def test_the_plan_says_whether_its_tokenizer_can_be_cut(planned_dir: Path) -> None:
    assert need_plan(planned_dir).can_be_cut
