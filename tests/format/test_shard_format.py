"""The bytes of the contract: equal to numpy's, tarfile's and json's, found by the idx, refused by name."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from preprocess.make.engines import TokenBatch
from preprocess.make.members import document_headers, json_ids, ustar_header
from shardprep.errors import BrokenShard, MissingShard, NotFound, OtherPlan, UnknownVersion
from shardprep.format.dataset_spec import token_bytes, tokenizer_fingerprint
from shardprep.format.idx import read_idx
from shardprep.format.manifest import check_hashes, check_shard, read_index, read_manifest
from shardprep.format.names import (
    idx_path,
    manifest_path,
    npy_header,
    tar_path,
)
from shardprep.format.plan import Plan
from tests.conftest import seal

if TYPE_CHECKING:
    from tests.conftest import Prep

SEQ_LEN = 64
NUM_SHARDS = 4
KINDS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "keep_text": False, "append_eos": True},
    "packed": {"record": "packed", "seq_len": SEQ_LEN},
}


def of_kinds(*kinds: str) -> pytest.MarkDecorator:
    """Run a test with the fixture ``data`` of these kinds."""
    return pytest.mark.parametrize("data", kinds, indirect=True, scope="module")


@dataclass(frozen=True, kw_only=True)
class Data:
    """A made data set and, independently of it, what must be in it."""

    folder: Path
    plan: Plan
    documents: list[list[tuple[int, int, int, list[int]]]]  # shard -> (line, source, byte, ids)


def expected_documents(plan: Plan, tokenizer: Tokenizer) -> list[list[tuple[int, int, int, list[int]]]]:
    """Every shard's documents by a plain loop over its bytes and the reference tokenizer."""
    shards = []
    for shard_id in range(plan.num_shards):
        rows, line = [], 0
        for part in plan.ranges(shard_id):
            start = part.start
            for raw in part.path.read_bytes()[part.start : part.end].splitlines(keepends=True):
                if text := raw.decode().strip():
                    ids = tokenizer.encode(text).ids
                    if plan.options.append_eos:
                        assert plan.tokenizer.eos_token_id is not None
                        ids.append(plan.tokenizer.eos_token_id)
                    rows.append((line, part.input_number, start, ids))
                start += len(raw)
                line += 1
        shards.append(rows)
    return shards


