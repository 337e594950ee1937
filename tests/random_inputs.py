"""Random input files of every format and random folders, with independent checks of how they are read.

tests/plain_reader.py reads the files. ``RANDOM_FILES=5000`` tests 5,000 files of each format.
"""

from __future__ import annotations

import bz2
import faulthandler
import gzip
import json
import lzma
import multiprocessing
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import zstandard

from tests.input_writers import bgzip, seekable_zstd, table_bytes, zstd_of_blocks
from tests.plain_reader import plain_records
from tests.world import World

FRAMES = ((7, 100, 1, 1000), (300,), (300,), (2000, 500), (2000, 500), (65_280,))
PACKERS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "": lambda data, _: data,
    ".gz": lambda data, rng: gzip.compress(data, rng.choice([1, 1, 6, 9])),
    ".zst": lambda data, rng: zstandard.ZstdCompressor(level=rng.choice([1, 3, 6])).compress(data),
    ".xz": lambda data, rng: lzma.compress(data, preset=rng.choice([0, 0, 0, 0, 0, 6])),
    ".bz2": lambda data, rng: bz2.compress(data, rng.choice([1, 1, 1, 9])),
    ".frames.zst": lambda data, rng: rng.choice([seekable_zstd, zstd_of_blocks])(data, rng.choice(FRAMES)),
    ".blocks.gz": lambda data, rng: bgzip(data, rng.choice(FRAMES)),
}
FORMATS = [f"{stem}{packed}" for stem in ("txt", "jsonl") for packed in PACKERS]
FORMATS += ["parquet", "stream.arrow", "file.arrow"]
ODD_LINES = [  # of JSON
    b"", b"   ", b"{", b"[1]", b'{"text": null}', b'{"text": 3}', b'{"text": NaN}', b'{"text": ""}',
    b'{"a": 1}', b'{"text": "\\ud800"}', b'{"text": "a\xff"}', b'{"text": "a\x00b"}',
    b'{"text": "a", "text": "b"}', b'{"text": "a", "te\\u0078t": "b"}', b'{"te\\u0078t":"a", "text"\t:"b"}',
    b'{"te\\u0078t" :"\\"text\\":"}', b'{"a": {"text": 1}, "text"\t: "c"}', b'{"a": "text", "text" :"d"}',
    b'{"text": "\\u0000 \\n both"}\r', b'{"text": "\\\\", "n": 18446744073709551616}',
    b'{"text": "a", "n": 1e999}', b'{"text": "a", "n": NaN}',
]  # fmt: skip
# The texts of an input (None if it was refused) and the number of records left out.
Found = tuple[list[str] | None, int]


def random_texts(rng: random.Random) -> list[str]:
    letters = rng.choice(["ab ", 'abc 한글\n"\\', "a\u00e9\u2028\t😀\r\n\0"])
    lengths = [0, 1, 5, 40, rng.choice([100, 100, 100, *[400] * 6, 5000])]
    sizes = rng.choices(lengths, k=rng.randrange(rng.choice([6, 6, 12, 40])))
    # Map random bytes to letters: choosing 5,000 letters one by one took half of the time.
    return [rng.randbytes(size).decode("latin-1").translate((letters * 256)[:256]) for size in sizes]


def file_name(form: str, seed: int) -> str:
    """Return a file name for a form: ``000007.frames.jsonl.zst`` for ``jsonl.frames.zst``."""
    stem, *rest = form.split(".")
    if form.endswith(("arrow", "parquet")):
        return f"{seed:06d}.{form}"
    return ".".join([f"{seed:06d}", *rest[:-1], stem, *rest[-1:]])


def _whole_file(form: str, rng: random.Random) -> bytes:
    texts = random_texts(rng)
    if form.endswith(("parquet", "arrow")):
        table = pyarrow.table({"id": range(len(texts)), "text": pyarrow.array(texts, pyarrow.string())})
        return table_bytes(table, form, rng.choice([3, 100]))
    stem, _, packed = form.partition(".")
    data = b"".join(_line(stem, text, rng) for text in texts)
    if rng.random() < 0.3:
        data = data.removesuffix(b"\n")
    return PACKERS[f".{packed}" if packed else ""](data, rng)


def _line(stem: str, text: str, rng: random.Random) -> bytes:
    if stem == "txt":
        end = rng.choice([b"\n", b"\n", b"\r\n", b"\r"])
        bad = b"\xff" if rng.random() < 0.02 else b""
        return re.sub(r"[\r\n]", " ", text).encode() + bad + end
    line = json.dumps({"id": 7, "text": text}, ensure_ascii=rng.random() < 0.5).encode()
    odd = [*ODD_LINES, line[:-3], line + b" ", b"\t" + line]
    return (rng.choice(odd) if rng.random() < 0.1 else line) + b"\n"


