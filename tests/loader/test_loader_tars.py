"""Tars that others wrote, and every way to name shards."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import webdataset
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loader import get_llama3_dataloader
from loader.decode import parse_id_lists
from loader.external_tars import TarBytes, scan_tar, tar_members
from loader.find_shards import expand_braces, find_shards
from shardprep.errors import BrokenShard, NotFound, ReadWriteError, ShardprepError, UnknownMember, UsageError
from tests.word_tokenizers import save_word_tokenizer

VOCAB_SIZE = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer of 1,000 words and a pad token."""
    return save_word_tokenizer(tmp_path_factory.mktemp("model"), VOCAB_SIZE)


def write_tar(path: Path, samples: list[dict[str, Any]]) -> Path:
    """A tar by webdataset's own TarWriter: PAX headers, float mtimes. Bytes are written as they are."""
    with webdataset.TarWriter(str(path)) as writer:
        for number, fields in enumerate(samples):
            writer.write({"__key__": f"d{number}", **fields})
    return path


def write_lists(path: Path, documents: list[list[int]]) -> Path:
    return write_tar(path, [{"token_ids.json": ids} for ids in documents])


@pytest.fixture
def tars(tmp_path: Path) -> list[Path]:
    """Three tars of 5, 6 and 7 documents; a document's first id is its number, 0 to 17."""
    paths, first = [], 0
    for shard, count in enumerate((5, 6, 7)):
        documents = [[number, *range(900, 900 + number % 4)] for number in range(first, first + count)]
        paths.append(write_lists(tmp_path / f"part-{shard:02d}.tar", documents))
        first += count
    return paths


def documents_of(input_shards: Any, model: str, **options: Any) -> list[list[int]]:
    """The ids of all samples, in the order in which the loader gives them."""
    options = {"num_workers": 0, "batch_size": 1, **options}
    with get_llama3_dataloader(input_shards, model_id=model, **options) as loader:
        return [
            ids[mask == 1].tolist()
            for batch in loader
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]


def test_the_loader_reads_what_webdataset_reads(tars: list[Path], model: str) -> None:
    expected = [
        json.loads(sample["token_ids.json"])
        for path in tars
        for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    ]
    assert sorted(documents_of(tars, model)) == sorted(expected)


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8", ">i8", "<u4"])
def test_arrays_of_any_integers_load_beside_lists_in_one_tar(tmp_path: Path, model: str, dtype: str) -> None:
    documents = [[number, 998, 7] for number in range(6)] + [[], [999]]
    samples: list[dict[str, Any]] = [
        {"token_ids.npy": np.array(ids, dtype)} if number % 2 else {"token_ids.json": ids, "text.txt": "x"}
        for number, ids in enumerate(documents)
    ]
    path = write_tar(tmp_path / "a.tar", samples)
    assert sorted(documents_of(path, model)) == sorted(documents)


