"""Tars that others wrote, and every way to name shards."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import webdataset
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loader import get_llama3_dataloader
from loader.decode import parse_id_lists
from loader.external_tars import TarBytes, scan_tar
from loader.find_shards import expand_braces, find_inputs, find_shards
from shardprep.errors import BrokenShard, NotFound, ReadWriteError, ShardprepError, UnknownMember, UsageError
from tests.word_tokenizers import save_word_tokenizer

VOCAB_SIZE = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer of 1,000 words and a pad token."""
    folder = tmp_path_factory.mktemp("model")
    return save_word_tokenizer(folder, VOCAB_SIZE)


def write_tar(path: Path, documents: list[list[int]], field: str = "token_ids.json", **extra: Any) -> Path:
    """A tar by webdataset's own TarWriter: PAX headers, float mtimes."""
    with webdataset.TarWriter(str(path)) as writer:
        for number, ids in enumerate(documents):
            value: Any = np.array(ids) if field.endswith("npy") else ids
            writer.write({"__key__": f"doc_{path.stem}_{number}", field: value, **extra})
    return path


@pytest.fixture
def tars(tmp_path: Path) -> list[Path]:
    """Three tars of 5, 6 and 7 documents; a document's first id is its number, 0 to 17."""
    paths = []
    first = 0
    for shard, count in enumerate((5, 6, 7)):
        documents = [[number, *range(900, 900 + number % 4)] for number in range(first, first + count)]
        paths.append(write_tar(tmp_path / f"part-{shard:02d}.tar", documents))
        first += count
    return paths


def batches(input_shards: Any, model: str, **options: Any) -> list[Any]:
    options = {"num_workers": 0, "batch_size": 3, **options}
    with get_llama3_dataloader(input_shards, model_id=model, **options) as loader:
        found = list(loader)
        assert len(found) == len(loader)
    return found


def numbers(found: list[Any]) -> list[int]:
    return [int(ids[0]) for batch in found for ids in batch["input_ids"]]


def test_tars_that_webdataset_wrote_load_whole(tars: list[Path], model: str) -> None:
    found = batches(tars, model)
    assert sorted(numbers(found)) == list(range(18))
    for batch in found:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            assert ids[: int(mask.sum())].tolist() == [int(ids[0]), *range(900, 900 + int(ids[0]) % 4)]


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8", ">i8", "<u4"])
def test_npy_members_of_any_integer_width_load(tmp_path: Path, model: str, dtype: str) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(6):
            writer.write({"__key__": f"d{number}", "token_ids.npy": np.array([number, 998, 7], dtype)})
    found = batches(tmp_path / "a.tar", model)
    assert sorted(map(tuple, (row.tolist() for batch in found for row in batch["input_ids"]))) == [
        (number, 998, 7) for number in range(6)
    ]


def test_npy_and_json_members_may_stand_in_one_tar(tmp_path: Path, model: str) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(6):
            ids = np.array([number]) if number % 2 else [number]
            field = "token_ids.npy" if number % 2 else "token_ids.json"
            writer.write({"__key__": f"d{number}", field: ids, "text.txt": "x"})
    assert sorted(numbers(batches(tmp_path / "a.tar", model))) == list(range(6))


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
        tuple(tars),
        iter(tars),
        folder,
        f"{folder}/",
        f"{folder.name}/part-{{00,01,02}}.tar",
        [str(folder / "part-{00..01}.tar"), tars[2]],
    ]
    orders = {tuple(numbers(batches(shards, model))) for shards in named}
    assert len(orders) == 1


def test_a_folder_whose_name_has_braces_or_brackets_is_taken_as_it_is(tmp_path: Path, model: str) -> None:
    folder = tmp_path / "a{0..1}[x]"
    folder.mkdir()
    write_tar(folder / "t.tar", [[1], [2], [3]])
    assert sorted(numbers(batches(folder, model))) == [1, 2, 3]


@pytest.mark.parametrize(
    ("pattern", "expanded"),
    [
        ("s-{00000..00002}.tar", ["s-00000.tar", "s-00001.tar", "s-00002.tar"]),
        ("{8..10}", ["8", "9", "10"]),
        ("{08..10}", ["08", "09", "10"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{0..6..3}", ["0", "3", "6"]),
        ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]),
        ("{a,b{1,2}}", ["a", "b1", "b2"]),
        ("plain", ["plain"]),
    ],
)
def test_braces_expand_as_in_a_shell(pattern: str, expanded: list[str]) -> None:
    assert sorted(expand_braces(pattern)) == sorted(expanded)
    if "," not in pattern:
        assert expand_braces(pattern) == expanded