def _damaged(data: bytes, rng: random.Random) -> bytes:
    """Return the data cut at a random place, or with one bit flipped."""
    at = rng.randrange(len(data))
    flipped = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    return rng.choice([data[: max(at, 1)], flipped])  # an empty file is an input without documents


def independent(path: Path) -> Found:
    """Read a file with the plain reader."""
    try:
        records = [*plain_records(path)]
    except Exception:
        return None, 0
    return [each.text for each in records if each.text], sum(each.reason != "" for each in records)


def ours(world: World, seed: int) -> tuple[list[str] | None, Counter[str]]:
    """Return the texts that this project reads from a folder, and the number of bad records by file.

    The number of shards is random. ``verify`` checks that the shards have read every byte.
    """
    rng = random.Random(seed)
    environ = rng.choice([{}, {"DATASET_BATCH_SIZE": "1"}, {"DATASET_BATCH_SIZE": "7"}])
    ended = world.try_plan(num_shards=rng.choice([1, 2, 5, 30]), max_bad_fraction=1)
    for number in range(0 if ended.code else len(world.plan_json()["cuts"]) - 1):
        ended = ended if ended.code else world.try_shard(number, environ=environ)
    ended = ended if ended.code else world.main("verify", world.data_dir)
    if ended.code == 65:
        return None, Counter()
    ended.ends(0)
    left_out, names = world.lines("quarantine"), world.inputs()
    places = [(names.index(line["input"]), line["input_offset"]) for line in left_out]
    assert places == sorted(places), "places ascend"
    return world.texts(), Counter(line["input"] for line in left_out)


def compare(form: str, seeds: Sequence[int], folder: Path) -> list[str]:
    """Compare both readers on one random file per seed, and return a result for each.

    A result is "equal", "WRONG: ...", or for a damaged file "refused" (by this project; the plain reader may
    accept it) or "aborted" (pyarrow aborts the process). Intact files are read together, and one by one only
    if that result differs.
    """
    results, whole = [], dict[str, Found]()
    together = World(folder / "together")
    for seed in seeds:
        rng = random.Random(f"{form} {seed}")
        path = together.raw_dir / file_name(form, seed)
        data = _whole_file(form, rng)
        if data and rng.random() < 0.2:
            alone = World(folder / "alone").raw({path.name: _damaged(data, rng)})
            results.append(_of_damaged(form, alone.raw_dir / path.name, alone, data))
            shutil.rmtree(folder / "alone")
            continue
        path.write_bytes(data)
        whole[path.name] = independent(path)
    results += _of_whole(whole, together, seeds[0])
    shutil.rmtree(folder / "together")
    return results


def _of_damaged(form: str, path: Path, world: World, whole: bytes) -> str:
    if form == "parquet" and _ends_pyarrow(path):
        return "aborted"
    expected = independent(path)
    texts, bad = ours(world, len(whole))
    if texts is None:
        return "refused"
    if expected[0] is None:  # reading by rows does not check all of a header
        path.write_bytes(whole)
        expected = independent(path)
    return "equal" if (texts, bad.total()) == expected else f"WRONG: {path.name}, which is damaged"


def _of_whole(whole: Mapping[str, Found], world: World, seed: int) -> list[str]:
    texts, bad = ours(world, seed)
    names = [*whole] if texts is None else world.inputs()  # the plan's order differs from that of the names
    expected = [text for name in names for text in whole[name][0] or []]
    num_bad = {name: of_file for name, (_, of_file) in whole.items() if of_file}
    if (texts, bad) == (expected, num_bad) or (texts is None and not expected):
        return ["equal"] * len(whole)
    if len(whole) == 1:
        return [f"WRONG: {name}" for name in whole]
    results = []
    for name in whole:
        alone = World(world.data_dir / name)
        shutil.copy(world.raw_dir / name, alone.raw_dir)
        results += _of_whole({name: whole[name]}, alone, seed)
    return results if {*results} != {"equal"} else ["WRONG: only when they are read together"]


