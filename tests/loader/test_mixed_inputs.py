"""Files of all formats side by side: each command that names a document means the same one.

Each document is one word again and again, so that whatever is printed or loaded of it tells which one it is.
``MIXED=all``, as ``make torture`` has it, tries more folders.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from pyarrow import ipc

from tests.word_tokenizers import save_word_tokenizer
from tests.world import World, call_main, open_loader

NUM_WORDS = 160
FORMS: list[dict[str, Any]] = [
    {},
    {"token_format": "npy", "keep_text": False},
    {"record": "packed", "seq_len": 32},
    {"record": "packed", "seq_len": 32, "pack": "best_fit"},
]
SUFFIXES = ("txt", "txt.gz", "txt.xz", "jsonl", "jsonl.gz", "jsonl.bz2", "jsonl.zst", "parquet", "arrow")
COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
}  # fmt: skip
NUM_CASES = 150 if os.environ.get("MIXED") == "all" else 4


def write_inputs(raw: Path, chance: random.Random, *, has_labels: bool) -> list[dict[str, Any]]:
    """Write documents in files of random formats, beside lines that hold none; document n is of word n."""
    found: list[dict[str, Any]] = []
    for number in range(chance.randrange(1, 8)):
        suffix, folder = chance.choice(SUFFIXES), chance.choice(["web", "books"])
        is_text, first = suffix.startswith("txt"), len(found)
        for word in range(first, min(first + chance.randrange(1, 40), NUM_WORDS)):
            text = " ".join([f"w{word}"] * chance.choice([1, 2, 5, 30, 100]))
            label = chance.choice(["news", "forum"]) if has_labels and not is_text else folder
            found.append({"text": text, "id": None if is_text else f"id{word}", "label": label})
        path = raw / folder / f"{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_input(path, found[first:], chance)
    return found


def write_input(path: Path, records: list[dict[str, Any]], chance: random.Random) -> None:
    kind, _, compression = path.name.partition(".")[2].partition(".")
    if kind in ("parquet", "arrow"):
        none = {"text": None, "id": "none", "label": "news"}
        place = chance.randrange(len(records) + 1)
        table = pa.Table.from_pylist([*records[:place], none, *records[place:]])
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=chance.choice([1, 5, 1000]))
        else:
            new = chance.choice([ipc.new_file, ipc.new_stream])
            with new(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=chance.choice([1, 4, 1000]))
        return
    lines = []
    for record in records:
        lines.append(f" {record['text']} " if kind == "txt" else json.dumps(record))
        lines += chance.choice([[], [], ["", " "], [] if kind == "txt" else ["{no JSON", '{"text": null}']])
    path.write_bytes(COMPRESSED[compression]("\n".join(lines).encode()))


def loaded(data: Path) -> dict[int, Any]:
    """Return an origin of each document that a loader gives, by its word."""
    origins: dict[int, Any] = {}
    with open_loader(data, 1, origins=True) as loader:
        for batch in loader:
            ids, told = batch["input_ids"][0].tolist(), batch["origins"].tolist()
            ends = [*(place for _, place, *_ in told[1:]), len(ids)]
            for (_, place, *origin), end in zip(told, ends, strict=True):
                origins |= {word: loader.origin(*origin) for word in {*ids[place:end]} if word < NUM_WORDS}
    return origins


def printed(data: Path, *words: object) -> set[int]:
    """Return the documents in what ``peek`` prints."""
    ended = call_main("peek", data, *words, "--chars", 0)
    assert ended.code == 0, (words, ended.text)
    return {int(word) for word in re.findall(r"\bw(\d+)\b", ended.text) if int(word) < NUM_WORDS}


@pytest.mark.processes  # blank starts some
@pytest.mark.parametrize("case", range(NUM_CASES))
def test_loader_peek_counts_and_blank_name_the_documents_that_were_written(tmp_path: Path, case: int) -> None:
    chance, form = random.Random(case), FORMS[case % len(FORMS)]
    is_labeled = chance.random() < 0.5
    save_word_tokenizer(tmp_path / "model", NUM_WORDS + 2, splits=True)
    world = World(tmp_path, tokenizer=tmp_path / "model")
    documents = write_inputs(world.raw_dir, chance, has_labels=is_labeled)
    options: dict[str, Any] = {"id_field": "id", "recursive": True, "max_bad_fraction": 1.0, **form}
    options |= {"source_field": "label"} if is_labeled else {}
    options |= {"digests": True} if chance.random() < 0.3 else {}
    world.make(num_shards=chance.choice([1, 4]), engine="tokenizers", **options)
    data, every = world.data_dir, {*range(len(documents))}
    origins = loaded(data)
    assert origins.keys() == every

    for word in chance.sample(sorted(every), min(5, len(every))):
        assert printed(data, origins[word].address) == {word}
        if "record" not in form:
            path, _, unit = origins[word].place.partition(" ")
            assert word in printed(data, f"{path}:{unit.rpartition(' ')[2]}")
        if documents[word]["id"] and form.get("pack") != "best_fit":
            assert word in printed(data, f"id:{documents[word]['id']}")

    counts = Counter[str]()
    for manifest in world.manifests():
        sources = manifest["counts"]["sources"]
        counts.update({name: of["num_documents"] for name, of in sources.items()})
    assert +counts == Counter(one["label"] for one in documents)
    for left_out in world.lines("quarantine"):
        ended = call_main("peek", data, f"{left_out['source']}:{left_out['source_offset']}")
        assert left_out["reason"] in ended.text

    asked = {*chance.sample(sorted(every), -(-len(every) // 3))}
    with_id = {word for word in asked if documents[word]["id"]}
    hashes = [hashlib.sha256(documents[word]["text"].encode()).hexdigest() for word in asked]
    for way, words, names in (
        ("id", with_id, [documents[word]["id"] for word in with_id]),
        ("sha256", asked, [f"sha256:{digest}" for digest in hashes]),
    ):
        (tmp_path / "names").write_text("\n".join(names))
        new = tmp_path / f"without by {way}"
        ended = call_main("blank", data, "--ids", tmp_path / "names", "--output", new)
        assert ended.code == (0 if words else 65), ended.text
        if words:
            assert call_main("verify", new, "--deep", 99).code == 0
            assert loaded(new).keys() == every - words
