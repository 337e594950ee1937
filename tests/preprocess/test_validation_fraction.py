"""--validation_fraction: which documents are held out follows from their content alone.

The reader here shares no code with the product. tests/oracle packs both sides, and freezes their batches.
"""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests import chat_tokenizers
from tests.chat_sets import PLAIN, conversations, write_chats
from tests.world import EOS, World, save_tokenizer

FRACTION = 0.2
TEXTS = [
    f"document {number}: {' '.join(['the kettle sings'] * (number % 23))}".strip() for number in range(300)
]
CHATS = conversations(150)
RECORDS: dict[str, dict[str, Any]] = {
    "documents": {"append_eos": True, "token_format": "npy"},
    "packed": {"record": "packed", "seq_len": 32},
    "best_fit": {"record": "packed", "seq_len": 32, "pack": "best_fit"},
    "chat": {"record": "chat", "seq_len": 64},
}


def digest_of(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def digest_of_chat(chat: list[dict[str, Any]]) -> bytes:
    return digest_of(json.dumps(chat, ensure_ascii=False, sort_keys=True, separators=(",", ":")))


def is_held(digest: bytes) -> bool:
    return Fraction(int.from_bytes(digest[:8], "big"), 1 << 64) < Fraction(FRACTION)


def world_of(folder: Path, record: str) -> World:
    """Texts, or conversations, each third of which stands a second time, in another form."""
    world = World(folder, tokenizer=save_tokenizer(folder / "model", PLAIN))
    if record == "chat":
        write_chats(world.raw_dir, CHATS)
        turned = [[{"name": None, **dict(reversed(turn.items()))} for turn in chat] for chat in CHATS[::3]]
        return world.raw({"again.jsonl": [{"messages": chat} for chat in turned]})
    lines = {"a.txt": TEXTS, "b.txt": [f"  {text}\n" for text in TEXTS[::3]]}
    return world.raw({name: "".join(f"{text}\n" for text in texts) for name, texts in lines.items()})


def digests(world: World) -> tuple[list[bytes], list[bytes]]:
    """The digests that the files of a data set hold, of training and of validation."""
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    paths = sorted((world.data_dir / "digests").iterdir())
    for manifest, path in zip(world.manifests(), paths, strict=True):
        raw = path.read_bytes()
        found = [raw[place : place + 16] for place in range(0, len(raw), 16)]
        cut = len(found) - manifest["counts"]["validation"]["num_documents"]
        sides[0].extend(found[:cut])
        sides[1].extend(found[cut:])
    return sides


def ids_of(world: World, split: str) -> list[int]:
    """All ids of a side, in the order of the shards."""
    with world.loader(batch_size=1, split=split, shuffle=False) as loader:
        batches = [batch["input_ids"][batch["attention_mask"].bool()].tolist() for batch in loader]
    return [token for ids in batches for token in ids]


@pytest.mark.processes
@pytest.mark.parametrize("record", RECORDS)
def test_the_same_documents_are_held_out_whatever_shards_tokenizer_and_record(
    tmp_path: Path, record: str
) -> None:
    world = world_of(tmp_path, record)
    of_texts = [digest_of(text) for text in [*TEXTS, *TEXTS[::3]]]
    of_chats = [digest_of_chat(chat) for chat in [*CHATS[::3], *CHATS]]  # again.jsonl is the first file
    expected = of_chats if record == "chat" else of_texts
    assert 20 < len({digest for digest in expected if is_held(digest)}) < len(set(expected)) / 2
    models = [world.tokenizer, world.tokenizer]
    if record != "chat":
        models[1] = chat_tokenizers.save_tokenizer("bytes", tmp_path / "bytes")
    for num_shards, model in zip((4, 60), models, strict=True):
        made = World(tmp_path / str(num_shards), raw_dir=world.raw_dir, tokenizer=model)
        made.make(num_shards=num_shards, validation_fraction=FRACTION, **RECORDS[record])
        train, held = digests(made)
        for found, is_validation in ((train, False), (held, True)):
            wanted = [digest for digest in expected if is_held(digest) == is_validation]
            if record == "best_fit":
                assert sorted(found) == sorted(wanted)
            else:
                assert found == wanted, "they stand in the order of the input"
        assert not set(train) & set(held)
        if record in ("documents", "packed"):
            tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
            end = tokenizer.token_to_id(EOS if model == world.tokenizer else chat_tokenizers.EOT)
            for split, is_validation in (("train", False), ("validation", True)):
                texts = [text for text in [*TEXTS, *TEXTS[::3]] if is_held(digest_of(text)) == is_validation]
                ids = [token for text in texts for token in [*tokenizer.encode(text).ids, end]]
                assert ids_of(made, split) == ids


@pytest.mark.parametrize("record", ["documents", "packed", "best_fit"])
def test_digests_change_no_sample_and_without_the_options_none_are_kept(tmp_path: Path, record: str) -> None:
    raw = world_of(tmp_path, record).raw_dir
    plain = World(tmp_path / "plain", raw_dir=raw).make(**RECORDS[record])
    assert not (plain.data_dir / "digests").exists()
    assert {(each["digests"], each["counts"]["validation"]) for each in plain.manifests()} == {(None, None)}
    kept = World(tmp_path / "kept", raw_dir=raw).make(digests=True, **RECORDS[record])
    assert kept.members() == plain.members()
    sizes = [path.stat().st_size for path in (kept.data_dir / "digests").iterdir()]
    assert sum(sizes) == 16 * (len(TEXTS) + len(TEXTS[::3]))


@pytest.mark.slow
@pytest.mark.parametrize("record", ["documents", "packed"])
def test_the_loader_export_and_peek_give_the_planned_sides_on_every_world(
    tmp_path: Path, record: str
) -> None:
    world = world_of(tmp_path, record)
    world.make(num_shards=3, validation_fraction=FRACTION, **RECORDS[record])
    held = sum(manifest["counts"]["validation"]["num_samples"] for manifest in world.manifests())
    for split in ("train", "validation"):
        num_steps = 5
        by_world = [
            world.batches(num_steps, world_size=size, global_batch_size=6, split=split) for size in (1, 2, 3)
        ]
        assert by_world[1] == by_world[2] == by_world[0]
        every = ids_of(world, split)
        if record == "documents":
            with world.loader(batch_size=1, split=split, shuffle=False, seq_len=16) as loader:
                rows = [token for batch in loader for token in batch["input_ids"][0].tolist()]
            assert rows[: len(every) // 16 * 16] == every[: len(every) // 16 * 16]
        out = tmp_path / split
        ended = world.main("export", world.data_dir, to="nanogpt", split=split, output_dir=out)
        assert ended.code == 0, ended.text
        assert np.fromfile(out / "train.bin", "<u2").tolist() == every
    shown = world.main("peek", world.data_dir, num=10**6).out
    assert shown.count(", for validation, ") == held
    copy = world.copy(tmp_path / "copy", but=["index.json"])
    assert ids_of(copy, "validation") == ids_of(world, "validation")