def test_a_pattern_naming_a_shard_that_does_not_exist_names_it(tars: list[Path]) -> None:
    with pytest.raises(NotFound, match=r"part-03\.tar does not exist \(of .*part-\{00\.\.03\}\.tar\)"):
        find_inputs(str(tars[0].parent / "part-{00..03}.tar"))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("nowhere", NotFound, "nowhere does not exist"),
        ("no-*.tar", NotFound, "does not exist"),
        ("part-{x}.tar", UsageError, "expected {00000..00009} or {a,b}"),
        ("s3://bucket/shard-00000.tar", UsageError, "no local file; pass cache_dir="),
        ("pipe:cat x.tar", UsageError, "no local file; pass cache_dir="),
    ],
)
def test_names_of_nothing_are_refused(
    tars: list[Path], name: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        find_inputs(name if ":" in name else str(tars[0].parent / name))


def test_a_tar_named_twice_is_refused_since_its_samples_would_come_twice(tars: list[Path]) -> None:
    with pytest.raises(UsageError, match="named twice"):
        find_inputs([tars[0], tars[0].parent / "part-*.tar"])


def test_an_empty_folder_and_an_empty_list_are_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(NotFound, match=r"holds no shards.*; if it holds raw text, run: shardprep plan "):
        batches(tmp_path, model)
    with pytest.raises(UsageError, match="input_shards is empty"):
        batches([], model)


def test_a_compressed_tar_among_others_is_refused_instead_of_passed_over(
    tars: list[Path], tmp_path: Path, model: str
) -> None:
    (tmp_path / "part-03.tar.gz").write_bytes(b"")
    with pytest.raises(UsageError, match=r"part-03\.tar\.gz is compressed; decompress it"):
        batches(tmp_path, model)
    assert len(numbers(batches(tmp_path / "part-*.tar", model))) == 18


def test_a_file_that_is_no_tar_is_refused_with_the_pattern_to_use(tmp_path: Path, model: str) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(UsageError, match="decompress"):
        batches(tmp_path / "a.tar.gz", model)


def test_tars_of_others_without_a_model_id_are_refused(tars: list[Path]) -> None:
    with pytest.raises(UsageError, match="pass model_id="):
        get_llama3_dataloader(tars, 3, num_workers=0)


def test_a_model_that_is_neither_a_folder_nor_to_be_had_is_not_found(
    tars: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        NotFound,
        match="no usable tokenizer was found for 'nobody/nothing-at-all', which is no folder here",
    ):
        get_llama3_dataloader(tars, 3, "nobody/nothing-at-all", num_workers=0)


def member_ends(path: Path) -> list[int]:
    """Byte behind each member of a tar, padding included."""
    with tarfile.open(path) as tar:
        return [member.offset_data + -(-member.size // 512) * 512 for member in tar.getmembers()]


def test_a_tar_cut_anywhere_is_refused_even_at_a_members_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [[number] * 300 for number in range(4)])
    whole = path.read_bytes()
    assert len(scan_tar(path).records) == 4
    ends = member_ends(path)
    assert len(ends) == 4
    cuts = {0, 100, 512, *ends, *(end - 1 for end in ends), *(end - 700 for end in ends), ends[-1] + 512}
    cut = tmp_path / "cut.tar"
    for size in sorted(cuts):
        cut.write_bytes(whole[:size])
        with pytest.raises(BrokenShard, match="cut short"):
            scan_tar(cut)
    cut.write_bytes(whole[: ends[-1] + 1024])  # the two end blocks, without the padding behind them
    assert len(scan_tar(cut).records) == 4


def test_webdataset_itself_takes_a_tar_cut_at_a_members_end_for_whole(tmp_path: Path) -> None:
    """The trap that the test above is for."""
    path = write_tar(tmp_path / "a.tar", [[1], [2], [3]])
    path.write_bytes(path.read_bytes()[: member_ends(path)[1]])
    assert len(list(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))) == 2
    with pytest.raises(BrokenShard, match="without the two zero blocks"):
        scan_tar(path)


def test_tars_joined_with_cat_are_refused_instead_of_losing_the_second(tmp_path: Path) -> None:
    one, two = write_tar(tmp_path / "a.tar", [[1]]), write_tar(tmp_path / "b.tar", [[2]])
    one.write_bytes(one.read_bytes() + two.read_bytes())
    with pytest.raises(BrokenShard, match="goes on behind its end"):
        scan_tar(one)


def test_garbage_is_no_tar(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(bytes(range(256)) * 8)
    with pytest.raises(BrokenShard, match="no tar, or is damaged"):
        scan_tar(path)
    path.write_bytes(b"\x1f\x8b" + bytes(1022))
    with pytest.raises(BrokenShard, match="compressed"):
        scan_tar(path)


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
    found = scan_tar(tmp_path / "a.tar")
    raw = (tmp_path / "a.tar").read_bytes()
    assert len(found.records) == 3
    assert [raw[at : at + n] for at, n in found.records[["offset", "num_bytes"]].tolist()] == [b"[1]"] * 3


def test_a_sample_without_token_ids_is_refused_with_the_fields_it_has(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [[1]], "tokens.json", **{"text.txt": "x"})
    with pytest.raises(
        BrokenShard, match=r"'doc_a_0' has the fields text\.txt, tokens\.json, expected token_ids"
    ):
        scan_tar(path)


def test_dots_in_keys_are_refused_instead_of_merging_samples(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("part-0.8_1.token_ids.json", "part-0.8_2.token_ids.json"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"[1]"))
    merged = list(webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False))
    assert [set(sample) - {"__key__", "__url__", "__local_path__"} for sample in merged] == [
        {"8_1.token_ids.json", "8_2.token_ids.json"}  # the trap: one sample of the two
    ]
    with pytest.raises(BrokenShard, match=r"'part-0' has the fields 8_1\.token_ids\.json, 8_2\.token"):
        scan_tar(tmp_path / "a.tar")


def test_two_samples_of_one_key_side_by_side_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for _ in range(2):
            info = tarfile.TarInfo("same.token_ids.json")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"[1]"))
    with pytest.raises(BrokenShard, match=r"two members 'token_ids\.json' for sample 'same'"):
        scan_tar(tmp_path / "a.tar")