@pytest.fixture(scope="module")
def raw_dir(sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample text, with empty lines and a file that has nothing else."""
    folder = tmp_path_factory.mktemp("raw")
    for path in sample_dir.iterdir():
        (folder / path.name).write_bytes(path.read_bytes().replace(b".\n", b".\n\n  \r\n", 20))
    (folder / "fr_none.txt").write_bytes(b"\n\n")
    return folder


@pytest.fixture(scope="module")
def data(
    request: pytest.FixtureRequest, prep: Prep, raw_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Data:
    folder = tmp_path_factory.mktemp(request.param)
    prep.plan(raw_dir, folder, num_shards=NUM_SHARDS, **KINDS[request.param])
    plan = prep.make(folder)
    tokenizer = Tokenizer.from_file(str(prep.model_dir / "tokenizer.json"))
    return Data(folder=folder, plan=plan, documents=expected_documents(plan, tokenizer))


@pytest.mark.slow
@settings(max_examples=200)
@given(
    shape=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    dtype=st.sampled_from(["<u2", "<u4", "<i8", "|u1"]),
)
def test_an_npy_header_is_what_numpy_save_writes(shape: tuple[int, ...], dtype: str) -> None:
    out = io.BytesIO()
    head = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, head)
    assert npy_header(np.dtype(dtype), shape) == out.getvalue()


@settings(max_examples=100)
@given(num_bytes=st.integers(0, 2**33 - 1), shard_id=st.integers(0, 99_998))
def test_a_ustar_header_is_tarfiles(num_bytes: int, shard_id: int) -> None:
    info = tarfile.TarInfo(f"rows_{shard_id}_00000000.token_ids.npy")
    info.size = num_bytes
    assert ustar_header(info.name, num_bytes) == info.tobuf(tarfile.USTAR_FORMAT)


@settings(max_examples=100)
@given(
    lines=st.lists(st.integers(0, 3 * 10**8) | st.integers(10**8 - 2, 10**8 + 2), unique=True).map(sorted),
    num_bytes=st.integers(0, 2**33 - 100),
    shard_id=st.integers(0, 99_998),
    field=st.sampled_from(["text.txt", "token_ids.json", "token_ids.npy"]),
)
def test_headers_made_many_at_once_are_tarfiles_below_and_above_eight_digits(
    lines: list[int], num_bytes: int, shard_id: int, field: str
) -> None:
    sizes = np.arange(len(lines), dtype=np.int64) + num_bytes
    found = document_headers(shard_id, np.array(lines, np.int64), field, sizes)
    assert found.shape == (len(lines), 512)
    for row, line, size in zip(found, lines, sizes.tolist(), strict=True):
        info = tarfile.TarInfo(f"sample_{shard_id}_{line:08d}.{field}")
        info.size = size
        assert row.tobytes() == info.tobuf(tarfile.USTAR_FORMAT)


@pytest.mark.parametrize("vocab_size", [10, 856, 128_256, 10**6, 10**6 + 2, 1_100_000])
def test_json_ids_are_what_json_dumps_writes(vocab_size: int) -> None:
    edges = [0, 9, 10, 99, 100, 9_999, 99_999, 100_000, 999_999, 10**6, vocab_size - 1]
    known = [number for number in edges if number < vocab_size]
    documents = [[], known, [vocab_size - 1], [], [0], known[::-1], []]
    batches: list[list[list[int]]] = [documents, [[]], [], [[], []]]
    for chosen in batches:
        batch = TokenBatch(
            ids=np.array([number for ids in chosen for number in ids], np.uint32),
            offsets=np.cumsum([0, *map(len, chosen)]).astype(np.int64),
        )
        writer = json_ids(vocab_size)
        texts = [json.dumps(ids) for ids in chosen]
        assert writer.lengths(batch).tolist() == [len(text) for text in texts]
        assert writer.separated(batch.ids).decode() == "".join(
            f", {number}" for ids in chosen for number in ids
        )


def test_ids_take_two_bytes_below_65536_tokens_as_one_number_means_blank() -> None:
    assert [token_bytes(size) for size in (1, 65_535, 65_536)] == [2, 2, 4]


@of_kinds("json", "npy")
def test_the_members_hold_the_documents_in_the_order_of_the_input(prep: Prep, data: Data) -> None:
    kept = data.plan.options.keep_text
    for shard_id, documents in enumerate(data.documents):
        members = prep.members(tar_path(data.folder, shard_id))
        field = f"token_ids.{data.plan.spec.kind}"
        keys = [f"sample_{shard_id}_{line:08d}" for line, *_ in documents]
        assert len(documents) > 50
        if kept:
            assert [name for name, _ in members[::2]] == [f"{key}.text.txt" for key in keys]
            texts = [
                data.plan.ranges(shard_id)[0].path.parent / data.plan.inputs[source].path
                for _, source, _, _ in documents
            ]
            for (_, payload), path, (_, _, byte, _) in zip(members[::2], texts, documents, strict=True):
                assert path.read_bytes()[byte:].split(b"\n", 1)[0].strip() == payload
        ids = members[1::2] if kept else members
        assert [name for name, _ in ids] == [f"{key}.{field}" for key in keys]
        for (_, payload), (*_, wanted) in zip(ids, documents, strict=True):
            if data.plan.spec.kind == "json":
                assert payload == json.dumps(wanted).encode()
            else:
                array = np.load(io.BytesIO(payload))
                assert (array.dtype, array.tolist()) == (data.plan.spec.dtype, wanted)


@of_kinds("json", "npy")
def test_the_idx_names_the_place_the_length_and_the_source_of_each_document(data: Data) -> None:
    for shard_id, documents in enumerate(data.documents):
        entries = read_idx(data.folder, data.plan.spec, shard_id)
        raw = tar_path(data.folder, shard_id).read_bytes()
        assert len(entries) == len(documents)
        for entry, (_, source, byte, wanted) in zip(entries, documents, strict=True):
            payload = raw[entry["offset"] : entry["offset"] + entry["num_bytes"]]
            if data.plan.spec.kind == "json":
                assert json.loads(payload) == wanted
            else:
                assert np.frombuffer(payload, "<u2").tolist() == wanted
            assert entry["num_tokens"] == len(wanted)
            assert (entry["source"], entry["source_offset"]) == (source, byte)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A packed shard as its members alone tell it."""

    tokens: list[int]  # less the padding
    starts: list[int]  # of the documents in tokens
    lengths: list[int]  # of the rows
    member_of: list[int]  # the first row of each row's member


def packed_shard(prep: Prep, data: Data, shard_id: int) -> Packed:
    tokens: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    member_of: list[int] = []
    members: dict[str, dict[str, np.ndarray]] = {}
    for name, payload in prep.members(tar_path(data.folder, shard_id)):
        key, field = name.split(".", 1)
        members.setdefault(key, {})[field] = np.load(io.BytesIO(payload))
        assert list(members[key]) == sorted(members[key])
    for key, fields in members.items():
        assert key == f"rows_{shard_id}_{len(lengths):08d}"
        rows = fields["token_ids.npy"]
        assert rows.shape[1] == SEQ_LEN
        here = fields.get("row_tokens.npy", np.full(len(rows), SEQ_LEN))
        starts += [len(tokens) + position for position in fields["doc_starts.npy"].tolist()]
        member_of += [len(lengths)] * len(rows)
        lengths += here.tolist()
        for row, length in zip(rows.tolist(), here.tolist(), strict=True):
            tokens += row[:length]
            assert row[length:] == [data.plan.tokenizer.pad_token_id] * (SEQ_LEN - length)
    return Packed(tokens=tokens, starts=starts, lengths=lengths, member_of=member_of)


@of_kinds("packed")
def test_packed_rows_less_their_padding_are_the_documents_joined_with_eos(prep: Prep, data: Data) -> None:
    for shard_id, documents in enumerate(data.documents):
        packed = packed_shard(prep, data, shard_id)
        assert packed.tokens == [number for *_, ids in documents for number in ids]
        assert len(documents) > 50
        assert {ids[-1] for *_, ids in documents} == {data.plan.tokenizer.eos_token_id}
        assert packed.starts == np.cumsum([0, *(len(ids) for *_, ids in documents)])[:-1].tolist()
        assert set(packed.lengths[:-1]) == {SEQ_LEN}
        counts = read_manifest(data.folder, shard_id).counts
        assert counts.num_pad_tokens == SEQ_LEN - packed.lengths[-1]
        assert counts.num_samples == len(packed.lengths)


@of_kinds("packed")
def test_the_idx_of_packed_rows_finds_ids_starts_and_sources(prep: Prep, data: Data) -> None:
    for shard_id, documents in enumerate(data.documents):
        entries = read_idx(data.folder, data.plan.spec, shard_id)
        raw = tar_path(data.folder, shard_id).read_bytes()
        packed = packed_shard(prep, data, shard_id)
        owner = [number for number, (*_, ids) in enumerate(documents) for _ in ids]
        assert len(entries) == len(packed.lengths)
        for row, entry in enumerate(entries):
            begin = row * SEQ_LEN
            payload = raw[entry["offset"] : entry["offset"] + entry["num_bytes"]]
            ids = np.frombuffer(payload, data.plan.spec.dtype).tolist()
            length = packed.lengths[row]
            assert (len(ids), entry["num_tokens"]) == (SEQ_LEN, length)
            assert ids[:length] == packed.tokens[begin : begin + length]
            first = int(entry["starts_offset"])
            place = slice(first, first + 4 * int(entry["num_starts"]))
            assert [
                start + packed.member_of[row] * SEQ_LEN for start in np.frombuffer(raw[place], "<u4").tolist()
            ] == [start for start in packed.starts if begin <= start < begin + SEQ_LEN]
            _, source, byte, _ = documents[owner[begin]]
            assert (entry["source"], entry["source_offset"]) == (source, byte)


@pytest.mark.slow
def test_long_packed_shards_have_several_members_that_go_on_from_one_another(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    """A member holds 512 KiB of ids: 262,144 of two bytes."""
    (tmp_path / "raw").mkdir()
    lines = (sample_dir / "en_0.txt").read_text() + "한 문장.\n" * 50
    (tmp_path / "raw" / "a.txt").write_text(lines * 16)
    prep.plan(tmp_path / "raw", tmp_path / "data", record="packed", seq_len=SEQ_LEN)
    plan = prep.make(tmp_path / "data")
    tokenizer = Tokenizer.from_file(str(prep.model_dir / "tokenizer.json"))
    made = Data(folder=tmp_path / "data", plan=plan, documents=expected_documents(plan, tokenizer))
    names = [name for name, _ in prep.members(tar_path(made.folder, 0)) if name.endswith("token_ids.npy")]
    assert len(names) > 2
    assert names[1] == "rows_0_00004096.token_ids.npy"
    test_packed_rows_less_their_padding_are_the_documents_joined_with_eos(prep, made)
    test_the_idx_of_packed_rows_finds_ids_starts_and_sources(prep, made)


@of_kinds(*KINDS)
def test_manifests_count_what_the_shards_hold(data: Data) -> None:
    for shard_id, documents in enumerate(data.documents):
        manifest = read_manifest(data.folder, shard_id)
        counts = manifest.counts
        lengths = [len(ids) for *_, ids in documents]
        assert counts.num_documents == len(documents)
        assert counts.num_tokens == sum(lengths)
        assert counts.input_bytes == data.plan.shard_bytes()[shard_id]
        assert counts.num_lines - counts.num_empty_lines == len(documents)
        assert counts.quarantined == {}
        for bucket, found in enumerate(counts.length_histogram):
            assert found == sum(2 ** (bucket - 1) <= length < 2**bucket for length in lengths), bucket
        assert sum(counts.length_histogram) == len(documents)
        check_hashes(data.folder, manifest)
        raw = tar_path(data.folder, shard_id).read_bytes()
        assert raw.endswith(bytes(1024))
        assert idx_path(data.folder, shard_id).stat().st_size == manifest.idx.num_bytes
    assert sum(read_manifest(data.folder, shard).counts.num_empty_lines for shard in range(NUM_SHARDS)) > 100


@of_kinds(*KINDS)
def test_webdataset_reads_the_shards(data: Data) -> None:
    paths = [str(tar_path(data.folder, shard_id)) for shard_id in range(NUM_SHARDS)]
    samples = list(webdataset.WebDataset(paths, shardshuffle=False).decode())
    kind = data.plan.spec.kind
    field = f"token_ids.{'json' if kind == 'json' else 'npy'}"
    if kind == "packed":
        rows = sum(len(sample[field]) for sample in samples)
        assert rows == sum(
            read_manifest(data.folder, shard_id).counts.num_samples for shard_id in range(NUM_SHARDS)
        )
        assert all("doc_starts.npy" in sample for sample in samples)
        return
    assert [list(sample[field]) for sample in samples] == [ids for rows in data.documents for *_, ids in rows]
    assert ("text.txt" in samples[0]) == data.plan.options.keep_text


@pytest.fixture
def broken(data: Data, tmp_path: Path) -> Data:
    """A copy to damage, of one kind of data set."""
    folder = Path(shutil.copytree(data.folder, tmp_path / "data"))
    return Data(folder=folder, plan=data.plan, documents=data.documents)


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


RERUN = "run: shardprep --shard_id 1 --output_dir "
Change = Callable[[bytes], bytes]
# The file of shard 1, what it holds afterwards (None: it is gone), the error and its words.
VIOLATIONS: dict[str, tuple[Callable[[Path, int], Path], Change | None, type[Exception], str]] = {
    "manifest of another version": (
        manifest_path, lambda raw: raw.replace(b'"version": 2', b'"version": 7', 1), UnknownVersion,
        r"shard-00001\.json has format version 7, this shardprep reads 2 alone; install the shardprep that",
    ),
    "manifest cut short": (
        manifest_path, lambda raw: raw[:100], BrokenShard, r"shard-00001\.json is not JSON"
    ),
    "manifest without counts": (
        manifest_path, lambda raw: raw.replace(b'"counts"', b'"count"'), BrokenShard,
        r"shard-00001\.json is not whole: it has no counts; run: ",
    ),
    "another kind of JSON": (
        manifest_path, lambda raw: b"[1]", BrokenShard,
        r"shard-00001\.json is not a shardprep-manifest: its format is 'list'",
    ),
    "manifest gone": (
        manifest_path, None, MissingShard,
        r"shard 00001 is not done: .*shard-00001\.json is missing; run: shardprep --shard_id 1 ",
    ),
    "manifest of another plan": (
        manifest_path, lambda raw: re.sub(rb'"plan_id": ".{12}', b'"plan_id": "0123456789ab', raw), OtherPlan,
        r"shard-00001\.json is shard 1 of plan 0123456789ab, expected shard 1 of .*use a new folder",
    ),
    "manifest of another shard": (
        manifest_path, lambda raw: raw.replace(b'"shard_id": 1', b'"shard_id": 2'), OtherPlan,
        r"shard-00001\.json is shard 2 of plan .*expected shard 1 of ",
    ),
    "tar gone": (tar_path, None, MissingShard, rf"shard-00001\.tar is missing; {RERUN}"),
    "tar cut short": (
        tar_path, lambda raw: raw[:-512], BrokenShard, rf"shard-00001\.tar has \d+ of \d+ bytes; {RERUN}"
    ),
    "idx gone": (idx_path, None, MissingShard, rf"shard-00001\.idx is missing; {RERUN}"),
    "idx cut short": (
        idx_path, lambda raw: raw[:-28], BrokenShard, rf"shard-00001\.idx has \d+ of \d+ bytes; {RERUN}"
    ),
}  # fmt: skip
FORGED = ("manifest without counts", "manifest of another plan", "manifest of another shard")


@pytest.mark.parametrize("violation", VIOLATIONS)
@of_kinds("json")
def test_each_violation_of_a_shard_has_its_error_that_says_what_to_do(broken: Data, violation: str) -> None:
    check_shard(broken.folder, 1, broken.plan.plan_id)
    path_of, change, kind, message = VIOLATIONS[violation]
    path = path_of(broken.folder, 1)
    if change is None:
        path.unlink()
    else:
        edit(path, change)
    if violation in FORGED:
        seal(manifest_path(broken.folder, 1))
    with pytest.raises(kind, match=message) as caught:
        check_shard(broken.folder, 1, broken.plan.plan_id)
    assert type(caught.value) is kind


IDX_VIOLATIONS: dict[str, tuple[Callable[[bytes], bytes], type[Exception], str]] = {
    "version": (
        lambda raw: raw[:8] + b"\3" + raw[9:],
        UnknownVersion,
        r"shard-00001\.idx has format version 3, this shardprep reads 2",
    ),
    "foreign file": (
        lambda raw: b"PK" + raw[2:],
        BrokenShard,
        "is not an idx: it begins b'PKardidx', expected",
    ),
    "half a header": (lambda raw: raw[:30], BrokenShard, "is not an idx"),
    "empty": (lambda raw: b"", BrokenShard, "is not an idx: it begins b'', expected"),
    "half a record": (lambda raw: raw[:-1], BrokenShard, r"is cut short: no number of records of 28 bytes"),
    "other plan": (lambda raw: raw[:30] + b"xx" + raw[32:], OtherPlan, "was written for .*, expected "),
    "other shard": (lambda raw: raw[:24] + b"\2" + raw[25:], OtherPlan, "was written for .*, expected "),
}


@pytest.mark.parametrize("violation", IDX_VIOLATIONS)
@of_kinds("json")
def test_each_violation_of_an_idx_has_its_error(broken: Data, violation: str) -> None:
    read_idx(broken.folder, broken.plan.spec, 1)
    damage, kind, message = IDX_VIOLATIONS[violation]
    edit(idx_path(broken.folder, 1), damage)
    with pytest.raises(kind, match=message) as caught:
        read_idx(broken.folder, broken.plan.spec, 1)
    assert type(caught.value) is kind


@of_kinds("json")
def test_without_an_index_the_manifests_are_merged_and_a_missing_shard_is_named(broken: Data) -> None:
    index = read_index(broken.folder)
    assert index.column("num_documents").tolist() == [len(rows) for rows in broken.documents]
    for shard_id in (1, 2):
        manifest_path(broken.folder, shard_id).unlink()
    with pytest.raises(MissingShard, match=r"has 2 of 4 shards; missing: 1-2; run: shardprep run "):
        read_index(broken.folder)


@of_kinds("json")
def test_an_index_that_is_not_whole_is_refused_by_its_own_error(broken: Data, tmp_path: Path) -> None:
    good = read_index(broken.folder).to_json()
    changes: list[tuple[Callable[[bytes], bytes], type[Exception], str]] = [
        (lambda raw: raw.replace(b'"version": 2', b'"version": 3', 1), UnknownVersion, "version 3"),
        (lambda raw: raw[:-9], BrokenShard, "is not JSON"),
        (lambda raw: raw.replace(b'"spec"', b'"spic"'), BrokenShard, r"has no spec; .*shardprep verify"),
        (
            lambda raw: raw.replace(b"num_samples", b"num_widgets"),
            BrokenShard,
            r"columns is .*expected num_samples",
        ),
        (
            lambda raw: raw.replace(b'"num_shards": 4', b'"num_shards": 5'),
            BrokenShard,
            "shards is '4 rows', expected 5",
        ),
    ]
    for change, kind, message in changes:
        (broken.folder / "index.json").write_bytes(change(good))
        if b"}" in change(good)[-3:]:
            seal(broken.folder / "index.json")
        with pytest.raises(kind, match=message):
            read_index(broken.folder)
    (broken.folder / "index.json").write_bytes(good)
    assert read_index(broken.folder).to_json() == good
    with pytest.raises(NotFound, match="holds no data set"):
        read_index(tmp_path)


@of_kinds("json")
def test_manifests_of_two_data_sets_are_not_merged(broken: Data) -> None:
    path = manifest_path(broken.folder, 3)
    edit(path, lambda raw: raw.replace(b'"append_eos": false', b'"append_eos": true'))
    seal(path)
    with pytest.raises(OtherPlan, match="one folder holds one data set"):
        read_index(broken.folder)


def test_the_fingerprint_follows_what_decides_ids_and_nothing_else(prep: Prep) -> None:
    text = (prep.model_dir / "tokenizer.json").read_text()
    known = tokenizer_fingerprint(text)
    data = json.loads(text)
    assert all(isinstance(merge, list) for merge in data["model"]["merges"])
    assert any(data["model"]["merges"])

    def changed(change: Callable[[Any], Any]) -> str:
        copy = json.loads(text)
        change(copy)
        return tokenizer_fingerprint(json.dumps(copy))

    as_strings = [" ".join(merge) for merge in data["model"]["merges"]]
    assert changed(lambda copy: copy["model"].update(merges=as_strings)) == known
    assert changed(lambda copy: copy.update(truncation={"max_length": 5}, decoder=None)) == known
    assert tokenizer_fingerprint(json.dumps(dict(reversed(data.items())))) == known
    assert changed(lambda copy: copy["model"]["merges"].reverse()) != known
    assert changed(lambda copy: copy["model"].update(ignore_merges=False)) != known
    assert changed(lambda copy: copy["added_tokens"].pop()) != known
    assert changed(lambda copy: copy.update(post_processor=None)) != known
