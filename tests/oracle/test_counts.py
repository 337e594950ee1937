"""What is said of a shard beside its samples: counts, documents left out, ids, digests.

Expected are numbers that a loop over the lines gives, each of which is known to be good, empty or bad.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.world import Ranks, World, hostile_texts, tokenizer_dir

SEQ_LEN = 16
FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "append_eos": True},
    "concat": {"record": "packed", "seq_len": SEQ_LEN},
    "best_fit": {"record": "packed", "seq_len": SEQ_LEN, "pack": "best_fit"},
}


@dataclass(frozen=True)
class Line:
    """A line of an input file, and what should become of it."""

    name: str
    raw: bytes
    offset: int
    text: str = ""  # of a document
    reason: str = ""  # why it is left out

    @property
    def source(self) -> str:
        return self.name.partition("/")[0]

    @property
    def id(self) -> str:
        return str(json.loads(self.raw)["id"])


def lines() -> list[Line]:
    """Two files: one of good and empty texts, one with bad lines between good ones."""
    texts = [text.strip() for text in hostile_texts(250, seed=4, most_words=9) if "<|" not in text]
    found = []
    for name, part in (("en/a.jsonl", texts[:50]), ("ko/b.jsonl", texts[50:])):
        offset = 0
        for number, text in enumerate(part):
            raw, reason = json.dumps({"id": f"{name[0]}{number}", "text": text}).encode(), ""
            if name.startswith("ko") and number % 5 == 0:
                raw, text, reason = [
                    (b'{"id": "x", "text": "\xff"}', "", "undecodable"),
                    (b'{"id": "x"}', "", "no_field"),
                    (b'{"id": "x", "text": ', "", "bad_json"),
                    (b"", "", ""),
                ][number // 5 % 4]
            found.append(Line(name, raw, offset, text, reason))
            offset += len(raw) + 1
    return found


def make(folder: Path, **options: Any) -> tuple[World, list[Line]]:
    """Return a data set of all lines, and the lines."""
    every = lines()
    world = World(folder)
    for name in ("en/a.jsonl", "ko/b.jsonl"):
        world.raw({name: b"".join(line.raw + b"\n" for line in every if line.name == name)})
    return world.make(recursive=True, max_bad_fraction=1, **options), every


def numbers_of(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield the numbers of a JSON value, by the dotted names of their places."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers_of(inner, f"{name}.{key}")
    elif isinstance(value, int):
        yield name, value


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_manifest_counts_what_its_shard_holds(tmp_path: Path, form: str, num_shards: int) -> None:
    world, every = make(tmp_path, num_shards=num_shards, id_field="id", digests=True, **FORMS[form])
    found = Counter[str]()
    for manifest in world.manifests():
        for name, number in chain(
            numbers_of(manifest["counts"], "counts"), numbers_of(manifest["run"]["texts"], "texts")
        ):
            found[name] += number

    encode = Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json")).encode
    is_packed = "seq_len" in FORMS[form]
    expected = Counter[str]()
    for line in every:
        counts, texts, source = Counter[str](), Counter[str](), Counter[str]()
        counts["num_lines"] = 1
        counts["input_bytes"] = source["num_bytes"] = len(line.raw) + 1
        if line.reason:
            counts[f"quarantined.{line.reason}"] = source["num_quarantined"] = 1
        elif not line.text:
            counts["num_empty_lines"] = 1
        else:
            size = len(encode(line.text).ids) + (form != "json")  # with EOS
            counts["num_documents"] = source["num_documents"] = 1
            counts["num_tokens"] = source["num_tokens"] = size
            counts[f"length_histogram.{size.bit_length()}"] = 1
            if not is_packed:
                counts["num_samples"] = 1
            elif form == "concat":  # known where one shard holds all
                begin = expected["counts.num_tokens"]
                counts["num_documents_across_rows"] = begin // SEQ_LEN != (begin + size - 1) // SEQ_LEN
            else:
                counts["num_documents_across_rows"] = size > SEQ_LEN
            dropped = max(size.bit_length() - 4, 0)
            length = f"lengths.{size >> dropped << dropped}"
            texts.update({f"{length}.0": 1, f"{length}.1": size})
            texts.update(num_bytes=len(line.text.encode()), num_chars=len(line.text))
        expected.update({f"counts.{name}": number for name, number in counts.items()})
        expected.update({f"counts.sources.{line.source}.{name}": number for name, number in source.items()})
        expected.update({f"texts.{line.source}.{name}": number for name, number in texts.items()})
    if is_packed:
        num_rows, num_tokens = found["counts.num_samples"], expected["counts.num_tokens"]
        assert form == "best_fit" or num_shards > 1 or num_rows == -(-num_tokens // SEQ_LEN)
        expected["counts.num_samples"] = num_rows
        expected["counts.num_pad_tokens"] = num_rows * SEQ_LEN - num_tokens
    if form == "concat" and num_shards > 1:
        del found["counts.num_documents_across_rows"], expected["counts.num_documents_across_rows"]
    assert +found == +expected
    check_side_files(world, every, has_order=form != "best_fit")


def test_a_source_that_records_name_counts_the_bytes_of_their_texts(tmp_path: Path) -> None:
    rows = [{"text": "가 b", "from": "web"}, {"text": "c", "from": "code"}, {"text": "de", "from": "web"}]
    world = World(tmp_path).raw({"a.jsonl": rows}).make(num_shards=1, source_field="from")
    sources = world.manifests()[0]["counts"]["sources"]
    found = {name: (source["num_documents"], source["num_bytes"]) for name, source in sources.items()}
    assert found == {"web": (2, 7), "code": (1, 1)}


def test_origins_of_a_mixture_name_the_documents_of_each_source(tmp_path: Path) -> None:
    encode = Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json")).encode
    texts = {name: [f"{name} {number}" for number in range(40)] for name in ("ko", "en")}
    worlds = {name: World(tmp_path / name).raw({"a.txt": "\n".join(texts[name])}).make() for name in texts}
    folders = {name: world.data_dir for name, world in worlds.items()}
    with Ranks(folders, weights={"ko": 2, "en": 1}, global_batch_size=6, origins=True) as ranks:
        (loader,) = ranks.loaders
        samples = [sample for step in ranks.take(20) for sample in step]  # more than an epoch of ko
        sources = [loader.source_names[sample["origins"][1]] for sample in samples]
        places = [loader.origin(*sample["origins"][1:5]).place for sample in samples]
    assert 70 < sources.count("ko") < 90
    for sample, source, place in zip(samples, sources, places, strict=True):
        before = (folders[source].parent / "raw" / "a.txt").read_bytes()[: int(re.findall(r"\d+", place)[-1])]
        text = texts[source][before.count(b"\n")]
        assert sample["input_ids"][: len(encode(text).ids)] == encode(text).ids, place


def check_side_files(world: World, every: list[Line], *, has_order: bool) -> None:
    """Quarantine, ids and digests name the lines, in the order of the input."""
    inputs = sorted({line.name for line in every})
    told = world.lines("quarantine")
    assert [(each["source"], each["source_offset"], each["reason"], each["num_bytes"]) for each in told] == [
        (line.name, line.offset, line.reason, len(line.raw) + 1) for line in every if line.reason
    ]
    if world.num_shards == 1:
        assert [each["line"] for each in told] == [number for number, line in enumerate(every) if line.reason]
    documents = [line for line in every if line.text]
    assert world.lines("ids") == [[inputs.index(line.name), line.offset, line.id] for line in documents]
    digests = b"".join(path.read_bytes() for path in sorted((world.data_dir / "digests").glob("shard-*")))
    expected = [hashlib.sha256(line.text.encode()).digest()[:16] for line in documents]
    found = [digests[first : first + 16] for first in range(0, len(digests), 16)]
    if not has_order:  # documents are not in the order of the input
        found, expected = sorted(found), sorted(expected)
    assert found == expected