def test_a_loss_mask_is_refused_since_leaving_it_out_would_change_the_training(tmp_path: Path) -> None:
    mask: dict[str, Any] = {"loss_mask.npy": np.array([1])}
    path = write_tar(tmp_path / "a.tar", [[1]], **mask)
    with pytest.raises(UnknownMember, match="could change the training"):
        scan_tar(path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[1, 2", "no JSON list of token ids"),
        (b'{"ids": [1]}', "no JSON list of token ids"),
        (b"[1.5]", "no JSON list of token ids"),
        (b"[99999999999]", "no JSON list of token ids"),
        (b"[[1], [2]]", "no JSON list of token ids"),
        (b"[1000]", "the tokenizer has 0 to 999; is model_id the model that made them?"),
        (b"[-1]", "the tokenizer has 0 to 999"),
        (b"[true]", "no JSON list of token ids"),
        (b"[" * 3000 + b"]" * 3000, "no JSON list of token ids"),
        (b"[" + b"9" * 5000 + b"]", "no JSON list of token ids"),
        (b"7", "no JSON list of token ids"),
    ],
)
def test_ids_that_are_none_are_refused_with_sample_and_shard(
    tmp_path: Path, model: str, raw: bytes, message: str
) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar"), encoder=False) as writer:
        for number, data in enumerate((b"[1]", raw, b"[3]")):
            writer.write({"__key__": f"d{number}", "token_ids.json": data})
    with pytest.raises(BrokenShard, match=r"sample 1 of .*a\.tar") as error:
        batches(tmp_path / "a.tar", model)
    assert message in str(error.value)


def test_a_huge_last_id_is_refused_where_lengths_are_counted_beforehand(tmp_path: Path, model: str) -> None:
    for number, raw in enumerate((b"[1, " + b"9" * 5000 + b"]", b"[1, 99999999999999999999]")):
        path = tmp_path / f"{number}.tar"
        with webdataset.TarWriter(str(path), encoder=False) as writer:
            writer.write({"__key__": "d", "token_ids.json": raw})
        with pytest.raises(BrokenShard, match=r"sample 0 of .*\.tar holds no JSON list"):
            batches(path, model, batch_size=1, seq_len=2)
    with webdataset.TarWriter(str(path)) as writer:
        writer.write({"__key__": "d", "token_ids.npy": np.array([1, 2**64 - 1], np.uint64)})
    with pytest.raises(BrokenShard, match=r"sample 0 of .*\.tar holds ids from 1 to"):
        batches(path, model, batch_size=1, seq_len=2)


