"""External tars, and all ways to name shards: the loader reads what tarfile and json read, or refuses."""

from __future__ import annotations

import io
import json
import random
import re
import tarfile
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import webdataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from loader import BrokenShard, ShardprepError
from tests.external_tars import write_numbered_data, write_numbered_tars, write_tar
from tests.oracle.forms import DataSets
from tests.word_tokenizers import save_word_tokenizer
from tests.world import epoch_of, open_loader, refuses

VOCAB_SIZE = 1000
EOS = VOCAB_SIZE - 1
SIZE, KIND, MAGIC = 124, 156, 257  # bytes of a header


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_word_tokenizer(tmp_path_factory.mktemp("model"), VOCAB_SIZE)


@pytest.fixture
def tars(tmp_path: Path) -> list[Path]:
    """Three tars of 6 documents each; the first id of a document is its number, 0 to 17."""
    return write_numbered_tars(tmp_path, 18, 3)


def read(shards: Any, model: str | Path, **options: Any) -> list[list[int]]:
    """Return the ids of all samples in the order of the shards."""
    epoch = epoch_of(shards, 1, model_id=model, **{"shuffle": False, **options})
    return [sample["input_ids"] for (sample,) in epoch]


# Names. tests/oracle/test_refusals.py has those that are refused.


def test_every_way_to_name_shards_gives_the_same_batches(
    tars: list[Path], sets: DataSets, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ours = tars[0].parent, sets["documents"]
    monkeypatch.chdir(folder.parent)
    (folder / "a{0..1}[x]").mkdir()  # a folder's name is not a pattern
    links = [folder / "a{0..1}[x]" / path.name for path in tars]
    for link, path in zip(links, tars, strict=True):
        link.symlink_to(path)
    named: list[Any] = [
        *(f"{folder}/part-{{00..02}}.tar", f"{folder}/part-*.tar", folder / "part-0[0-2].tar"),
        *([str(path) for path in tars], iter(tars), f"{folder}/", links[0].parent),
        f"{folder.name}/part-{{00,01,02}}.tar",
        [f"{folder}/part-{{00..01}}.tar", tars[2]],
    ]
    samples = [webdataset.WebDataset(str(path), shardshuffle=False) for path in tars]
    expected = [json.loads(sample["token_ids.json"]) for of_tar in samples for sample in of_tar]
    assert all(read(shards, model) == expected for shards in named)
    # One of our data sets, by its folder, its index, or some of its shards.
    of_ours = sorted(ours.glob("*.tar"))
    whole, one, rest = (read(each, ours / "tokenizer") for each in (ours, of_ours[1], of_ours[::2]))
    for shards in (ours / "index.json", f"{ours}/shard-{{00000..00002}}.tar", f"{ours}/*.tar", of_ours):
        assert read(shards, ours / "tokenizer") == whole
    assert len(one) > 10
    assert sorted(one + rest) == sorted(whole)


# Whole tars, and headers


def test_a_cut_or_concatenated_tar_is_refused(tmp_path: Path, model: str) -> None:
    """webdataset accepts such a tar."""
    path = write_tar(tmp_path / "a.tar", [{"token_ids.json": [number] * 300} for number in range(4)])
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        ends = [member.offset_data + -(-member.size // 512) * 512 for member in tar.getmembers()]
    cut = tmp_path / "cut.tar"
    contents = [whole[:size] for size in (0, 100, 512, *ends, *(end - 1 for end in ends), ends[-1] + 512)]
    for content in [*contents, whole + whole]:
        cut.write_bytes(content)
        with refuses(BrokenShard, path=cut):
            open_loader(cut, 1, model_id=model)
    cut.write_bytes(whole[: ends[-1] + 1024])  # with two end blocks, without the padding after them
    assert len(read(cut, model)) == 4


def member(name: str = "a.token_ids.json", data: bytes = b"[1]", **records: str) -> bytes:
    """Return a member of a tar; PAX ``records`` may contradict its header."""
    info = tarfile.TarInfo(name)
    info.size, info.pax_headers = len(data), records
    return info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512)


def with_field(raw: bytes, offset: int, field: bytes, *, header: int = 0) -> bytes:
    """Replace a field of a header and update its checksum."""
    block = bytearray(raw[header : header + 512])
    block[offset : offset + len(field)] = field
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return raw[:header] + bytes(block) + raw[header + 512 :]


def expected_of(raw: bytes) -> list[list[int]] | None:
    """Read the ids of a tar with tarfile and json. None if a sample does not have exactly one list of ids."""
    found: list[list[int]] = []
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:", errors="surrogateescape") as tar:
        items = [(item.name, tar.extractfile(item).read()) for item in tar if item.isreg()]  # type: ignore[union-attr]
    split = [(match[1], match[2].lower(), data) for name, data in items
             if (match := re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", name))]  # fmt: skip
    for _, members in groupby(split, key=lambda each: each[0]):
        ids = [data for _, field, data in members if field == "token_ids.json"]
        if len(ids) != 1:
            return None
        found.append(json.loads(ids[0]))
    return found


SIZES = (  # values of numeric header fields, valid and invalid
    b"-0000000001\0", b"\xff" * 12, b"\x80" + b"\xff" * 11, b"one hundred\0", b"0x000000010\0",
    b"\xa0" + bytes(11), b"\x80" + (3).to_bytes(11, "big"),
)  # fmt: skip


END = bytes(1024)
TWO = member() + member("b.token_ids.json") + END
# A tar, and the offset of its wrong header. tarfile reads these sizes as 0. More headers are altered below.
WRONG_HEADERS = [(with_field(member(data=bytes(3 << 20)), KIND, b"x"), 0)]  # PAX records of 3 MiB
WRONG_HEADERS += [(member(size=size) + END, 0) for size in ("-512", "1e3", "", "9" * 30, " 3", "3_0")]
for place, value in ((SIZE, b"\x80" + b"\xff" * 11), (SIZE, b"text\0"), (KIND, b"S"), (KIND, b"Z")):
    WRONG_HEADERS.append((with_field(TWO, place, value, header=1024), 1024))


def test_an_invalid_header_is_refused_with_its_place(tmp_path: Path, model: str) -> None:
    path = tmp_path / "a.tar"
    for raw, header in WRONG_HEADERS:
        path.write_bytes(raw)
        with refuses(BrokenShard, path=path, found=f"byte {header}"):
            read(path, model)


def some_tar(chance: random.Random) -> bytes:
    """Return a tar of any format with samples of ids and all kinds of other members and headers."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=chance.randrange(3)) as tar:  # ustar, GNU, PAX
        for number in range(chance.randrange(1, 5)):
            key = chance.choice(["a", "한", "d/" * 60, "d/" * 130 + "e/"]) + str(number)
            for field in ["token_ids.json", *chance.choice([[], ["text.txt"], ["Folder"], ["link"]])]:
                info = tarfile.TarInfo(f"{key}.{field}")
                data = b"[%d]" % number
                data = data.ljust(chance.choice([3, 511, 512, 513, 1500])) if "." in field else b""
                info.type = {"Folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}.get(field, tarfile.REGTYPE)
                info.linkname = chance.choice(["x", "y" * 90]) if field == "link" else ""
                info.size, info.mtime = len(data), chance.choice([0, 1, 1700000000])
                if tar.format == tarfile.PAX_FORMAT and chance.random() < 0.3:
                    records = {"comment": "é", "size": str(info.size), "mtime": "1.5"}
                    records["path"] = "p.token_ids.json"
                    info.pax_headers = dict([chance.choice([*records.items()])])
                try:
                    tar.addfile(info, io.BytesIO(data))
                except ValueError:  # a name too long for ustar
                    continue
    return file.getvalue()


def altered(raw: bytes, chance: random.Random) -> bytes:
    """Return the tar with a byte or a field changed, or with a block removed or inserted."""
    blocks = [raw[at : at + 512] for at in range(0, len(raw), 512)]
    headers = [number for number, block in enumerate(blocks) if block[257:262] == b"ustar"]
    fields: list[tuple[int, list[bytes]]] = [  # (offset, new values)
        (SIZE, [*(b"%011o\0" % size for size in (0, 1, 512, 513, 1024, 1 << 30)), *SIZES]),
        (KIND, [b"0", b"\0", b"1", b"5", b"7", b"L", b"K", b"x", b"g", b"S", b"X", b"q"]),
        (MAGIC, [b"ustar  \0", bytes(8), b"ustar\x0000", b"xstar\x0000"]),
        (345, [b"p/q", b"0123", b"\xff\xfe"]),
        (0, [b"n.token_ids.json\0", b"folder/\0", bytes(100), b"\xff.token_ids.json\0"]),
        (100, [b"abc", b"-000001\0", b"   644 \0", b"\0", b"\xff" * 8]),
        (136, [b"-1", b"\x80" + bytes(11), b"1_1\0"]),
        (chance.randrange(148), [chance.randbytes(1)]),
        (chance.randrange(156, 512), [chance.randbytes(1)]),
    ]
    how = chance.randrange(8)
    if how < 5:
        offset, values = chance.choice(fields)
        return with_field(raw, offset, chance.choice(values), header=512 * chance.choice(headers or [0]))
    place = chance.randrange(len(blocks))
    if how == 5:
        at = chance.randrange(len(raw))
        return raw[:at] + chance.randbytes(1) + raw[at + 1 :]
    rest = blocks[place + 1 :] if how == 6 else [chance.choice(blocks), *blocks[place:]]
    return b"".join([*blocks[:place], *rest])


@pytest.mark.slow
@settings(max_examples=100)
@given(st.integers(0, 2**63))
def test_an_accepted_tar_has_the_samples_that_tarfile_finds(model: str, seed: int) -> None:
    chance = random.Random(seed)
    raw = some_tar(chance)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.tar")
        path.write_bytes(raw)
        try:
            assert read(path, model) == expected_of(raw)
        except ShardprepError:  # a repeated path, a sample without ids, or no sample
            assert not expected_of(raw)
        for _ in range(chance.randrange(1, 4)):
            raw = altered(raw, chance)
        path.write_bytes(raw)
        try:
            found = read(path, model)
        except ShardprepError:
            return
    assert found == expected_of(raw)


def test_a_tar_that_changes_after_the_scan_is_an_error(tars: list[Path], model: str) -> None:
    with open_loader(tars, 3, model_id=model) as loader:
        write_tar(tars[1], [{"token_ids.json": [number] * 5000} for number in range(6)])
        with refuses(BrokenShard, path=tars[1]):
            list(loader)


# Ids


def npy(array: Any, found: str = "NUMPY", said: str = "NUMPY") -> bytes:
    """Return the .npy of an array with ``found`` replaced by ``said`` in its header."""
    file = io.BytesIO()
    np.save(file, array)
    raw = file.getvalue()
    assert found.encode() in raw[:128]
    head = raw[:128].replace(found.encode(), said.encode()).rstrip(b" \n")
    return head.ljust(127) + b"\n" + raw[128:]


IDS = np.array([1, 2, 3], np.int64)
BAD_ARRAYS = {
    "a shape beyond the member": npy(IDS, "(3,)", "(3000000000000,)"),
    "a shape of less": npy(IDS, "(3,)", "(2,)"),
    "no shape": npy(IDS, "(3,)", "(3 1,)"),
    "a negative shape": npy(IDS, "(3,)", "(-3,)"),
    "floats": npy(np.ones(3)),
    "objects": npy(IDS, "<i8", "|O8"),
    "another width": npy(IDS, "<i8", "<i4"),
    "the other order": npy(IDS, "False", "True "),
    "no field of numpy's": npy(IDS, "'shape'", "'spahe'"),
    "no array": npy(IDS, "NUMPY", "NUMPI"),
    "two dimensions": npy(np.ones((2, 2), np.int64)),
    "an id beyond the vocabulary": npy(np.array([VOCAB_SIZE])),
    "the largest of all": npy(np.array([1, 2**64 - 1], np.uint64)),
}
# tests/oracle/test_refusals.py has more texts.
BAD_TEXTS = (b"[1000]", b"7", b'{"ids": [1]}', b"[" * 3000 + b"]" * 3000, b"[" + b"9" * 5000 + b"]")
PACKED = {
    "doc_starts": np.array([0, 3, 5], np.uint32),
    "row_tokens": np.array([4, 3], np.uint32),
    "token_ids": np.arange(8, dtype=np.uint16).reshape(2, 4),
}
BAD_ROWS: dict[str, tuple[str, bytes]] = {
    "ids of another width": ("token_ids", npy(np.arange(8).reshape(2, 4))),
    "signed ids": ("token_ids", npy(np.zeros((2, 4), np.int16))),
    "ids in the other byte order": ("token_ids", npy(np.zeros((2, 4), ">u2"))),
    "rows of nothing": ("token_ids", npy(np.zeros((1, 0), np.uint16), "(1, 0)", "(1000000000000, 0)")),
    "no rows": ("token_ids", npy(np.zeros((0, 4), np.uint16))),
    "more rows than bytes": ("token_ids", npy(np.zeros((2, 4), np.uint16), "(2, 4)", "(9999999, 4)")),
    "a row longer than rows are": ("row_tokens", npy(np.array([5, 4], np.uint32))),
    "a row of none": ("row_tokens", npy(np.array([4, 0], np.uint32))),
    "fewer lengths than rows": ("row_tokens", npy(np.array([4], np.uint32))),
    "starts of another width": ("doc_starts", npy(np.array([0, 3, 5]))),
    "starts behind the rows": ("doc_starts", npy(np.array([0, 8], np.uint32))),
    "starts that do not ascend": ("doc_starts", npy(np.array([3, 3], np.uint32))),
    "a mask of other rows": ("loss_mask", npy(np.ones((2, 3), np.uint8))),
}
GOOD: dict[str, dict[str, bytes]] = {
    "text": {"token_ids.json": b"[1]"},
    "array": {"token_ids.npy": npy(IDS)},
    "rows": {f"{name}.npy": npy(array) for name, array in PACKED.items()},
}
# The form of a sample, its wrong member, and the contents of that member.
WRONG_IDS = {f"{raw[:12].decode()} of {len(raw)}": ("text", "token_ids.json", raw) for raw in BAD_TEXTS}
WRONG_IDS |= {name: ("array", "token_ids.npy", raw) for name, raw in BAD_ARRAYS.items()}
WRONG_IDS |= {fault: ("rows", f"{name}.npy", raw) for fault, (name, raw) in BAD_ROWS.items()}


@pytest.mark.parametrize("fault", WRONG_IDS)
def test_malformed_ids_are_refused(tmp_path: Path, model: str, fault: str) -> None:
    form, name, raw = WRONG_IDS[fault]
    good = GOOD[form]
    path = write_tar(tmp_path / "a.tar", [good, good])
    expected = {"text": [[1]], "array": [[1, 2, 3]], "rows": [[0, 1, 2, 3], [4, 5, 6]]}[form]
    assert read(path, model) == 2 * expected
    write_tar(path, [{**good, name: raw}, good])
    for seq_len in (None, 4 if form == "rows" else 2):
        with refuses(BrokenShard, path=path):
            read(path, model, seq_len=seq_len)


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8", ">i8", "<u4"])
def test_packing_adds_a_missing_eos_to_arrays_and_lists(tmp_path: Path, model: str, dtype: str) -> None:
    """The scan counts ids and finds the last id of each document, so that rows can be laid out."""
    texts = ["[]", " [ ] ", f"[{EOS}]", "[1,2]", "[\n 1,\n 22\n]\n", f"[7, {EOS}, 8]", "[998]", f"[3, {EOS}]"]
    documents = [json.loads(text) for text in texts]
    samples: list[dict[str, Any]] = [{"token_ids.json": text.encode(), "text.txt": "x"} for text in texts]
    samples += [{"token_ids.npy": np.array(ids, dtype)} for ids in documents]
    path = write_tar(tmp_path / "a.tar", samples)
    assert read(path, model) == 2 * documents
    rows = [[token] for ids in documents for token in (ids if ids[-1:] == [EOS] else [*ids, EOS])]
    assert read(path, model, seq_len=1) == 2 * rows


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.lists(
        st.text("[]0123456789, -.e", max_size=8)
        | st.lists(st.integers(0, 999)).map(str)
        | st.lists(st.integers(0, 9)).map(lambda ids: json.dumps(ids, separators=(",", ""))),
        min_size=1, max_size=4,
    ),
    st.booleans(),
)  # fmt: skip
@example(["[1,2", "3]"], False)
@example(["[1]]", "[[2]"], False)
def test_an_accepted_list_has_the_ids_that_json_reads(model: str, texts: list[str], is_row: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_tar(Path(folder, "a.tar"), [{"token_ids.json": text.encode()} for text in texts])
        try:
            found = read(path, model, **({"seq_len": 1} if is_row else {}))
        except BrokenShard:
            assert not all(map(is_list_of_ids, texts))
            return
    expected = [json.loads(without_zeros(text)) for text in texts]
    if is_row:
        expected = [[token] for ids in expected for token in (ids if ids[-1:] == [EOS] else [*ids, EOS])]
    assert found == expected


def without_zeros(text: str) -> str:
    return re.sub(r"\b0+(?=\d)", "", text)  # JSON forbids leading zeros, but the loader accepts them


def is_list_of_ids(text: str) -> bool:
    try:
        ids = json.loads(text)
    except ValueError:
        return False
    return isinstance(ids, list) and all(type(each) is int and 0 <= each < VOCAB_SIZE for each in ids)


def test_tars_that_name_no_model_are_read_with_the_tokenizer_of_llama_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a call get_llama3_dataloader(tars, batch_size=4). Beside a data set a model must be named."""
    folder = write_numbered_data(tmp_path, 8, 1)
    named: list[str] = []
    real = AutoTokenizer.from_pretrained
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: named.append(name) or folder)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda _, **options: real(folder, **options))
    with caplog.at_level("INFO"), open_loader(folder, 4) as loader:
        assert len(loader) == 2
    assert named == ["meta-llama/Meta-Llama-3-8B"]
    assert sum(named[0] in record.getMessage() for record in caplog.records) == 1
