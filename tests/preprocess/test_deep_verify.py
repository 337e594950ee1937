"""``verify --deep``: shards made anew from the input are compared, whatever agrees with itself."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from preprocess import deep_verify, worker
from preprocess.engines import TokenBatch, tokenizers_engine
from preprocess.formats.format import DocumentBatch
from preprocess.plan import need_plan
from preprocess.shard_samples import ShardSamples
from shardprep.errors import BrokenShard

if TYPE_CHECKING:
    from tests.conftest import Prep

FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy"},
    "packed": {"record": "packed", "seq_len": 64},
    "best_fit": {"record": "packed", "seq_len": 64, "pack": "best_fit"},
}


@pytest.fixture(scope="module")
def folders(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = prep.make_forms(sample_dir, tmp_path_factory.mktemp("data"), FORMS, num_shards=3)
    return {name: root / name for name in FORMS}


@pytest.mark.parametrize("name", FORMS)
def test_right_shards_are_equal_and_the_reference_and_webdataset_agree(
    prep: Prep, folders: dict[str, Path], name: str
) -> None:
    before = prep.contents(folders[name])
    ended = prep.command("verify", folders[name], "--deep", 2)
    assert ended.code == 0, ended.text
    assert "2 shards (" in ended.text
    assert (
        "made anew from the input are equal, byte for byte; the reference engine gave the ids of "
        in ended.text
    )
    assert "webdataset reads the same from their tars" in ended.text
    assert " of 0 documents" not in ended.text
    assert prep.contents(folders[name]) == before


@pytest.mark.slow
def test_a_shard_of_another_text_whose_hashes_agree_is_found(
    prep: Prep, folders: dict[str, Path], sample_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the worker had lost a document, and told a manifest that agrees with what it wrote."""
    data = Path(shutil.copytree(folders["json"], tmp_path / "data"))
    (data / "shard-00001.json").unlink()
    original = worker.Worker._encode

    def another(self: worker.Worker, documents: DocumentBatch) -> TokenBatch:
        texts = [documents.texts[0][::-1], *documents.texts[1:]]
        return original(self, dataclasses.replace(documents, texts=texts))

    with monkeypatch.context() as patch:
        patch.setattr(worker.Worker, "_encode", another)
        prep.make(data, 1)
    assert prep.command("verify", data).code == 0, "the hashes agree"
    ended = prep.command("verify", data, "--deep", 3)
    assert ended.code == 65
    assert "error: shard 00001: shard 00001 made anew from its input differs: " in ended.text
    assert "its tar has another content" in ended.text
    assert "&& python -m preprocess --shard_id 1" in ended.text
    assert "shard 00000:" not in ended.text


def test_an_engine_whose_ids_are_not_the_references_is_found(
    prep: Prep, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tokenizers_engine

    def other(*args: Any, **options: Any) -> Any:
        engine = original(*args, **options)

        def shifted(texts: Sequence[str]) -> TokenBatch:
            tokens = engine.encode(texts)
            return TokenBatch(ids=tokens.ids + 1, offsets=tokens.offsets)

        return dataclasses.replace(engine, encode=shifted)

    monkeypatch.setattr("preprocess.deep_verify.tokenizers_engine", other)
    ended = prep.command("verify", folders["json"], "--deep", 1)
    assert ended.code == 65
    assert "gives other ids than the reference for " in ended.text


def test_a_tar_of_which_webdataset_reads_other_ids_is_found(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = need_plan(folders["npy"])
    deep_verify._read_by_webdataset(folders["npy"], plan, 0)
    original = ShardSamples.ids
    monkeypatch.setattr(ShardSamples, "ids", lambda self, number: original(self, number)[::-1])
    with pytest.raises(BrokenShard, match="webdataset reads another sample 0 from "):
        deep_verify._read_by_webdataset(folders["npy"], plan, 0)


@pytest.mark.slow
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
    assert prep.command("verify", tmp_path / "data", "--deep", "0").code == 2