def npy_saying(array: np.ndarray, found: str, said: str) -> bytes:
    """An array's .npy with something else in its header, of the same length."""
    file = io.BytesIO()
    np.save(file, array)
    raw = file.getvalue()
    assert found.encode() in raw[:128]
    head = raw[:128].replace(found.encode(), said.encode()).rstrip(b" \n")
    return head.ljust(127) + b"\n" + raw[128:]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("(3,)", "(3000000000000,)"),
        ("(3,)", "(2,)"),
        ("(3,)", "(3 1,)"),
        ("(3,)", "(-3,)"),
        ("<i8", "<f8"),
        ("<i8", "<i4"),
        ("<i8", "|O8"),
        ("False", "True "),
        ("'shape'", "'spahe'"),
        ("NUMPY", "NUMPI"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"seq_len": 2}])
def test_an_npy_header_that_is_not_of_its_ids_is_refused(
    tmp_path: Path, model: str, found: str, said: str, options: dict[str, Any]
) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar"), encoder=False) as writer:
        raw = npy_saying(np.array([1, 2, 3], np.int64), found, said)
        for number in range(3):
            whole = npy_saying(np.array([1, 2, 3], np.int64), "(3,)", "(3,)")
            writer.write({"__key__": f"d{number}", "token_ids.npy": raw if number == 1 else whole})
    with pytest.raises(BrokenShard, match=r"a\.tar: token_ids\.npy of sample 'd1' has"):
        batches(tmp_path / "a.tar", model, batch_size=1, **options)


def packed_tar(path: Path, **members: bytes) -> Path:
    """Two rows of four ids, as ours are without their idx; some members exchanged."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "doc_starts": np.array([0, 3, 5], np.uint32),
        "row_tokens": np.array([4, 3], np.uint32),
        "token_ids": np.arange(8, dtype=np.uint16).reshape(2, 4),
    }
    with webdataset.TarWriter(str(path), encoder=False) as writer:
        whole = {f"{name}.npy": npy_saying(array, "NUMPY", "NUMPY") for name, array in arrays.items()}
        writer.write({"__key__": "rows", **whole, **{f"{name}.npy": data for name, data in members.items()}})
    return path


PACKED_FAULTS = {
    "ids of another width": {"token_ids": npy_saying(np.arange(8).reshape(2, 4), "<i8", "<i8")},
    "signed ids": {"token_ids": npy_saying(np.zeros((2, 4), np.int16), "<i2", "<i2")},
    "ids in the other byte order": {"token_ids": npy_saying(np.zeros((2, 4), ">u2"), ">u2", ">u2")},
    "a million million rows of nothing": {
        "token_ids": npy_saying(np.zeros((1, 0), np.uint16), "(1, 0)", "(1000000000000, 0)")
    },
    "no rows": {"token_ids": npy_saying(np.zeros((0, 4), np.uint16), "(0, 4)", "(0, 4)")},
    "more rows than bytes": {"token_ids": npy_saying(np.zeros((2, 4), np.uint16), "(2, 4)", "(9999999, 4)")},
    "a row longer than rows are": {"row_tokens": npy_saying(np.array([5, 4], np.uint32), "<u4", "<u4")},
    "a row of none": {"row_tokens": npy_saying(np.array([4, 0], np.uint32), "<u4", "<u4")},
    "fewer lengths than rows": {"row_tokens": npy_saying(np.array([4], np.uint32), "<u4", "<u4")},
    "starts of another width": {"doc_starts": npy_saying(np.array([0, 3, 5]), "<i8", "<i8")},
    "starts behind the rows": {"doc_starts": npy_saying(np.array([0, 8], np.uint32), "<u4", "<u4")},
    "starts that do not ascend": {"doc_starts": npy_saying(np.array([3, 3], np.uint32), "<u4", "<u4")},
}


@pytest.mark.parametrize("fault", PACKED_FAULTS)
def test_packed_members_that_are_not_as_ours_are_refused(tmp_path: Path, fault: str) -> None:
    assert scan_tar(packed_tar(tmp_path / "whole.tar")).records["num_tokens"].tolist() == [4, 3]
    with pytest.raises(BrokenShard, match=r"a\.tar: .*'rows'"):
        scan_tar(packed_tar(tmp_path / "a.tar", **PACKED_FAULTS[fault]))


@pytest.mark.parametrize("array", [np.ones((2, 2), np.int64), np.ones(3), np.array([2**40])])
def test_npy_that_holds_no_ids_is_refused(tmp_path: Path, model: str, array: np.ndarray) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "d", "token_ids.npy": array})
    with pytest.raises(
        BrokenShard, match=r"a\.tar: token_ids\.npy of sample 'd' has|sample 0 of .*a\.tar holds"
    ):
        batches(tmp_path / "a.tar", model, batch_size=1)


def test_a_tar_that_changed_since_it_was_scanned_is_refused(tars: list[Path], model: str) -> None:
    with get_llama3_dataloader(tars, 3, model, num_workers=0) as loader:
        write_tar(tars[1], [[number] * 5000 for number in range(6)])
        with pytest.raises(BrokenShard, match=r"part-01\.tar has .* bytes; it changed since it was scanned"):
            list(loader)


@pytest.mark.processes
def test_an_error_in_a_worker_keeps_its_class_and_its_message(tmp_path: Path, model: str) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar"), encoder=False) as writer:
        for number in range(4):
            writer.write({"__key__": f"d{number}", "token_ids.json": b"[1" if number == 2 else b"[1]"})
    with pytest.raises(ShardprepError, match=r"sample 2 of .*a\.tar holds no JSON list") as error:
        batches(tmp_path / "a.tar", model, batch_size=2, num_workers=2)
    assert type(error.value) is BrokenShard


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


def test_empty_documents_and_the_batch_of_one_load(tmp_path: Path, model: str) -> None:
    path = write_tar(tmp_path / "a.tar", [[], [5], [6, 7]])
    found = batches(path, model, batch_size=3)
    assert sorted(found[0]["attention_mask"].sum(1).tolist()) == [0, 1, 2]
    assert len(batches(path, model, batch_size=1)) == 3


@pytest.mark.slow
def test_scanning_reads_a_tar_of_small_members_once_in_large_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "a.tar", [[1]] * 3000)
    sizes, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: sizes.append(count := real(*args)) or count)
    assert len(scan_tar(path).records) == 3000
    assert path.stat().st_size > 4 << 20
    assert sum(sizes) <= 1.1 * path.stat().st_size
    assert max(sizes) == 1 << 20
    assert len(sizes) < 60, "not one per member"


def baseline_samples(path: Path) -> Iterator[list[int]]:
    for sample in webdataset.WebDataset(str(path), shardshuffle=False):
        yield json.loads(sample["token_ids.json"])


def test_the_loader_reads_what_webdataset_reads(tars: list[Path], model: str) -> None:
    expected = sorted(ids for path in tars for ids in baseline_samples(path))
    found = batches(tars, model, batch_size=1)
    assert sorted(batch["input_ids"][0].tolist() for batch in found) == expected


class FailingReads:
    """``os.preadv`` that fails with these codes first; no wait between attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, codes: list[int]) -> None:
        self.codes, self.real = codes, os.preadv
        monkeypatch.setattr(os, "preadv", self)
        monkeypatch.setattr(time, "sleep", lambda _: None)

    def __call__(self, handle: int, buffers: list[memoryview], offset: int) -> int:
        if self.codes:
            code = self.codes.pop(0)
            raise OSError(code, os.strerror(code))
        return self.real(handle, buffers, offset)


