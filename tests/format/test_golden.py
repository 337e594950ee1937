"""tests/data/golden pins the bytes on disk: changing them needs a new version of the format.

``python -m tests.format.test_golden`` regenerates that folder; its README says when that is right.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from tokenizers import Tokenizer, models

from tests.checkout import ROOT
from tests.forged import rewrite_plan
from tests.world import World

GOLDEN = ROOT / "tests" / "data" / "golden"
DATA_SETS: dict[str, dict[str, Any]] = {
    "documents_json": {},
    "documents_npy": {"token_format": "npy", "keep_text": False, "append_eos": True},
    "packed": {"record": "packed", "seq_len": 16},
    "packed_best_fit": {"record": "packed", "seq_len": 16, "pack": "best_fit"},
    "jsonl_zst": {"id_field": "id", "append_eos": True},
    "parquet": {"record": "packed", "seq_len": 16, "text_template": "{title}\\n{text}"},
}
# The inputs are kept, because another version of zstd or pyarrow writes other bytes.
OTHER_RAW = {"jsonl_zst": "raw_jsonl_zst", "parquet": "raw_parquet"}


def golden(name: str, data_dir: Path | None = None) -> World:
    """Return a world with a golden input and tokenizer, by default with the golden data set, too."""
    raw_dir = GOLDEN / OTHER_RAW.get(name, "raw")
    return World(GOLDEN, tokenizer=GOLDEN / "tokenizer", raw_dir=raw_dir, data_dir=data_dir or GOLDEN / name)


def make(world: World, name: str) -> World:
    return world.make(num_shards=2, max_bad_fraction=0.5, model_id="tokenizer", **DATA_SETS[name])


@pytest.mark.parametrize("name", DATA_SETS)
def test_commands_write_the_golden_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(GOLDEN)  # the plan has the relative path of the tokenizer
    world, pinned = make(golden(name, tmp_path), name), golden(name)
    assert world.plan_json()["plan_id"] == pinned.plan_json()["plan_id"]
    assert world.contents() == pinned.contents()
    assert (tmp_path / "index.json").read_bytes() == (GOLDEN / name / "index.json").read_bytes()


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_golden_data_set_can_be_verified_and_loaded(tmp_path: Path, name: str) -> None:
    """Commit 522a712 or an earlier one wrote it."""
    shutil.copytree(GOLDEN / name, tmp_path / "data")
    shutil.copytree(GOLDEN / "tokenizer", tmp_path / "data" / "tokenizer")
    world = golden(name, tmp_path / "data")
    world.verify(deep=True, input_dir=world.raw_dir)
    num_tokens = sum(manifest["counts"]["num_tokens"] for manifest in world.manifests())
    with world.loader(batch_size=1, pin_memory=False) as loader:
        assert sum(int(batch["attention_mask"].sum()) for batch in loader) == num_tokens


@pytest.mark.parametrize("name", DATA_SETS)
def test_webdataset_reads_the_tars_without_shardprep(name: str) -> None:
    world, is_packed = golden(name), "record" in DATA_SETS[name]
    paths = sorted(map(str, world.data_dir.glob("shard-*.tar")))
    samples = list(webdataset.WebDataset(paths, shardshuffle=False).decode())
    ids = [value for sample in samples for key, value in sample.items() if key.startswith("token_ids.")]
    of = "num_samples" if is_packed else "num_tokens"
    assert sum(map(len, ids)) == sum(manifest["counts"][of] for manifest in world.manifests())
    assert all(("doc_starts.npy" in sample) == is_packed for sample in samples)
    if name == "documents_json":
        assert [list(each) for each in ids] == [ids for _, _, ids in world.documents()]


@pytest.mark.parametrize(("num_ids", "num_bytes"), [(65_535, 2), (65_536, 4)])
def test_ids_take_two_bytes_if_65535_can_mark_blanks(tmp_path: Path, num_ids: int, num_bytes: int) -> None:
    vocab = {"a": 0, "b": num_ids - 1}
    Tokenizer(models.WordLevel(vocab, "a")).save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    world = World(tmp_path, tokenizer=tmp_path).raw({"a.txt": "b\n"})
    world.plan(num_shards=1, token_format="npy").run()
    (ids,) = (np.load(io.BytesIO(data)) for name, data in world.members() if name.endswith(".npy"))
    assert (ids.tolist(), ids.dtype.itemsize) == ([num_ids - 1], num_bytes)


def make_golden() -> None:
    """Regenerate everything except the inputs, without paths and times of this machine."""
    for path in GOLDEN.iterdir():
        if path.is_dir() and not path.name.startswith("raw"):
            shutil.rmtree(path)
    os.chdir(GOLDEN)
    for path in GOLDEN.glob("raw*/*"):
        os.utime(path, ns=(0, 0))
    words = {"input_dir": "raw", "vocab_size": 270, "output_dir": "tokenizer"}
    World(GOLDEN).main("train_tokenizer", **words).ends(0)
    for name in DATA_SETS:
        world = make(golden(name), name)
        rewrite_plan(world.data_dir / "plan.json", json.dumps(str(world.raw_dir)), '"/raw"')
        for path in world.data_dir.glob("shard-*.json"):
            text = path.read_text(encoding="utf-8").partition('\n "run": ')[0]
            empty = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # sha256 of {}
            path.write_text(f'{text}\n "run": {{\n  "run_sha256": "{empty}"\n }}\n}}\n', encoding="utf-8")
        shutil.rmtree(world.data_dir / "tokenizer")
        shutil.rmtree(world.data_dir / "jobs", ignore_errors=True)


if __name__ == "__main__":
    make_golden()