def _ends_pyarrow(path: Path) -> bool:
    """Return whether reading the column metadata of a Parquet file aborts the process.

    pyarrow 26 does not catch a C++ exception there if a column's statistics are damaged.
    """

    def look() -> None:
        faulthandler.disable()
        os.close(2)  # hide the message of C++
        metadata = pyarrow.parquet.ParquetFile(path).metadata
        for group in range(metadata.num_row_groups):
            for column in range(metadata.num_columns):
                metadata.row_group(group).column(column)

    process = multiprocessing.get_context("fork").Process(target=look)
    process.start()
    process.join()
    return process.exitcode == -signal.SIGABRT


# File name -> why it is left out, or "" if it is an input.
NAMES = {
    "a.txt": "", "B.JSONL": "", "c.ndjson.ZSTD": "", "_k=v.parquet": "", "가 나.text": "", "state.txt": "",
    "license_plates.txt": "", "line\nend.jsonl": "", "[x].json.bz2": "",
    "x.psv": "unknown suffix", "notes.md": "unknown suffix", "a.txt~": "unknown suffix",
    ".m.jsonl": "hidden", "._p.jsonl": "AppleDouble", "_d.json": "begins with _",
    "README.ko.txt": "file of a repository", "requirements-dev.txt": "file of a repository",
    "dataset_info.json": "note of datasets", "cache-0a_00001_of_00002.arrow": "cache of datasets",
    "v1.metadata.json": "note of Iceberg",
}  # fmt: skip
FOLDERS = {"sub": "", "b=1": "", "data.v1": "", ".git": "hidden", "_old": "begins with _"}
# Pattern of --also -> the names of NAMES that it adds.
PATTERNS = {
    "": (), "*.md": ("notes.md",), "*.MD,readme*": ("notes.md", "README.ko.txt"), ".m*": (".m.jsonl",),
    "_d*,*.psv": ("_d.json", "x.psv"),
}  # fmt: skip


def random_folder(root: Path, rng: random.Random) -> None:
    """Fill the empty folder ``root`` with empty files, which every input format allows."""
    folders = [root]
    elsewhere = [root.with_name(f"{root.name} {number}") for number in range(2)]
    for file in elsewhere:
        file.touch()
    inputs = [name for name, reason in NAMES.items() if not reason]
    for _ in range(rng.randint(1, 40)):
        kind = rng.choices(["file", "folder", "file link", "folder link", "fifo"], (50, 20, 10, 12, 8))[0]
        names = [*FOLDERS] if "folder" in kind else inputs if kind == "fifo" else [*NAMES]
        path = rng.choice(folders) / rng.choice(names)
        if os.path.lexists(path):
            continue
        if kind == "file":
            path.touch()
        elif kind == "folder":
            path.mkdir()
            folders.append(path)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(rng.choice(folders if kind == "folder link" else elsewhere))


def check_listing(
    root: Path,
    taken: list[str],
    told: list[tuple[str, str]],
    *,
    recursive: bool,
    follow_links: bool,
    also: str,
) -> None:
    """Compare a listing with an independent one.

    ``taken`` are the inputs and ``told`` the (reason, name) of what was left out; without inputs it may be
    empty.
    """

    def reason_of(path: Path) -> str:
        if path.is_dir():
            if not FOLDERS[path.name] and path.is_symlink() and not follow_links:
                return "link to a folder"
            return FOLDERS[path.name] or ("" if recursive else "folder")
        if not path.is_file():
            return "FIFO, socket or device"
        return "" if path.name in PATTERNS[also] else NAMES[path.name]

    def place(name: str) -> Path:  # with the real path of its folder, which may be reached through links
        return (root / name).parent.resolve() / Path(name).name

    folders, waiting = set[Path](), [root.resolve()]
    left_out = set[tuple[str, Path]]()
    files: dict[Path, set[Path]] = {}  # the names by which a file may be taken
    while waiting:
        folder = waiting.pop()
        for path in [] if folder in folders else folder.iterdir():
            reason = reason_of(path)
            if reason:
                left_out.add((reason, path))
            elif path.is_dir():
                waiting.append(path.resolve())
            else:
                files.setdefault(path.resolve(), set()).add(path)
        folders.add(folder)
    # If a file has several names, exactly one is taken: the file itself, rather than a link to it.
    of_taken = {*map(place, taken)}
    assert len(of_taken) == len(taken) == len(files), files
    for file, names in files.items():
        assert len(names & of_taken) == 1, names
        assert file not in names or file in of_taken
        left_out |= {("file that is taken by another name", name) for name in names - of_taken}
    if not taken:
        return
    again = [name for reason, name in told if reason == "folder that is taken already"]
    assert all((root / name).resolve() in folders for name in again)
    others = [(reason, place(name)) for reason, name in told if name not in again]
    assert sorted(others) == sorted(left_out)