def test_a_scan_that_fails_is_tried_again_and_then_names_the_tar(
    tars: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    external = tars[0]
    whole = vars(scan_tar(external))
    FailingReads(monkeypatch, [errno.EIO, errno.ESTALE])
    (source,) = find_shards(external).sources
    assert source.scanned
    for name, value in vars(source.scanned).items():
        assert np.array_equal(value, whole[name])
    FailingReads(monkeypatch, [errno.EIO] * 100)
    with pytest.raises(ReadWriteError, match=rf"{external} cannot be read in 7 attempts: .*output error"):
        find_shards(external)
    FailingReads(monkeypatch, [errno.EACCES])
    with pytest.raises(ReadWriteError, match=rf"{external} cannot be read: .*Permission denied"):
        find_shards(external)


def test_slices_of_a_tar_are_those_of_its_bytes_near_and_far(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(3 << 20)
    (tmp_path / "a").write_bytes(data)
    random = Random(0)
    with TarBytes(tmp_path / "a") as tar:
        assert len(tar) == len(data)
        first = 0
        for _ in range(3000):
            first = random.choice([first, first + random.randrange(2000), random.randrange(len(data) + 600)])
            end = first + random.choice([0, 1, 512, 512, 5000, 2 << 20])
            assert tar[first:end] == data[first:end]


def test_a_tar_that_shrinks_while_it_is_read_is_an_error_and_no_signal(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    with TarBytes(tmp_path / "a") as tar:
        assert tar[0:512] == bytes(512)
        os.truncate(tmp_path / "a", 4096)
        with pytest.raises(BrokenShard, match="a ended at byte 524288 while it was read"):
            tar[524288:524800]
