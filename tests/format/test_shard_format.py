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
from shardprep.errors import BrokenShard, MissingShard, NotFound, OtherPlan, ShardprepError, UnknownVersion
from shardprep.format.dataset_spec import (
    token_bytes,
    tokenizer_fingerprint,
)
from shardprep.format.idx import read_idx
from shardprep.format.index import read_index
from shardprep.format.manifest import check_shard, read_manifest
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


Change = Callable[[bytes], bytes]
PathOf = Callable[[Path, int], Path]
# The file of shard 1, what it holds afterwards (None: it is gone), and the error.
VIOLATIONS: dict[str, tuple[PathOf, Change | None, type[ShardprepError]]] = {
    "manifest of another version": (
        manifest_path, lambda raw: raw.replace(b'"version": 3', b'"version": 7', 1), UnknownVersion
    ),
    "manifest cut short": (manifest_path, lambda raw: raw[:100], BrokenShard),
    "manifest without counts": (manifest_path, lambda raw: raw.replace(b'"counts"', b'"count"'), BrokenShard),
    "another kind of JSON": (manifest_path, lambda raw: b"[1]", BrokenShard),
    "manifest gone": (manifest_path, None, MissingShard),
    "manifest of another plan": (
        manifest_path, lambda raw: re.sub(rb'"plan_id": ".{12}', b'"plan_id": "0123456789ab', raw), OtherPlan
    ),
    "manifest of another shard": (
        manifest_path, lambda raw: raw.replace(b'"shard_id": 1', b'"shard_id": 2'), OtherPlan
    ),
    "tar gone": (tar_path, None, MissingShard),
    "tar cut short": (tar_path, lambda raw: raw[:-512], BrokenShard),
    "idx gone": (idx_path, None, MissingShard),
    "idx cut short": (idx_path, lambda raw: raw[:-28], BrokenShard),
}  # fmt: skip
FORGED = ("manifest without counts", "manifest of another plan", "manifest of another shard")


@pytest.mark.parametrize("violation", VIOLATIONS)
@of_kinds("json")
def test_each_violation_of_a_shard_has_its_error_that_names_the_file_and_what_to_type(
    broken: Data, violation: str
) -> None:
    check_shard(broken.folder, 1, broken.plan.plan_id)
    path_of, change, kind = VIOLATIONS[violation]
    path = path_of(broken.folder, 1)
    if change is None:
        path.unlink()
    else:
        edit(path, change)
    if violation in FORGED:
        seal(manifest_path(broken.folder, 1))
    with pytest.raises(kind) as caught:
        check_shard(broken.folder, 1, broken.plan.plan_id)
    assert type(caught.value) is kind
    assert caught.value.path == str(path)
    assert kind is UnknownVersion or "--shard_id 1 --output_dir" in str(caught.value.remedy)


IDX_VIOLATIONS: dict[str, tuple[Change, type[ShardprepError]]] = {
    "version": (lambda raw: raw[:8] + b"\4" + raw[9:], UnknownVersion),
    "foreign file": (lambda raw: b"PK" + raw[2:], BrokenShard),
    "half a header": (lambda raw: raw[:30], BrokenShard),
    "empty": (lambda raw: b"", BrokenShard),
    "half a record": (lambda raw: raw[:-1], BrokenShard),
    "other plan": (lambda raw: raw[:30] + b"xx" + raw[32:], OtherPlan),
    "other shard": (lambda raw: raw[:24] + b"\2" + raw[25:], OtherPlan),
}


@pytest.mark.parametrize("violation", IDX_VIOLATIONS)
@of_kinds("json")
def test_each_violation_of_an_idx_has_its_error(broken: Data, violation: str) -> None:
    read_idx(broken.folder, broken.plan.spec, 1)
    damage, kind = IDX_VIOLATIONS[violation]
    edit(idx_path(broken.folder, 1), damage)
    with pytest.raises(kind) as caught:
        read_idx(broken.folder, broken.plan.spec, 1)
    assert type(caught.value) is kind
    assert caught.value.path == str(idx_path(broken.folder, 1))


@of_kinds("json")
def test_without_an_index_the_manifests_are_merged_and_a_missing_shard_is_named(broken: Data) -> None:
    index = read_index(broken.folder)
    assert index.column("num_documents").tolist() == [len(rows) for rows in broken.documents]
    for shard_id in (1, 2):
        manifest_path(broken.folder, shard_id).unlink()
    with pytest.raises(MissingShard) as caught:
        read_index(broken.folder)
    assert caught.value.found == "2 of 4 shards, without 1-2"
    assert str(caught.value.remedy).startswith("shardprep run ")


# What is changed in index.json, and the error; each file is sealed again, but for the one cut short.
INDEX_VIOLATIONS: dict[str, tuple[Change, type[ShardprepError]]] = {
    "version": (lambda raw: raw.replace(b'"version": 3', b'"version": 4', 1), UnknownVersion),
    "cut short": (lambda raw: raw[:-9], BrokenShard),
    "no spec": (lambda raw: raw.replace(b'"spec"', b'"spic"'), BrokenShard),
    "another column": (lambda raw: raw.replace(b"num_samples", b"num_widgets"), BrokenShard),
    "a shard too few": (lambda raw: raw.replace(b'"num_shards": 4', b'"num_shards": 5'), BrokenShard),
    "more shards than can be": (
        lambda raw: raw.replace(b'"num_shards": 4', b'"num_shards": 3000000000'),
        BrokenShard,
    ),
}


@pytest.mark.parametrize("violation", INDEX_VIOLATIONS)
@of_kinds("json")
def test_each_violation_of_an_index_has_its_error(broken: Data, violation: str) -> None:
    path = broken.folder / "index.json"
    good = read_index(broken.folder).to_json()
    path.write_bytes(good)
    assert read_index(broken.folder).to_json() == good
    change, kind = INDEX_VIOLATIONS[violation]
    edit(path, change)
    if violation != "cut short":
        seal(path)
    with pytest.raises(kind) as caught:
        read_index(broken.folder)
    assert caught.value.path == str(path)
    assert kind is UnknownVersion or "shardprep verify" in str(caught.value.remedy)


def test_a_folder_without_a_manifest_holds_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_index(tmp_path)


@of_kinds("json")
def test_manifests_of_two_data_sets_are_not_merged(broken: Data) -> None:
    path = manifest_path(broken.folder, 3)
    edit(path, lambda raw: raw.replace(b'"append_eos": false', b'"append_eos": true'))
    seal(path)
    with pytest.raises(OtherPlan):
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
