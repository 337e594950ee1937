"""What is said of a shard beside its samples: counts, documents left out, ids, digests.

Expected are numbers that a loop over the lines gives, each of which is known to be good, empty or bad.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
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


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_a_manifest_counts_what_its_shard_holds(tmp_path: Path, form: str, num_shards: int) -> None:
    options = FORMS[form]
    world, every = make(tmp_path, num_shards=num_shards, id_field="id", digests=True, **options)
    tokenizer = Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json"))
    documents = [line for line in every if line.text]
    has_eos = form != "json"
    sizes = [len(tokenizer.encode(line.text).ids) + has_eos for line in documents]
    manifests = world.manifests()
    counts = Counter[str]()
    for manifest in manifests:
        counts.update({name: value for name, value in manifest["counts"].items() if isinstance(value, int)})
    assert counts["num_documents"] == len(documents)
    assert counts["num_tokens"] == sum(sizes)
    assert counts["num_lines"] == len(every)
    assert counts["num_empty_lines"] == sum(1 for line in every if not line.text and not line.reason)
    assert counts["input_bytes"] == sum(len(line.raw) + 1 for line in every)
    across = sum(size > SEQ_LEN for size in sizes)
    if form == "concat" and num_shards == 1:
        assert counts["num_samples"] == -(-sum(sizes) // SEQ_LEN)
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        across = sum(
            (end - size) // SEQ_LEN != (end - 1) // SEQ_LEN for end, size in zip(ends, sizes, strict=True)
        )
    if "seq_len" not in options:
        assert counts["num_samples"] == len(documents)
        across = 0
    if form != "concat" or num_shards == 1:
        assert counts["num_documents_across_rows"] == across
    padding = counts["num_samples"] * SEQ_LEN - sum(sizes) if "seq_len" in options else 0
    assert counts["num_pad_tokens"] == padding

    for name, expected in {
        "quarantined": Counter(line.reason for line in every if line.reason),
        "length_histogram": Counter(size.bit_length() for size in sizes),
    }.items():
        found = Counter[Any]()
        for manifest in manifests:
            values = manifest["counts"][name]
            found.update(values if isinstance(values, dict) else dict(enumerate(values)))
        assert +found == expected, name
    for source in ("en", "ko"):
        of_source = Counter[str]()
        for manifest in manifests:
            of_source.update(manifest["counts"]["sources"].get(source, {}))
        assert of_source == Counter(
            num_documents=sum(line.source == source for line in documents),
            num_tokens=sum(
                size for line, size in zip(documents, sizes, strict=True) if line.source == source
            ),
            num_bytes=sum(len(line.raw) + 1 for line in every if line.source == source),
            num_quarantined=sum(line.source == source and line.reason != "" for line in every),
        )
    for source in ("en", "ko"):
        lengths = Counter[str]()
        of_texts = Counter[str]()
        for manifest in manifests:
            told = manifest["run"]["texts"].get(source, {})
            of_texts.update({name: told.get(name, 0) for name in ("num_bytes", "num_chars")})
            for length, (count, tokens) in (
                manifest["run"]["texts"].get(source, {"lengths": {}})["lengths"].items()
            ):
                lengths.update({f"documents of {length}": count, f"tokens of {length}": tokens})
        expected = Counter[str]()
        for line, size in zip(documents, sizes, strict=True):
            if line.source == source:
                rounded = size >> max(size.bit_length() - 4, 0) << max(size.bit_length() - 4, 0)
                expected.update({f"documents of {rounded}": 1, f"tokens of {rounded}": size})
        assert lengths == expected
        texts = [line.text for line in documents if line.source == source]
        assert of_texts == Counter(
            num_bytes=sum(len(text.encode()) for text in texts), num_chars=sum(map(len, texts))
        )
    check_side_files(world, every, has_order=form != "best_fit")


def test_a_source_that_records_name_counts_the_bytes_of_their_texts(tmp_path: Path) -> None:
    rows = [{"text": "가 b", "from": "web"}, {"text": "c", "from": "code"}, {"text": "de", "from": "web"}]
    world = World(tmp_path).raw({"a.jsonl": rows}).make(num_shards=1, source_field="from")
    sources = world.manifests()[0]["counts"]["sources"]
    found = {name: (source["num_documents"], source["num_bytes"]) for name, source in sources.items()}
    assert found == {"web": (2, 7), "code": (1, 1)}


@pytest.mark.parametrize("form", ["json", "npy"])
def test_an_origin_names_the_file_and_the_byte_of_a_document(tmp_path: Path, form: str) -> None:
    world, every = make(tmp_path, num_shards=3, **FORMS[form])
    encode = Tokenizer.from_file(str(tokenizer_dir() / "tokenizer.json")).encode
    documents = [line for line in every if line.text]
    with world.ranks(global_batch_size=1, origins=True, seed=3) as ranks:
        (loader,) = ranks.loaders
        samples = [sample for step in ranks.take(len(documents)) for sample in step]
        origins = [loader.origin(*sample["origins"][1:5]) for sample in samples]
    left = {(line.name, str(line.offset)): line for line in documents}
    for sample, origin in zip(samples, origins, strict=True):
        (line,) = [
            line for place, line in left.items() if set(place) <= set(re.split(r"[^\w./]+", origin.place))
        ]
        has_eos = FORMS[form].get("append_eos", False)
        assert sample["input_ids"][: len(sample["input_ids"]) - has_eos] == encode(line.text).ids, origin
        del left[line.name, str(line.offset)]
    assert not left


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
