"""The members of tars: equal to tarfile's and numpy's bytes, and read by webdataset."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from tests.world import World, hostile_text

FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "keep_text": False, "append_eos": True},
    "packed": {"record": "packed", "seq_len": 64},
}


@pytest.mark.parametrize("form", FORMS)
def test_headers_of_members_are_those_of_tarfile_and_numpy_and_webdataset_reads_them(
    tmp_path: Path, form: str
) -> None:
    world = World(tmp_path).raw({"a.txt": hostile_text(300), "b.txt": "\n \r\n\n"}).make(**FORMS[form])
    for path in sorted(world.data_dir.glob("shard-*.tar")):
        raw = path.read_bytes()
        with tarfile.open(path) as tar:
            for item in tar:
                plain = tarfile.TarInfo(item.name)
                plain.size = item.size
                assert raw[item.offset : item.offset + 512] == plain.tobuf(tarfile.USTAR_FORMAT)
                if item.name.endswith(".npy"):
                    data = raw[item.offset_data : item.offset_data + item.size]
                    again = io.BytesIO()
                    np.save(again, np.load(io.BytesIO(data)))
                    assert data == again.getvalue()
    paths = [str(path) for path in sorted(world.data_dir.glob("shard-*.tar"))]
    samples = list(webdataset.WebDataset(paths, shardshuffle=False).decode())
    ids = [sample["token_ids.json" if form == "json" else "token_ids.npy"] for sample in samples]
    of = "num_samples" if form == "packed" else "num_tokens"
    assert sum(map(len, ids)) == sum(manifest["counts"][of] for manifest in world.manifests())
    assert all(("doc_starts.npy" in sample) == (form == "packed") for sample in samples)
    if form == "json":
        assert [list(each) for each in ids] == [ids for _, _, ids in world.documents()]


@pytest.mark.parametrize(("num_ids", "num_bytes"), [(65_535, 2), (65_536, 4)])
def test_ids_take_two_bytes_below_65536_tokens_as_one_number_means_blank(
    tmp_path: Path, num_ids: int, num_bytes: int
) -> None:
    from tokenizers import Tokenizer, models

    vocab = {"a": 0, "b": num_ids - 1}
    Tokenizer(models.WordLevel(vocab, "a")).save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    world = World(tmp_path, tokenizer=tmp_path).raw({"a.txt": "b\n"})
    world.plan(num_shards=1, token_format="npy").run()
    (ids,) = (np.load(io.BytesIO(data)) for name, data in world.members() if name.endswith(".npy"))
    assert (ids.tolist(), ids.dtype.itemsize) == ([num_ids - 1], num_bytes)
