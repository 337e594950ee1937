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
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from pyarrow import ipc
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loader import get_llama3_dataloader

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes  # rewrite starts some

NUM_WORDS = 160
FORMS: dict[str, dict[str, Any]] = {
    "documents": {},
    "no text": {"token_format": "npy", "keep_text": False},
    "concat": {"record": "packed", "seq_len": 32},
    "best_fit": {"record": "packed", "seq_len": 32, "pack": "best_fit"},
}
SUFFIXES = ("txt", "txt.gz", "txt.xz", "jsonl", "jsonl.gz", "jsonl.bz2", "jsonl.zst", "parquet", "arrow")
COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
}
NUM_CASES = 150 if os.environ.get("MIXED") == "all" else 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    words = {word: number for number, word in enumerate([*map(word_of, range(NUM_WORDS)), "<unk>", "</s>"])}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    return folder


def word_of(number: int) -> str:
    return f"w{number}."


@dataclass(frozen=True)
class Written:
    """A document as it was written."""

    text: str
    id: str  # "": it is a line of text
    source: str


def write_inputs(raw: Path, chance: random.Random, *, has_labels: bool) -> list[Written]:
    """Documents in files of random formats, beside lines that hold none."""
    found: list[Written] = []
    for number in range(chance.randrange(1, 8)):
        suffix, folder = chance.choice(SUFFIXES), chance.choice(["web", "books"])
        first = len(found)
        for word in range(first, min(first + chance.randrange(1, 40), NUM_WORDS)):
            text = " ".join([word_of(word)] * chance.choice([1, 2, 5, 30, 100]))
            is_text = suffix.startswith("txt")
            label = chance.choice(["news", "forum"]) if has_labels and not is_text else folder
            found.append(Written(text, "" if is_text else f"id{word}", label))
        path = raw / folder / f"{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_input(path, found[first:], chance)
    return found


def write_input(path: Path, documents: list[Written], chance: random.Random) -> None:
    records: list[dict[str, Any]] = [
        {"text": one.text, "id": one.id, "label": one.source} for one in documents
    ]
    kind, _, compression = path.name.partition(".")[2].partition(".")
    if kind in ("parquet", "arrow"):
        records.insert(chance.randrange(len(records) + 1), {"text": None, "id": "none", "label": "news"})
        table = pa.Table.from_pylist(records)
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=chance.choice([1, 5, 1000]))
        else:
            new = ipc.new_file if chance.random() < 0.5 else ipc.new_stream
            with new(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=chance.choice([1, 4, 1000]))
        return
    lines = []
    for record in records:
        lines.append(f" {record['text']} " if kind == "txt" else json.dumps(record))
        lines += chance.choice([[], [], ["", " "], [] if kind == "txt" else ["{no JSON", '{"text": null}']])
    path.write_bytes(COMPRESSED[compression]("\n".join(lines).encode()))


def words_in(text: str) -> set[int]:
    return {int(word) for word in re.findall(r"\bw(\d+)\.", text)}


class Loaded:
    """All documents of a data set as a loader gives them: word -> steps, and where one of them lies."""

    def __init__(self, data: Path, **options: Any) -> None:
        self.steps: defaultdict[int, set[int]] = defaultdict(set)
        self.origins: dict[int, Any] = {}
        made = {"batch_size": 1, "num_workers": 0, "rank": 0, "world_size": 1, **options}
        with get_llama3_dataloader(data, origins=True, **made) as loader:
            for step, batch in enumerate(loader):
                origins = batch["origins"].tolist()
                for number, (row, place, *origin) in enumerate(origins):
                    later = origins[number + 1] if number + 1 < len(origins) else [row + 1]
                    ids = batch["input_ids"][row, place : later[1] if later[0] == row else None]
                    for word in {*ids[ids < NUM_WORDS].tolist()}:
                        self.steps[word].add(step)
                        self.origins[word] = loader.origin(*origin)


