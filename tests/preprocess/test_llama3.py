"""The ids of the corpora, through plan, run and verify, are transformers' with the Llama 3 tokenizer.

By itself each eighth line of them; ``LLAMA3_LINES=all`` (``make torture``) takes all.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from shardprep.format.idx import read_idx
from shardprep.format.names import tar_path
from shardprep.format.plan import need_plan

if TYPE_CHECKING:
    from tests.conftest import Prep

NUM_SHARDS = 12
EACH = 1 if os.environ.get("LLAMA3_LINES") == "all" else 20
NUM_DOCUMENTS = {1: 225_131, 20: 11258}[EACH]
BATCH = 2_000


@pytest.fixture(scope="module")
def llama3_dir(shared_dir: Path) -> Path:
    return shared_dir / "tokenizers" / "llama3"


@pytest.fixture(scope="module")
def raw_dir(corpora_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lines of both corpora that are taken."""
    folder = tmp_path_factory.mktemp("raw")
    for path in corpora_dir.iterdir():
        with path.open("rb") as file:
            (folder / path.name).write_bytes(b"".join(itertools.islice(file, 0, None, EACH)))
    return folder


@pytest.fixture(scope="module")
def data_dir(prep: Prep, llama3_dir: Path, raw_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Them as 12 shards without text, by the three commands."""
    folder = tmp_path_factory.mktemp("llama3") / "data"
    for command in (
        ["plan", "--input_dir", raw_dir, "--output_dir", folder, "--model_id", llama3_dir,
         "--num_shards", NUM_SHARDS, "--no-keep_text"],
        ["run", folder],
        ["verify", folder],
    ):  # fmt: skip
        ended = prep.cli(*command)
        assert ended.code == 0, ended.text
    return folder


def documents_of(corpora: Path) -> Iterator[str]:
    for path in sorted(corpora.iterdir()):
        with path.open(encoding="utf-8") as file:
            yield from filter(None, map(str.strip, file))


def written_ids(folder: Path) -> Iterator[list[int]]:
    """All ids in order, found by the idx: tarfile would take 10 s for as many members."""
    plan = need_plan(folder)
    for shard_id in range(plan.num_shards):
        raw = tar_path(folder, shard_id).read_bytes()
        for entry in read_idx(folder, plan.spec, shard_id)[["offset", "num_bytes"]].tolist():
            yield json.loads(raw[entry[0] : sum(entry)])


@pytest.mark.processes
def test_every_document_has_the_ids_of_transformers_encode(
    data_dir: Path, llama3_dir: Path, raw_dir: Path
) -> None:
    """``encode`` one by one would take minutes: it is asked for each 100th document, and for all the same
    tokenizer's batched call, ``tokenizer(texts, add_special_tokens=True)``, which is shown to be equal there.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(llama3_dir)
    written = written_ids(data_dir)
    texts: list[str] = []
    num_documents = num_encoded = 0

    def compare() -> None:
        nonlocal num_documents, num_encoded
        batch = tokenizer(texts, add_special_tokens=True, return_attention_mask=False)["input_ids"]
        for position, (text, ids) in enumerate(zip(texts, batch, strict=True)):
            if position % 100 == 0:
                assert ids == tokenizer.encode(text, add_special_tokens=True)
                num_encoded += 1
            assert next(written) == ids, text
        num_documents += len(texts)
        texts.clear()

    for text in documents_of(raw_dir):
        assert "<|" not in text, "a control token's name would be encoded otherwise"
        texts.append(text)
        if len(texts) == BATCH:
            compare()
    compare()
    assert num_documents == NUM_DOCUMENTS
    assert num_encoded > 100
    assert next(written, None) is None


@pytest.mark.processes
def test_the_shards_are_even_and_their_index_counts_all_documents(data_dir: Path) -> None:
    index = json.loads((data_dir / "index.json").read_bytes())
    column = index["columns"].index("num_documents")
    assert len(index["shards"]) == NUM_SHARDS
    assert sum(row[column] for row in index["shards"]) == NUM_DOCUMENTS
    manifests = [json.loads(path.read_bytes()) for path in sorted(data_dir.glob("shard-*.json"))]
    sizes = [item["counts"]["input_bytes"] for item in manifests]
    assert max(sizes) - min(sizes) < 20_000, "two lines of the longest"
    assert {item["run"]["engine"].split()[0] for item in manifests} == {"gigatoken"}
