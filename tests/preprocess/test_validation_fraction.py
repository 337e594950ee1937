"""--validation_fraction: which documents are held out follows from their content alone.

The reader here shares no code with the product. tests/oracle packs both sides, and freezes their batches.
"""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

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


@pytest.mark.processes
@pytest.mark.parametrize("record", RECORDS)
def test_the_same_documents_are_held_out_whatever_the_shards(tmp_path: Path, record: str) -> None:
    world = world_of(tmp_path, record)
    of_texts = [digest_of(text) for text in [*TEXTS, *TEXTS[::3]]]
    of_chats = [digest_of_chat(chat) for chat in [*CHATS[::3], *CHATS]]  # again.jsonl is the first file
    expected = of_chats if record == "chat" else of_texts
    assert 20 < len({digest for digest in expected if is_held(digest)}) < len(set(expected)) / 2
    models = [world.tokenizer, world.tokenizer]
    if record != "chat":
        models[1] = chat_tokenizers.save_tokenizer("bytes", tmp_path / "bytes")
    for num_shards, model in zip((4, 30), models, strict=True):
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
        if record == "packed":
            tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
            end = tokenizer.token_to_id(EOS if model == world.tokenizer else chat_tokenizers.EOT)
            texts = [text for text in [*TEXTS, *TEXTS[::3]] if is_held(digest_of(text))]
            ids = [token for text in texts for token in [*tokenizer.encode(text).ids, end]]
            with made.loader(batch_size=1, split="validation", shuffle=False) as loader:
                rows = [batch["input_ids"][batch["attention_mask"].bool()].tolist() for batch in loader]
            assert [token for row in rows for token in row] == ids


def test_digests_change_no_sample_and_without_the_options_none_are_kept(tmp_path: Path) -> None:
    raw = world_of(tmp_path, "best_fit").raw_dir
    plain = World(tmp_path / "plain", raw_dir=raw).make(**RECORDS["best_fit"])
    assert not (plain.data_dir / "digests").exists()
    assert {(each["digests"], each["counts"]["validation"]) for each in plain.manifests()} == {(None, None)}
    kept = World(tmp_path / "kept", raw_dir=raw).make(digests=True, **RECORDS["best_fit"])
    assert kept.members() == plain.members()
    sizes = [path.stat().st_size for path in (kept.data_dir / "digests").iterdir()]
    assert sum(sizes) == 16 * (len(TEXTS) + len(TEXTS[::3]))