def test_every_way_to_name_shards_gives_the_same_batches(
    tars: list[Path], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tars[0].parent
    monkeypatch.chdir(folder.parent)
    named = [
        str(folder / "part-{00..02}.tar"),
        str(folder / "part-*.tar"),
        folder / "part-0[0-2].tar",
        [str(path) for path in tars],
        iter(tars),
        f"{folder}/",
        f"{folder.name}/part-{{00,01,02}}.tar",
        [str(folder / "part-{00..01}.tar"), tars[2]],
    ]
    assert len({str(documents_of(shards, model)) for shards in named}) == 1


def test_a_folder_whose_name_has_braces_or_brackets_is_taken_as_it_is(tmp_path: Path, model: str) -> None:
    (tmp_path / "a{0..1}[x]").mkdir()
    write_lists(tmp_path / "a{0..1}[x]" / "t.tar", [[1], [2]])
    assert sorted(documents_of(tmp_path / "a{0..1}[x]", model)) == [[1], [2]]


@pytest.mark.parametrize(
    ("pattern", "expanded"),
    [
        ("s-{00000..00002}.tar", ["s-00000.tar", "s-00001.tar", "s-00002.tar"]),
        ("{8..10}", ["8", "9", "10"]),
        ("{08..10}", ["08", "09", "10"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{0..6..3}", ["0", "3", "6"]),
        ("{b,a}-{0..1}", ["b-0", "b-1", "a-0", "a-1"]),
        ("plain", ["plain"]),
    ],
)
def test_braces_expand_as_in_a_shell(pattern: str, expanded: list[str]) -> None:
    assert expand_braces(pattern) == expanded


@pytest.mark.parametrize(
    ("named", "kind", "fault"),
    [
        ("nowhere", NotFound, "nowhere"),
        ("no-*.tar", NotFound, "no-*.tar"),
        ("part-{00..03}.tar", NotFound, "part-03.tar"),
        ("part-{x}.tar", UsageError, "part-{x}.tar"),
        ("part-00.tar.gz", UsageError, "part-00.tar.gz"),
        (["part-00.tar", "part-*.tar"], UsageError, "part-00.tar"),
        ([".", "empty"], UsageError, "part-00.tar.gz"),  # another of these tars would be passed over
        ("empty", NotFound, "empty"),
    ],
)
def test_names_of_nothing_of_something_else_and_of_a_tar_twice_are_refused(
    tars: list[Path], named: Any, kind: type[ShardprepError], fault: str
) -> None:
    folder = tars[0].parent
    (folder / "part-00.tar.gz").write_bytes(b"\x1f\x8b")
    (folder / "empty").mkdir()
    names = [str(folder / name) for name in ([named] if isinstance(named, str) else named)]
    with pytest.raises(kind) as caught:
        find_shards(names)
    assert str(caught.value.path) == str(folder / fault)


@pytest.mark.parametrize("url", ["s3://bucket/shard-00000.tar", "pipe:cat x.tar"])
def test_a_url_is_refused_without_a_folder_for_its_copy(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_shards(url)
    assert caught.value.remedy == "cache_dir="


def test_tars_of_others_without_a_model_id_are_refused(tars: list[Path]) -> None:
    with pytest.raises(UsageError) as caught:
        get_llama3_dataloader(tars, 3, num_workers=0)
    assert caught.value.remedy == "model_id="


def test_a_model_that_is_neither_a_folder_nor_to_be_had_is_not_found(
    tars: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NotFound, match="nobody/nothing-at-all"):
        get_llama3_dataloader(tars, 3, "nobody/nothing-at-all", num_workers=0)


def test_a_tar_cut_anywhere_or_joined_is_refused_though_webdataset_takes_it(tmp_path: Path) -> None:
    path = write_lists(tmp_path / "a.tar", [[number] * 300 for number in range(4)])
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        ends = [member.offset_data + -(-member.size // 512) * 512 for member in tar.getmembers()]
    assert len(ends) == 4
    cut = tmp_path / "cut.tar"
    for size in sorted({0, 100, 512, *ends, *(end - 1 for end in ends), ends[-1] + 512}):
        cut.write_bytes(whole[:size])
        with pytest.raises(BrokenShard, match=r"cut\.tar"):
            scan_tar(cut)
    cut.write_bytes(whole[: ends[-1] + 1024])  # the two end blocks, without the padding behind them
    assert len(scan_tar(cut).records) == 4
    cut.write_bytes(whole[: ends[1]])
    assert len(list(webdataset.WebDataset(str(cut), shardshuffle=False, empty_check=False))) == 2
    cut.write_bytes(whole + whole)
    with pytest.raises(BrokenShard, match=r"cut\.tar"):
        scan_tar(cut)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_korean_names_folders_and_links_are_read_in_every_tar_format(
    tmp_path: Path, form: int
) -> None:
    folder = "data/" + "deep/" * 20 if form == tarfile.USTAR_FORMAT else "깊은/" * 60
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        directory = tarfile.TarInfo("data")
        directory.type = tarfile.DIRTYPE
        tar.addfile(directory)
        for number in range(3):
            for field, data in (("token_ids.json", b"[1]"), ("text.txt", b"x" * 700)):
                info = tarfile.TarInfo(f"{folder}sample{number}.{field}")
                info.size = len(data)
                info.mtime = 1.5 if form == tarfile.PAX_FORMAT else 1
                tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("link.token_ids.json")
        link.type, link.linkname = tarfile.SYMTYPE, "nowhere"
        tar.addfile(link)
    places = scan_tar(tmp_path / "a.tar").records[["offset", "num_bytes"]].tolist()
    raw = (tmp_path / "a.tar").read_bytes()
    assert [raw[at : at + n] for at, n in places] == [b"[1]"] * 3


def plain_tar(path: Path, *names: str) -> Path:
    with tarfile.open(path, "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"[1]"))
    return path


@pytest.mark.parametrize(
    ("names", "kind", "key"),
    [
        (["a.tokens.json", "a.text.txt"], BrokenShard, "'a'"),
        # webdataset makes one sample of these two: what stands before the first dot is the key.
        (["part-0.8_1.token_ids.json", "part-0.8_2.token_ids.json"], BrokenShard, "'part-0'"),
        (["same.token_ids.json", "same.token_ids.json"], BrokenShard, "'same'"),
        (["a.token_ids.json", "a.loss_mask.npy"], UnknownMember, "'a'"),
    ],
)
def test_members_that_make_no_sample_of_ids_are_refused_with_the_samples_key(
    tmp_path: Path, names: list[str], kind: type[ShardprepError], key: str
) -> None:
    with pytest.raises(kind, match=key):
        scan_tar(plain_tar(tmp_path / "a.tar", *names))


@pytest.mark.parametrize(
    "raw",
    [
        b"[1, 2",
        b'{"ids": [1]}',
        b"[1.5]",
        b"[99999999999]",
        b"[[1], [2]]",
        b"[1000]",
        b"[-1]",
        b"[true]",
        b"[" * 3000 + b"]" * 3000,
        b"[" + b"9" * 5000 + b"]",
        b"7",
    ],
    ids=lambda raw: f"{raw[:12].decode()} of {len(raw)}",
)
@pytest.mark.parametrize("options", [{}, {"seq_len": 2}], ids=["documents", "rows"])
def test_text_that_is_no_list_of_the_tokenizers_ids_is_refused_with_its_sample_and_tar(
    tmp_path: Path, model: str, raw: bytes, options: dict[str, Any]
) -> None:
    path = write_tar(tmp_path / "a.tar", [{"token_ids.json": data} for data in (b"[1]", raw, b"[3]")])
    with pytest.raises(BrokenShard, match=r"sample 1 of .*a\.tar") as caught:
        documents_of(path, model, **options)
    assert caught.value.path == str(path)


def npy_saying(array: npt.NDArray[Any], found: str = "NUMPY", said: str = "NUMPY") -> bytes:
    """An array's .npy with something else in its header, of the same length."""
    file = io.BytesIO()
    np.save(file, array)
    raw = file.getvalue()
    assert found.encode() in raw[:128]
    head = raw[:128].replace(found.encode(), said.encode()).rstrip(b" \n")
    return head.ljust(127) + b"\n" + raw[128:]


IDS = np.array([1, 2, 3], np.int64)
ARRAY_FAULTS = {
    "a shape beyond the member": npy_saying(IDS, "(3,)", "(3000000000000,)"),
    "a shape of less": npy_saying(IDS, "(3,)", "(2,)"),
    "no shape": npy_saying(IDS, "(3,)", "(3 1,)"),
    "a negative shape": npy_saying(IDS, "(3,)", "(-3,)"),
    "floats": npy_saying(np.ones(3)),
    "objects": npy_saying(IDS, "<i8", "|O8"),
    "another width": npy_saying(IDS, "<i8", "<i4"),
    "the other order": npy_saying(IDS, "False", "True "),
    "no field of numpy's": npy_saying(IDS, "'shape'", "'spahe'"),
    "no array": npy_saying(IDS, "NUMPY", "NUMPI"),
    "two dimensions": npy_saying(np.ones((2, 2), np.int64)),
    "an id beyond 32 bits": npy_saying(np.array([2**40])),
    "an id beyond the vocabulary": npy_saying(np.array([VOCAB_SIZE])),
    "a negative id": npy_saying(np.array([-1])),
    "the largest of all": npy_saying(np.array([1, 2**64 - 1], np.uint64)),
}


@pytest.mark.parametrize("fault", ARRAY_FAULTS)
@pytest.mark.parametrize("options", [{}, {"seq_len": 2}], ids=["documents", "rows"])
def test_an_array_that_holds_no_ids_of_the_tokenizer_is_refused(
    tmp_path: Path, model: str, fault: str, options: dict[str, Any]
) -> None:
    arrays = [npy_saying(IDS), ARRAY_FAULTS[fault], npy_saying(IDS)]
    path = write_tar(tmp_path / "a.tar", [{"token_ids.npy": raw} for raw in arrays])
    with pytest.raises(BrokenShard) as caught:
        documents_of(path, model, **options)
    assert caught.value.path == str(path)


PACKED: dict[str, Any] = {
    "doc_starts": np.array([0, 3, 5], np.uint32),
    "row_tokens": np.array([4, 3], np.uint32),
    "token_ids": np.arange(8, dtype=np.uint16).reshape(2, 4),
}
PACKED_FAULTS = {
    "ids of another width": ("token_ids", npy_saying(np.arange(8).reshape(2, 4))),
    "signed ids": ("token_ids", npy_saying(np.zeros((2, 4), np.int16))),
    "ids in the other byte order": ("token_ids", npy_saying(np.zeros((2, 4), ">u2"))),
    "a million million rows of nothing": (
        "token_ids",
        npy_saying(np.zeros((1, 0), np.uint16), "(1, 0)", "(1000000000000, 0)"),
    ),
    "no rows": ("token_ids", npy_saying(np.zeros((0, 4), np.uint16))),
    "more rows than bytes": ("token_ids", npy_saying(np.zeros((2, 4), np.uint16), "(2, 4)", "(9999999, 4)")),
    "a row longer than rows are": ("row_tokens", npy_saying(np.array([5, 4], np.uint32))),
    "a row of none": ("row_tokens", npy_saying(np.array([4, 0], np.uint32))),
    "fewer lengths than rows": ("row_tokens", npy_saying(np.array([4], np.uint32))),
    "starts of another width": ("doc_starts", npy_saying(np.array([0, 3, 5]))),
    "starts behind the rows": ("doc_starts", npy_saying(np.array([0, 8], np.uint32))),
    "starts that do not ascend": ("doc_starts", npy_saying(np.array([3, 3], np.uint32))),
    "a mask of other rows": ("loss_mask", npy_saying(np.ones((2, 3), np.uint8))),
}


@pytest.mark.parametrize("fault", PACKED_FAULTS)
def test_packed_members_that_are_not_as_ours_are_refused(tmp_path: Path, fault: str) -> None:
    whole = {f"{name}.npy": npy_saying(array) for name, array in PACKED.items()}
    assert scan_tar(write_tar(tmp_path / "a.tar", [whole])).records["num_tokens"].tolist() == [4, 3]
    name, raw = PACKED_FAULTS[fault]
    with pytest.raises(BrokenShard, match=r"a\.tar.*'d0'"):
        scan_tar(write_tar(tmp_path / "a.tar", [{**whole, f"{name}.npy": raw}]))


def test_a_tar_that_changed_since_it_was_scanned_is_refused(tars: list[Path], model: str) -> None:
    with get_llama3_dataloader(tars, 3, model, num_workers=0) as loader:
        write_lists(tars[1], [[number] * 5000 for number in range(6)])
        with pytest.raises(BrokenShard) as caught:
            list(loader)
    assert caught.value.path == str(tars[1])


@pytest.mark.processes
def test_an_error_in_a_worker_keeps_its_class_and_its_fields(tmp_path: Path, model: str) -> None:
    documents = [b"[1" if number == 2 else b"[1]" for number in range(4)]
    path = write_tar(tmp_path / "a.tar", [{"token_ids.json": raw} for raw in documents])
    with pytest.raises(ShardprepError, match="sample 2 of ") as caught:
        documents_of(path, model, batch_size=2, num_workers=2)
    assert type(caught.value) is BrokenShard
    assert caught.value.path == str(path)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 10**8 - 1) | st.integers(0, 9)), min_size=1),
    st.sampled_from([", ", ","]),
)
def test_json_lists_are_read_without_json_as_json_reads_them(lists: list[list[int]], comma: str) -> None:
    texts = [json.dumps(ids, separators=(comma, "")).encode() for ids in lists]
    found = parse_id_lists([memoryview(text) for text in texts])
    assert found is not None
    counts, ids = found
    assert counts.tolist() == [len(ids) for ids in lists]
    assert ids.tolist() == [number for ids in lists for number in ids]


@pytest.mark.slow
@settings(max_examples=400)
@given(st.lists(st.text("[]0123456789, -.e", max_size=12), min_size=1, max_size=4))
@example(["[1 2,]"])
@example(["[,1 2]"])
@example(["[1,,2]"])
@example(["[1,2", "3]"])
@example(["[1]]", "[[2]"])
@example(["[123456789]"])
def test_what_is_read_without_json_is_json(texts: list[str]) -> None:
    found = parse_id_lists([memoryview(text.encode()) for text in texts])
    if found is None:
        return
    for text, count in zip(texts, found[0].tolist(), strict=True):
        text = re.sub(r"\b0+(?=\d)", "", text)  # zeros in front change no number, though JSON forbids them
        assert len(json.loads(text)) == count
    assert found[1].tolist() == [n for text in texts for n in json.loads(re.sub(r"\b0+(?=\d)", "", text))]


def test_a_scan_that_fails_is_tried_again_and_then_names_the_tar(
    tars: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, codes, real = scan_tar(tars[0]), [errno.EIO, errno.ESTALE], os.open

    def failing(path: Any, *args: Any, **options: Any) -> int:
        if codes and str(path) == str(tars[0]):
            raise OSError(codes[0], os.strerror(codes.pop(0)))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", failing)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    found = find_shards(tars[0])
    assert not codes
    assert found.fingerprint == find_shards(tars[0]).fingerprint
    assert found.num_samples == len(whole.records)
    for faults in ([errno.EIO] * 100, [errno.EACCES]):
        codes[:] = faults
        with pytest.raises(ReadWriteError, match=re.escape(f"{tars[0]} cannot be read")):
            find_shards(tars[0])


def test_a_tar_that_shrinks_while_it_is_scanned_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = write_lists(tmp_path / "a.tar", [[number] * 30_000 for number in range(4)])
    with TarBytes(path) as tar:
        members = tar_members(tar)
        next(members)
        os.truncate(path, 4096)
        with pytest.raises(BrokenShard, match=r"a\.tar"):
            list(members)