@dataclass(frozen=True)
class Mixed:
    """A data set, and what is known of its documents."""

    prep: Prep
    data: Path
    documents: list[Written]
    loaded: Loaded
    is_rows: bool
    is_best_fit: bool
    chance: random.Random

    def printed(self, *words: object) -> set[int]:
        """The documents in what ``peek`` prints."""
        ended = self.prep.command("peek", self.data, *words)
        assert ended.code == 0, (words, ended.text)
        return words_in(ended.text)

    def places_of(self, word: int) -> list[str]:
        """FILE:BYTE of a document, where it is known and looked for."""
        origin = self.loaded.origins[word]
        if self.is_rows:
            return []
        path, _, unit = origin.place.partition(" ")
        return [f"{path}:{unit.rpartition(' ')[2]}"]

    def some_words(self) -> list[int]:
        return self.chance.sample(range(len(self.documents)), min(5, len(self.documents)))


@pytest.fixture(scope="module", params=range(NUM_CASES))
def mixed(
    prep: Prep, model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Mixed:
    root, chance = tmp_path_factory.mktemp("mixed"), random.Random(request.param)
    form, is_labeled = [*FORMS][request.param % len(FORMS)], chance.random() < 0.5
    documents = write_inputs(root / "raw", chance, has_labels=is_labeled)
    options: dict[str, Any] = {**FORMS[form], "id_field": "id", "recursive": True, "max_bad_fraction": 1.0}
    options |= {"source_field": "label"} if is_labeled else {}
    options |= {"digests": True} if chance.random() < 0.3 else {}
    num_shards = chance.choice([None, 1, 4])
    data = root / "data"
    prep.plan(root / "raw", data, num_shards=num_shards, model_id=str(model), engine="tokenizers", **options)
    prep.make(data, engine="tokenizers")
    assert prep.command("verify", data).code == 0
    is_rows, is_best_fit = "record" in FORMS[form], form == "best_fit"
    loaded = Loaded(data)
    assert loaded.steps.keys() == {*range(len(documents))}
    return Mixed(prep, data, documents, loaded, is_rows, is_best_fit, chance)


def test_peek_prints_the_document_at_an_address(mixed: Mixed) -> None:
    for word in mixed.some_words():
        assert mixed.printed(mixed.loaded.origins[word].address) == {word}
        by_id = [f"id:{mixed.documents[word].id}"] * (
            mixed.documents[word].id != "" and not mixed.is_best_fit
        )
        for address in [*mixed.places_of(word), *by_id]:
            assert word in mixed.printed(address)


def test_a_source_has_the_documents_that_were_written_for_it(mixed: Mixed) -> None:
    counts: defaultdict[str, int] = defaultdict(int)
    for path in mixed.data.glob("shard-*.json"):
        for name, of in json.loads(path.read_text())["counts"]["sources"].items():
            counts[name] += of["num_documents"]
    for source in {*counts, *(one.source for one in mixed.documents)}:
        of_source = {word for word, one in enumerate(mixed.documents) if one.source == source}
        assert counts[source] == len(of_source)


def test_a_document_that_was_left_out_is_told(mixed: Mixed) -> None:
    for path in mixed.data.glob("quarantine/*.jsonl"):
        for left_out in map(json.loads, path.read_text().splitlines()):
            at = f"{left_out['source']}:{left_out['source_offset']}"
            assert "was left out of shard" in mixed.prep.command("peek", mixed.data, at).text


@pytest.mark.parametrize("way", ["id", "sha256"])
def test_what_is_blanked_is_loaded_no_more_and_nothing_else_is(
    mixed: Mixed, tmp_path: Path, way: str
) -> None:
    prep, documents, new = mixed.prep, mixed.documents, tmp_path / "new"
    asked = {*mixed.chance.sample(range(len(documents)), -(-len(documents) // 3))}
    if way == "id":
        asked = {word for word in asked if documents[word].id}
        names = [documents[word].id for word in asked]
    else:
        names = [f"sha256:{hashlib.sha256(documents[word].text.encode()).hexdigest()}" for word in asked]
    (tmp_path / "names").write_text("\n".join(names))
    ended = prep.command("blank", mixed.data, "--ids", tmp_path / "names", "--output", new)
    assert ended.code == (0 if asked else 65), ended.text
    if asked:
        assert prep.command("verify", new, "--deep", 99).code == 0
        assert Loaded(new).steps.keys() == {*range(len(documents))} - asked
