"""What the fuzzed inputs are given to, how they are made, and what is found besides."""

from __future__ import annotations

import io
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import webdataset
from hypothesis import strategies as st

from loader.samples import parse_id_lists
from loader.state import STATE_FORMAT, STATE_VERSION, RunSteps, position_of
from preprocess.make.packing import BestFitRows, ConcatRows
from preprocess.read import long_documents
from shardprep.errors import BrokenShard
from shardprep.format.dataset_spec import DatasetSpec
from shardprep.format.done import publish_findings, read_findings
from shardprep.format.idx import read_idx
from shardprep.format.manifest import read_index, read_manifest
from shardprep.format.options import PrepConfig
from shardprep.format.plan import need_plan
from shardprep.format.submissions import read_submissions
from tests.faults.bad_json import with_its_hash
from tests.faults.json_spans import spans
from tests.loader.test_tar_headers import altered, found_by_tarfile, found_in, some_tar
from tests.preprocess.test_line_ends import BROKEN, ENCODINGS, ENDS, codec_of, encodable, expected_of
from tests.preprocess.test_line_ends import found_by_worker as found_lines
from tests.preprocess.test_packing import pack, rows_of, spec

Check = Callable[[Any], bool]  # False where the input is refused; raises where what is found is wrong
Edits = list[tuple[str, int, bytes]]


class WrongError(Exception):
    """Something else was found than an independent reader finds."""


def targets(place: Path) -> Iterator[tuple[str, st.SearchStrategy[Any], Check]]:
    """Name, strategy and check of each, for a verified data set in ``place``."""
    data = place / "data"
    plan = need_plan(data)
    readers: dict[str, Callable[[], Any]] = {
        "plan.json": lambda: need_plan(data),
        "index.json": lambda: read_index(data),
        "shard-00000.json": lambda: replace(read_manifest(data, 0), run={}),
        "shard-00000.idx": lambda: _read_idx(data, plan.spec),
        "jobs/0000.json": lambda: read_submissions(data),
        "findings.json": lambda: read_findings(data, plan.plan_id),
    }
    index = (data / "index.json").read_bytes()
    publish_findings(data, plan.plan_id, [(0, BrokenShard("a hash differs"))])
    (data / "index.json").write_bytes(index)  # which is removed where something is wrong
    for name, read in readers.items():
        yield name, _EDITS, _file_check(data / name, read)
        if name.endswith(".json"):
            yield f"{name}, forged", _FORGERIES, _forged_check(data / name, read)
    yield "state", _EDITS, _state_check()
    yield "tar", st.integers(0, 2**63), _tar_check(place / "fuzzed.tar")
    yield "tar, bytes altered", _EDITS, _altered_tar_check(place / "fuzzed.tar")
    yield "JSON ids", _ID_TEXTS, _ids_check
    yield "raw text", _TEXTS, _text_check(place / "fuzzed.txt")
    yield (
        "packing",
        st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.integers(1, 20)),
        _rows_check,
    )


# Altered files. ------------------------------------------------------------------------------------------

_PIECES = [
    b"",
    b"0",
    b"-1",
    b"1e999",
    b"9" * 400,
    b"[" * 5000,
    b'"',
    b"\\ud800",
    b"null",
    b"{}",
    b"\0" * 8,
    b"\xff" * 8,
]
_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "write", "insert", "remove", "double", "end"]),
        st.integers(0, 2**20),
        st.sampled_from(_PIECES) | st.binary(max_size=8),
    ),
    min_size=1,
    max_size=4,
)


_FORGERIES = st.tuples(
    st.integers(0, 2**20),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.integers(-(2**70), 2**70)
        | st.floats()
        | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=4,
    ).map(json.dumps),
)


def edited(data: bytes, edits: Edits) -> bytes:
    """Bytes after some edits, each at a place of its own."""
    for how, place, piece in edits:
        at = place % (len(data) + 1)
        data = data[:at] + _AFTER[how](data[at:], place, piece)
    return data


_AFTER: dict[str, Callable[[bytes, int, bytes], bytes]] = {
    "flip": lambda rest, place, _: bytes(byte ^ 1 << place % 8 for byte in rest[:1]) + rest[1:],
    "write": lambda rest, _, piece: piece + rest[len(piece) :],
    "insert": lambda rest, _, piece: piece + rest,
    "remove": lambda rest, _, piece: rest[len(piece) * 9 + 1 :],
    "double": lambda rest, _, piece: rest[: 64 * len(piece)] + rest,
    "end": lambda *_: b"",
}


def _read_idx(data: Path, spec: DatasetSpec) -> list[Any]:
    """All records, as many as the manifest says: no reader takes others."""
    records: list[Any] = read_idx(data, spec, 0).tolist()
    if len(records) != read_manifest(data, 0).counts.num_samples:
        raise BrokenShard("its manifest has another number of samples")
    return records


def _file_check(path: Path, read: Callable[[], Any]) -> Check:
    """What is read of an altered file is what was written, or it is refused."""
    original = path.read_bytes()
    expected = _comparable(read())

    def check(edits: Edits) -> bool:
        path.write_bytes(edited(original, edits))
        try:
            found = _comparable(read())
        finally:
            path.write_bytes(original)
        if found == expected:
            return True
        raise WrongError(f"{path.name} is read as another one")

    return check


def _forged_check(path: Path, read: Callable[[], Any]) -> Check:
    """One value is another, as who forges a file would write it, with the hash that follows."""
    original = path.read_bytes()
    text = original.decode()
    places = [place for place in spans(text) if place[0] != "content_sha256"]

    def check(value: tuple[int, str]) -> bool:
        _, start, end = places[value[0] % len(places)]
        path.write_bytes(with_its_hash((text[:start] + value[1] + text[end:]).encode()) or original)
        try:
            read()
        finally:
            path.write_bytes(original)
        return True

    return check


