"""``verify --deep``: shards made again find what agrees with itself, but not with the input."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from preprocess.make import worker
from preprocess.make.engines import Engine, TokenBatch, tokenizers_engine
from preprocess.read import documents
from preprocess.read.documents import Documents
from tests.chat_sets import TAGGED, chat_model, conversations, write_chats

if TYPE_CHECKING:
    from tests.conftest import Prep

FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "keep_text": False, "digests": True},
    "packed": {"record": "packed", "seq_len": 64},
    "best_fit": {"record": "packed", "seq_len": 64, "pack": "best_fit"},
}


@pytest.fixture(scope="module")
def folders(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = prep.make_forms(sample_dir, tmp_path_factory.mktemp("data"), FORMS, num_shards=3)
    return {name: root / name for name in FORMS}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", FORMS)
def test_right_shards_are_equal_and_nothing_is_written(
    prep: Prep, folders: dict[str, Path], name: str
) -> None:
    assert prep.command("verify", folders[name]).code == 0
    before = contents(folders[name])
    ended = prep.command("verify", folders[name], "--deep", 3)
    assert ended.code == 0, ended.text
    assert "3 shards (0-2), byte for byte" in ended.text
    assert contents(folders[name]) == before


def test_so_many_shards_are_made_again_as_are_asked_for_and_the_same_ones_each_time(
    prep: Prep, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    original = worker.Worker.make_into
    monkeypatch.setattr(
        worker.Worker,
        "make_into",
        lambda self, folder, shard: made.append(shard.shard_id) or original(self, folder, shard),
    )
    for _ in range(2):
        assert prep.command("verify", folders["npy"], "--deep", 2).code == 0
    assert len({*made}) == 2
    assert made[:2] == made[2:]
    assert prep.command("verify", folders["npy"], "--deep", "0").code == 2


def lose(batch: Documents) -> Documents:
    return batch.only(np.delete(np.arange(len(batch.texts)), [3, 5]))


def alter(batch: Documents) -> Documents:
    return dataclasses.replace(batch, texts=[*batch.texts[:4], batch.texts[4][::-1], *batch.texts[5:]])


def misname(batch: Documents) -> Documents:
    ids = batch.columns["id"]
    return dataclasses.replace(batch, columns={"id": [*ids[:4], "another", *ids[5:]]})


def miscount(batch: Documents) -> Documents:
    return dataclasses.replace(batch, num_lines=batch.num_lines + 1)


ERRORS: dict[str, tuple[Callable[[Documents], Documents], str]] = {
    "lost": (lose, "num_documents is 28, expected 30"),
    "altered": (alter, "shard-00000.tar has another sha256"),
    "misnamed": (misname, "its input: ids/shard-00000.jsonl has another sha256; run:"),
    "miscounted": (miscount, "num_lines is 31, expected 30"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_what_was_read_wrongly_when_a_shard_was_made_is_found_though_all_hashes_agree(
    prep: Prep, tmp_path: Path, raw: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    data = tmp_path / "data"
    lines = [json.dumps({"id": f"id {n}", "text": f"line {n} of a file"}) for n in range(30)]
    (raw / "a.jsonl").write_text("\n".join([*lines, ""]))
    prep.plan(raw, data, num_shards=1, id_field="id")
    change, words = ERRORS[error]
    original = documents.read_documents

    def erring(*args: Any, **settings: Any) -> Iterator[Any]:
        for item in original(*args, **settings):
            yield change(item)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "read_documents", erring)
        prep.make(data)
    assert prep.command("verify", data).code == 0, "the hashes agree"
    ended = prep.command("verify", data, "--deep", 1)
    assert ended.code == 65, ended.text
    assert words in ended.text
    assert "&& shardprep --shard_id 0" in ended.text
    assert prep.command("verify", data).code == 65, "it stands until the shard is made anew"
    assert prep.command("--shard_id", 0, "--output_dir", data).code == 0
    assert prep.command("verify", data, "--deep", 1).code == 0


def test_ids_that_are_not_the_references_are_found(
    prep: Prep, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Path(shutil.copytree(folders["packed"], tmp_path / "data"))
    (data / "shard-00001.json").unlink()
    original = Engine.encode_documents

    def erring(self: Engine, batch: Documents, **settings: Any) -> TokenBatch:
        tokens = original(self, batch, **settings)
        ids = tokens.ids.copy()
        ids[1000] += 1
        return TokenBatch(ids=ids, offsets=tokens.offsets)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "encode_documents", erring)
        prep.make(data, 1)
    assert prep.command("verify", data).code == 0
    ended = prep.command("verify", data, "--deep", 3)
    assert ended.code == 65, ended.text
    assert "error: shard 00001: it is not what the reference engine makes" in ended.text
    assert "shard-00001.tar has another sha256" in ended.text
    assert "shard 00000:" not in ended.text
    assert not [path.name for path in data.iterdir() if path.name.startswith(".")]


@pytest.mark.processes
def test_conversations_are_made_again_with_what_was_left_out(prep: Prep, tmp_path: Path) -> None:
    model = chat_model(prep.model_dir, tmp_path / "model", TAGGED)
    raw, data = write_chats(tmp_path / "raw", conversations(40)), tmp_path / "data"
    with (raw / "chats.jsonl").open("a") as file:
        file.write('{"messages": []}\n{"messages": [{"role": "elf", "content": ""}]}\n{"messages": 1}\n\n')
    settings: dict[str, Any] = {"record": "chat", "seq_len": 64, "model_id": str(model)}
    prep.plan(raw, data, num_shards=2, id_field="id", max_bad_fraction=0.5, **settings)
    prep.make(data)
    ended = prep.command("verify", data, "--deep", 2)
    assert ended.code == 0, ended.text


def test_an_engine_of_another_version_that_gives_other_ids_is_refused(
    prep: Prep, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tokenizers_engine

    def other(*args: Any, **options: Any) -> Any:
        engine = original(*args, **options)

        def shifted(texts: Sequence[bytes]) -> TokenBatch:
            tokens = engine.encode(texts)
            return TokenBatch(ids=tokens.ids + 1, offsets=tokens.offsets)

        return dataclasses.replace(engine, encode=shifted)

    monkeypatch.setattr("preprocess.make.worker.tokenizers_engine", other)
    ended = prep.command("verify", folders["json"], "--deep", 1)
    assert ended.code == 78
    assert "encodes the plan's probe to other ids than at planning" in ended.text


def test_an_input_that_moved_is_named_and_one_that_is_gone_is_66(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    raw = Path(shutil.copytree(sample_dir, tmp_path / "raw"))
    prep.plan(raw, tmp_path / "data", num_shards=2)
    prep.make(tmp_path / "data")
    raw.rename(tmp_path / "moved")
    gone = prep.command("verify", tmp_path / "data", "--deep")
    assert (gone.code, "if the raw folder moved, pass --input_dir" in gone.text) == (66, True)
    there = prep.command("verify", tmp_path / "data", "--deep", "--input_dir", tmp_path / "moved")
    assert there.code == 0, there.text
    path = next((tmp_path / "moved").iterdir())
    path.write_bytes(path.read_bytes() + b"more\n")
    changed = prep.command("verify", tmp_path / "data", "--deep", "--input_dir", tmp_path / "moved")
    assert changed.code == 78
    assert f"input {path} changed since it was planned" in changed.text