def _comparable(value: Any) -> str:
    with np.printoptions(threshold=2**31):
        return repr(value)


def _state_check() -> Check:
    fingerprint = {"plan_id": "a" * 64, "seed": 3, "law": 1, "tokenizer": "b" * 64}
    layout = {"world_size": 2, "batch_size": 4}
    state = {
        "format": STATE_FORMAT,
        "version": STATE_VERSION,
        "epoch": 1,
        "step": 2,
        "num_micro": 0,
        "layout": layout,
        "fingerprint": fingerprint,
    }
    original = json.dumps(state).encode()
    run = RunSteps(order_steps_per_epoch=10, num_batches=1)

    def check(edits: Edits) -> bool:
        try:
            found = json.loads(edited(original, edits))
        except (ValueError, RecursionError):
            return False
        if not isinstance(found, dict):
            return False
        position = position_of(found, fingerprint, layout, run)
        if not (0 <= position.step < 10 and position.epoch >= 0 and position.num_micro >= 0):
            raise WrongError(f"a state stands at {position}")
        return True

    return check


# Tars. ---------------------------------------------------------------------------------------------------


def _tar_check(path: Path) -> Check:
    """Tars of all formats with altered headers, their checksums made right."""

    def check(seed: int) -> bool:
        chance = random.Random(seed)
        raw = some_tar(chance)
        for _ in range(chance.randrange(1, 4)):
            raw = altered(raw, chance)
        return _as_tarfile(path, raw)

    return check


def _altered_tar_check(path: Path) -> Check:
    file = io.BytesIO()
    with webdataset.TarWriter(file, mtime=0) as writer:
        for number in range(3):
            writer.write({"__key__": f"d{number}", "token_ids.json": [number, 1, 2], "text.txt": "text"})
    original = file.getvalue()
    return lambda edits: _as_tarfile(path, edited(original, edits))


def _as_tarfile(path: Path, raw: bytes) -> bool:
    if found_in(path, raw) != found_by_tarfile(raw):
        raise WrongError("tarfile finds other members")
    return True


# Ids, text and rows. -------------------------------------------------------------------------------------

_ID_TEXTS = st.lists(
    st.text("[]0123456789, -.e", max_size=12)
    | st.lists(st.integers(0, 10**8 - 1), max_size=6).map(json.dumps)
    | st.tuples(st.lists(st.integers(0, 10**9), max_size=4).map(json.dumps), st.integers(0, 40)).map(
        lambda made: made[0][: made[1]] + made[0][made[1] + 1 :]
    ),
    min_size=1,
    max_size=4,
)


def _ids_check(texts: list[str]) -> bool:
    found = parse_id_lists([memoryview(text.encode()) for text in texts])
    if found is None:
        return False
    counts, ids = found
    lists = [_list_of(text) for text in texts]
    if counts.tolist() != [*map(len, lists)] or ids.tolist() != [*itertools.chain.from_iterable(lists)]:
        raise WrongError("json reads other ids")
    return True


def _list_of(text: str) -> list[int]:
    """As json reads it; zeros in front change no number, though JSON forbids them."""
    return list(json.loads(re.sub(r"\b0+(?=\d)", "", text)))


_TEXTS = st.tuples(
    st.sampled_from(ENCODINGS),
    st.lists(st.integers(0, 2**16), max_size=40),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 60),
)


def _text_check(path: Path) -> Check:
    """Lines of any encoding, some that cannot be decoded, in any sizes of blocks and of long lines."""
    pieces = {name: _pieces_of(name) for name in ENCODINGS}

    def check(value: tuple[str, list[int], int, int, int]) -> bool:
        name, chosen, block_bytes, scan_bytes, long_bytes = value
        encoding = PrepConfig(encoding=name).encoding
        data = b"".join(pieces[name][number % len(pieces[name])] for number in chosen)
        with ExitStack() as held:
            held.enter_context(mock.patch.object(long_documents, "LONG_BYTES", long_bytes))
            held.enter_context(mock.patch.object(long_documents, "_READ_BYTES", scan_bytes))
            found = found_lines(path, data, encoding, block_bytes)
        if found != expected_of(data, encoding):
            raise WrongError("an independent reader finds other lines")
        return True

    return check


def _pieces_of(name: str) -> list[bytes]:
    codec = codec_of(b"", PrepConfig(encoding=name).encoding)[0]
    letters = [text.encode(codec) for text in [*ENDS, *encodable(codec)]]
    return [*letters, *letters, *BROKEN]


def _rows_check(value: tuple[list[int], int]) -> bool:
    """Packed rows hold each token once; joined they are the documents, and best_fit cuts none that fits."""
    lengths, seq_len = value
    joined = [1000 * (d + 1) + t for d, n in enumerate(lengths) for t in range(n)]
    rows = [ids for ids, _, _ in rows_of(pack(ConcatRows(spec(seq_len)), lengths, 7))]
    fit = [ids for ids, _, _ in rows_of(pack(BestFitRows(spec(seq_len)), lengths, 7))]
    of_rows = Counter(d for ids in fit for d in {token // 1000 - 1 for token in ids})
    if [*itertools.chain.from_iterable(rows)] != joined or sorted(
        itertools.chain.from_iterable(fit)
    ) != joined:
        raise WrongError("rows hold other tokens than the documents")
    if any(of_rows[d] != 1 for d, n in enumerate(lengths) if 0 < n <= seq_len):
        raise WrongError("a document that fits into a row is cut")
    return True
