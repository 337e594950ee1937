"""Hostile data sets and output folders: commands must stay in their own folders, and within limits.

Each file and each subfolder of a data set is replaced by a link, a FIFO, a device and the like, or forged
with right hashes. Output folders have files of somebody else before a command writes there. A folder
``outside`` is the target of all links. No file in it may be read, changed or removed, and none may be added.

The long form is a grid of kind of file, kind of damage, command and user, with one case of each class:
- Files of one kind are written and read by the same code. Which shard or job they are of changes nothing.
- A command meets a file if it makes a call on it in an undisturbed run, for what it does next depends on the
  results of its calls alone. If it only lists the folder of the file, it can notice no more than its type.
- Commands that read a data set by the same lines (three exports, two forms of ``blank``) take turns.
- Who runs a command, and who owns the data set, decides which calls are allowed, but not what file is
  refused: other users meet one damage of each sort (a link, what is no file, other content, a flipped bit).
- The other form of data set differs in its shards, and a blanked one in its lists and shards. Links and such
  are refused before it is known of what form a file is, so these files meet damage of the content.
- With ``--every_file`` all files of all data sets meet all commands.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import random
import re
import resource
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from tests.faults.forked_case import Ended
from tests.faults.judging import EQUAL, Failure, Outcome, Verdict, different, outcome_of, verdict_of_end
from tests.faults.small_data_sets import EXPORTS, Hit, SmallDataSet, Stage, Undisturbed
from tests.forged import content_sha256, rewrite_json

_OTHER_USER = 12345
_OLD_S = 1_000_000_000  # an access time before the last change, so that the next read updates it
_SPARSE_BYTES = 3 << 30
_MEMORY_BYTES = 1 << 30
_STACKS_BYTES = 256 << 20  # addresses of the stacks of threads
_M_ARENA_MAX = -8  # of mallopt
_SECRET = b"a-private-line-of-somebody-else\n"
_QUICK_FAULTS = 8
_QUICK_RUNS = 20
_LARGE = re.compile(r"forged: .*(million|MB|GiB|10\^|2\^)")  # forgeries that take seconds to write or to read
Change = Callable[[Path, "Outside"], object]  # of a path in the workplace
User = Literal["", "owner", "other"]  # another user owns the data set, or runs the command
_USERS: tuple[User, ...] = ("", "owner", "other")

# Commands that read a finished data set, and those that write shards.
_READERS = (
    "load", "peek", "peek at place", "status", "verify", "verify --fast", "stage", "clean", "duplicates",
    "overlap", "overlap in data", "export megatron", "export nanogpt", "export hf", "report", "doctor",
    "plan", "shard", "submit",
)  # fmt: skip
_OF_IDS = ("peek at id",)
# They start processes, which takes seconds.
_SLOW = ("run", "blank", "blank by id", "verify --deep")
_WRITERS = ("shard again", "run again")
# Commands that read a data set by the same lines.
_READ_ALIKE = {**dict.fromkeys(EXPORTS, "export"), "blank by id": "blank"}
_REFUSED_BLANKED = ("blank", *EXPORTS)  # undisturbed: all is blanked, and no other tool knows blanked ids
_OTHER_DATA = ("load", "peek", "export", "overlap")  # commands that compare no hashes of tars, or of lists


class Outside:
    """A folder beside the workplace that no command may look into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._before: dict[str, tuple[int, ...]] = {}

    def make(self) -> None:
        """Make it anew, with a secret."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        (self.folder / "secret").write_bytes(_SECRET)

    def copy_of(self, path: Path) -> Path:
        """Return the path of a copy of a file or a folder."""
        copy = self.folder / "copy"
        if path.is_dir():
            shutil.copytree(path, copy, symlinks=True)
        elif path.exists():
            shutil.copy(path, copy)
        else:
            copy.write_bytes(_SECRET)
        return copy

    def remember(self) -> None:
        """Remember all files. The next read of one will be noticed by its access time."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                os.utime(path, ns=(_OLD_S * 10**9, path.stat().st_mtime_ns))
        self._before = self._files()

    def _files(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for path in [self.folder, *self.folder.rglob("*")]:
            status = path.lstat()
            # The number of links shows a hard link, and ctime a change of mode or owner.
            facts = (status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            is_file = stat.S_ISREG(status.st_mode)
            found[str(path)] = (*facts, status.st_nlink, status.st_atime_ns if is_file else 0)
        return found

    def check(self, place: Path) -> None:
        """Raise Failure if a file was read, changed, added or removed, or if a copy of the secret exists."""
        now = self._files()
        for name in sorted({*now, *self._before}):
            if name not in now or name not in self._before:
                raise Failure(
                    "wrong", f"outside: {Path(name).name} was {'added' if name in now else 'removed'}"
                )
            if now[name][:-1] != self._before[name][:-1]:
                raise Failure("wrong", f"outside: {Path(name).name} was changed")
            if now[name] != self._before[name]:
                raise Failure("wrong", f"outside: {Path(name).name} was read")
        for path in _files_below(place):
            if path.stat().st_size < _MEMORY_BYTES and _SECRET.strip() in path.read_bytes():
                raise Failure("wrong", f"the secret is in {path.name}")


def _files_below(place: Path) -> Iterator[Path]:
    """Yield regular files. Without recursion, because one attack is a folder with 3,000 levels."""
    folders = [place]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # of that attack, whose levels have no file
                continue
            raise
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry))
            elif entry.is_file(follow_symlinks=False):
                yield Path(entry)


@dataclass(frozen=True)
class Attack:
    """A change of a workplace, before a command runs there."""

    words: str
    stage: Stage
    commands: Sequence[str]
    apply: Callable[[Path, Outside], object]  # called with the workplace
    kind: str = ""  # of the damage
    hidden: str = ""  # what is attacked, below the workplace: it may differ from the undisturbed run
    may_differ: bool = False  # if the command ends with 0
    kept: str = ""  # an output folder whose files the command must neither replace nor remove


def _instead(make: Change) -> Change:
    """Return a change that removes a file or a folder and calls ``make``."""

    def apply(path: Path, outside: Outside) -> None:
        copy = outside.copy_of(path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path, outside)
        if not path.is_symlink():
            shutil.rmtree(copy) if copy.is_dir() else copy.unlink()

    return apply


def _device(path: Path, _: Outside) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except OSError:  # without the right to do so
        path.symlink_to("/dev/zero")


def _sparse(path: Path, _: Outside) -> None:
    if path.is_dir():
        return
    with path.open("ab") as file:
        file.truncate(_SPARSE_BYTES)


def _flipped(path: Path, _: Outside) -> None:
    if not path.exists():  # removed, so that a shard is made again
        return
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


_OTHER_KINDS: dict[str, Change] = {
    "a link to a copy outside": _instead(lambda path, outside: path.symlink_to(outside.folder / "copy")),
    "a link to a secret": _instead(lambda path, outside: path.symlink_to(outside.folder / "secret")),
    "a link to nothing outside": _instead(lambda path, outside: path.symlink_to(outside.folder / "new")),
    "a link to the folder outside": _instead(lambda path, outside: path.symlink_to(outside.folder)),
    "a FIFO": _instead(lambda path, _: os.mkfifo(path)),
    "a device": _instead(_device),
    "a file": _instead(lambda path, _: path.write_bytes(b"{}")),
    "a folder": _instead(lambda path, _: path.mkdir()),
    "an empty file": _instead(lambda path, _: path.touch()),
    "a hole of 3 GiB": _instead(_sparse),
}
_CHANGED_FILES: dict[str, Change] = {"3 GiB, mostly a hole": _sparse, "a flipped bit": _flipped}
# In the grid: what a listing shows, what all users meet, and what is read before it is refused.
_OF_TYPE = "a link to the folder outside"
_OF_USERS = ("a link to a copy outside", "a FIFO", "a file", "a flipped bit")
_OF_CONTENT = ("a link to a copy outside", "a file", "an empty file", *_CHANGED_FILES)
_OF_FORM = re.compile("data/(shard|ids/|digests/|blanked)")  # kinds of files that differ by form or stage


def _replacements(data_set: SmallDataSet, stage: Stage) -> Iterator[Attack]:
    """Replace each file and subfolder of a data set by each kind."""
    data = data_set.templates / stage / "data"
    names = [path.relative_to(data).as_posix() for path in sorted(data.rglob("*"))]
    names += ["findings.json", "ids", "blanked", "jobs/attempts/1_0.r0"]
    commands: tuple[str, ...] = (*_READERS, *_OF_IDS, *_WRITERS, *_SLOW)
    if data_set.form != "with_ids":
        commands = tuple(command for command in commands if not command.endswith(" id"))
    if stage == "blanked":
        commands = tuple(command for command in commands if command not in _REFUSED_BLANKED)
    for name in dict.fromkeys(names):
        is_file = (data / name).is_file()
        kinds = {**_OTHER_KINDS, **(_CHANGED_FILES if is_file else {})}
        for kind, change in kinds.items():
            yield Attack(
                words=f"{stage}: {name} is {kind}",
                stage=stage,
                commands=commands,
                apply=partial(_apply_to, f"data/{name}", change),
                kind=kind,
                hidden=f"data/{name}",
            )


def _apply_to(name: str, change: Change, place: Path, outside: Outside) -> None:
    change(place / name, outside)


# Output folders. ----------------------------------------------------------------------------------------

_OUTPUTS = {
    "stage": "staged",
    "blank": "staged",
    "overlap": "exported/overlap",
    "export megatron": "exported/megatron",
    "export nanogpt": "exported/nanogpt",
    "export hf": "exported/hf",
    "train_tokenizer": "trained",
    "duplicates": "names",
    "report": "report",
}
_FOREIGN = (
    "README.md", "plan.json", "index.json", "findings.json", "shard-00000.tar", "shard-00000.idx",
    "shard-00000.json", "tokenizer", "tokenizer/tokenizer.json", "tokenizer/model.safetensors",
    "ids/shard-00000.jsonl", "digests/shard-00000.digests", "quarantine/shard-00001.jsonl",
    "blanked/shard-00000.json", "excluded.keys", "overlap.json", "overlap.jsonl", "names.txt",
    "overlap.html", "tokenizer.json", "train.bin", "shard-00000.bin", "dataset_info.json", "data_args.txt",
)  # fmt: skip
_FOREIGN_KINDS: dict[str, Change] = {
    "a file": lambda path, _: path.write_bytes(b"of somebody else"),
    "an empty file": lambda path, _: path.touch(),
    "a link outside": lambda path, outside: path.symlink_to(outside.folder / "secret"),
    "a link to the folder outside": lambda path, outside: path.symlink_to(outside.folder),
    "a link to nothing outside": lambda path, outside: path.symlink_to(outside.folder / "new"),
    "a FIFO": lambda path, _: os.mkfifo(path),
}


def _outputs() -> Iterator[Attack]:
    """Put files of somebody else into the folders that commands write."""
    for command, output in _OUTPUTS.items():
        stage: Stage = "raw" if command == "train_tokenizer" else "full"
        for name in _FOREIGN if command not in ("duplicates", "report") else ("",):
            for kind, change in _FOREIGN_KINDS.items():
                if not name and kind == "an empty file":
                    continue  # a new list may replace it
                yield Attack(
                    words=f"{output}/{name} is {kind}",
                    stage=stage,
                    commands=(command,),
                    apply=partial(_put_foreign, f"{output}/{name}".rstrip("/"), change),
                    kind=kind,
                    hidden=f"{output}/{name}".rstrip("/"),
                    may_differ=True,
                    kept=output,
                )


def _put_foreign(name: str, change: Change, place: Path, outside: Outside) -> None:
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    change(path, outside)


def _entries(path: Path) -> dict[str, tuple[object, ...]]:
    """Return what is in a folder, or the file itself: mode, inode, and the content or target."""
    found: dict[str, tuple[object, ...]] = {}
    for each in [path, *sorted(path.rglob("*"))] if not path.is_symlink() else [path]:
        if not os.path.lexists(each) or (each.is_dir() and not each.is_symlink()):
            continue
        mode = each.lstat().st_mode
        content = bytes(each.readlink()) if stat.S_ISLNK(mode) else b""
        if stat.S_ISREG(mode):
            content = each.read_bytes()
        found[str(each)] = (mode, content)
    return found


# Forged files, with right hashes. -----------------------------------------------------------------------


def _write_json(path: Path, data: dict[str, object]) -> None:
    data.pop("content_sha256", None)
    digest = content_sha256(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**data, "content_sha256": digest}, separators=(",", ":")), encoding="utf-8")


def _rewrite_idx(change: Callable[[np.ndarray], object], data: Path) -> None:
    """Change the records of shard 0 and update crc32s and the manifest."""
    manifest = json.loads((data / "shard-00000.json").read_bytes())
    names = ["offset", "num_bytes", "num_tokens", "input_number", "input_offset"]
    types = ["<u8", "<u4", "<u4", "<u4", "<u8"]
    if manifest["spec"]["record"] != "documents":
        names += ["starts_offset", "num_starts"]
        types += ["<u8", "<u4"]
    path, dtype = data / "shard-00000.idx", np.dtype([*zip(names, types, strict=True)])
    raw = path.read_bytes()
    num = manifest["counts"]["num_samples"]
    records = np.frombuffer(raw[64 : 64 + num * dtype.itemsize], dtype).copy()
    change(records)
    parts = [records[start : start + 512].tobytes() for start in range(0, num, 512)]
    crcs = np.array([zlib.crc32(part) for part in parts], "<u4").tobytes()
    path.write_bytes(raw[:64] + b"".join(parts) + crcs)
    _restamp(data, "idx", "shard-00000.idx")


def _restamp(data: Path, key: str, name: str, shard: int = 0) -> None:
    """Put size and sha256 of a file into the manifest of its shard."""
    with (data / name).open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 24):
            digest.update(block)
    stamp = {"num_bytes": (data / name).stat().st_size, "sha256": digest.hexdigest()}
    rewrite_json(data / f"shard-{shard:05d}.json", **{key: stamp})


def _side_file(key: str, name: str, shard: int, content: Callable[[], bytes], place: Path, _: object) -> None:
    path = place / "data" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content())
    _restamp(place / "data", key, name, shard)


def _idx_forgeries() -> Iterator[tuple[str, Callable[[np.ndarray], object]]]:
    def set_all(name: str, value: int, records: np.ndarray) -> None:
        records[name] = value

    def set_one(name: str, value: int, records: np.ndarray) -> None:
        records[name][0] = value

    for name in ("offset", "num_bytes", "num_tokens", "input_number", "input_offset"):
        largest = 2**64 - 1 if name in ("offset", "input_offset") else 2**32 - 1
        for value in (0, 2**31, largest, largest // 2 + 1):
            yield f"one {name} of {value}", partial(set_one, name, value)
            yield f"all {name} of {value}", partial(set_all, name, value)


def _large_document(place: Path, _: object) -> None:
    """Let a document of few tokens have 4 GiB in the idx, in a tar of that size."""
    data = place / "data"
    with (data / "shard-00000.tar").open("ab") as file:
        file.truncate(5 << 30)

    def change(records: np.ndarray) -> None:
        records["num_bytes"][-1] = 2**32 - 1
        records["offset"][-1] = 4096

    _rewrite_idx(change, data)
    stamp = {"num_bytes": 5 << 30, "sha256": "0" * 64}
    rewrite_json(data / "shard-00000.json", tar=stamp)
    rewrite_json(data / "index.json", **{"shards.0.3": 5 << 30})


def _many_samples(place: Path, _: object) -> None:
    """Let index and manifest have 2^30 samples, in a tar and an idx that are holes."""
    data = place / "data"
    spec = json.loads((data / "shard-00000.json").read_bytes())["spec"]
    num = 1 << 30
    record_bytes = 28 if spec["record"] == "documents" else 40
    idx_bytes = 64 + num * record_bytes + 4 * (num // 512)
    sizes = {"tar": (num * 1024, "shard-00000.tar"), "idx": (idx_bytes, "shard-00000.idx")}
    for key, (num_bytes, name) in sizes.items():
        os.truncate(data / name, num_bytes)
        rewrite_json(data / "shard-00000.json", **{f"{key}.num_bytes": num_bytes})
    counts = {"counts.num_samples": num, "counts.num_documents": num, "counts.num_tokens": num}
    rewrite_json(data / "shard-00000.json", **counts)
    row = {f"shards.0.{place}": value for place, value in enumerate((num, num, num, num * 1024, idx_bytes))}
    rewrite_json(data / "index.json", **row)


def _huge_index(place: Path, _: object) -> None:
    row = {f"shards.0.{place}": 2**62 for place in range(6)}
    rewrite_json(place / "data" / "index.json", **row)


def _plan_tables(num_rows: int, num_blocks: int, place: Path, _: object) -> None:
    path = place / "data" / "plan.json"
    line, _, behind = path.read_bytes().partition(b"\n")
    head = json.loads(line + b"}")
    for table in head["tables"].values():
        table["num_rows"] = num_rows
        table["blocks"] = [[0, "0" * 64]] * num_blocks
    head["content_sha256"] = content_sha256(head)
    path.write_bytes(json.dumps(head, separators=(",", ":")).encode()[:-1] + b"\n" + behind)


def _findings(num: int, is_one_shard: bool, manifest_bytes: int, place: Path, _: object) -> None:
    """Write many findings, about as many shards or about one, whose manifest is large."""
    data = place / "data"
    plan_id = json.loads((data / "shard-00000.json").read_bytes())["spec"]["plan_id"]
    if manifest_bytes:
        path = data / "shard-00000.json"
        path.write_bytes(path.read_bytes() + b" " * manifest_bytes)
    digest = hashlib.sha256((data / "shard-00000.json").read_bytes()).hexdigest()
    one = {"message": "", "manifest_sha256": digest, "check": "fast"}
    found = [{"shard": 0 if is_one_shard else n % 99_999, **one} for n in range(num)]
    head = {"format": "shardprep-findings", "version": 4, "plan_id": plan_id, "findings": found}
    _write_json(data / "findings.json", head)


def _many_values(name: str, file_format: str, values: str, place: Path, _: object) -> None:
    """Replace a JSON file by one with an array of many small values, and a right hash if it can have one."""
    head = {"format": file_format, "version": 4, "x": json.loads(values) if len(values) < 1 << 24 else 0}
    path = place / "data" / name
    path.parent.mkdir(exist_ok=True)
    if len(values) < 1 << 24:
        _write_json(path, head)
    else:
        path.write_text(f'{{"format": "{file_format}", "version": 4, "shards": {values}}}', encoding="ascii")


def _nested_folder(place: Path, _: object) -> None:
    """Make a temporary folder of a killed attempt with 3,000 levels."""
    depth = 3000
    top = place / "data" / ".plan.json.host-1-0123abcd.tmp"
    top.mkdir()
    handle = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=handle)
        inner = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = inner
    os.close(handle)
    os.utime(top, (_OLD_S, _OLD_S))


def _hit_lines(content: Callable[[], bytes], place: Path, _: object) -> None:
    for path in (place / "data" / "overlap").glob("shard-*.jsonl"):
        path.write_bytes(content())
        stamp = {"num_bytes": path.stat().st_size, "sha256": hashlib.sha256(content()).hexdigest()}
        with path.with_name("written.jsonl").open("a", encoding="ascii") as file:
            file.write(json.dumps({"name": path.name, **stamp}) + "\n")


_FORMATS = {
    "findings.json": "shardprep-findings", "index.json": "shardprep-index", "plan.json": "shardprep-plan",
    "shard-00000.json": "shardprep-manifest", "jobs/0000.json": "shardprep-submission",
    "blanked/shard-00000.json": "shardprep-blanked",
}  # fmt: skip
_HITS = {
    "no JSON": lambda: b"x\n",
    "a list": lambda: b"[]\n",
    "numbers": lambda: b'{"document": 5, "eval": 5, "sha256": 5, "share": 5}\n',
    "no share": lambda: b'{"document": "a.txt:0", "eval": "b", "sha256": "c"}\n',
    "shares of two types": lambda: b"".join(
        b'{"document": "a.txt:0", "eval": "b", "sha256": "c", "longest": 1, "text": "", "share": %s}\n'
        % share
        for share in (b'"x"', b"1", b"null", b"[]")
    ),
    "deep nesting": lambda: b"[" * 100_000 + b"]" * 100_000 + b"\n",
    "a name of another document": lambda: (
        b'{"document": "a.txt:0", "eval": "b", "sha256": "x\\nat:a.txt:9", "longest": 1,'
        b' "text": "", "share": 1}\n'
    ),
    "a line of 3 MB": lambda: b'{"document": "' + b"x" * 3_000_000 + b'"}\n',
}


def _forgeries(data_set: SmallDataSet) -> Iterator[Attack]:
    """Forge files with right hashes."""
    has_ids = "--id_field" in data_set.options
    readers = ("load", "peek", "verify", "verify --fast", "stage", "status", "export hf", "clean", "shard")

    def attack(
        words: str, apply: Callable[[Path, Outside], object], commands: Sequence[str], name: str = ""
    ) -> Attack:
        return Attack(
            words=f"forged: {words}",
            stage="full",
            commands=commands,
            apply=apply,
            hidden=f"data/{name}" if name else "",
            may_differ=True,
        )

    for words, change in _idx_forgeries():
        forge = lambda place, _, change=change: _rewrite_idx(change, place / "data")  # noqa: E731
        yield attack(f"an idx with {words}", forge, ("load", "peek", "peek at place", "export hf", "verify"))
    yield attack("a document of 4 GiB", _large_document, readers)
    yield attack("2^30 samples in holes", _many_samples, readers)
    yield attack("an index with huge counts", _huge_index, readers)
    yield attack("a plan of 2^40 rows", partial(_plan_tables, 2**40, 1), (*readers, "plan", "blank"))
    yield attack("a plan of 10^5 blocks", partial(_plan_tables, 512 * 10**5, 10**5), (*readers, "plan"))
    yield attack("10^5 findings", partial(_findings, 10**5, False, 0), readers)
    yield attack("10^5 findings of a large manifest", partial(_findings, 10**5, True, 4_000_000), readers)
    for name, file_format in _FORMATS.items():
        for words, values in {
            "2.9 million numbers": f"[{'0,' * 2_900_000}0]",
            "2.9 million floats": f"[{'0.5,' * 2_900_000}0]",
            "2.9 million lists": f"[{'[],' * 1_400_000}0]",
            "60 MB of lists": f"[{'[],' * 20_000_000}0]",
            "deep nesting": "[" * 500 + "]" * 500,
        }.items():
            forge = partial(_many_values, name, file_format, values)
            yield attack(f"{name} has {words}", forge, (*readers, "report", "blank"), name)
    for words, content in _HITS.items():
        yield attack(f"a hit of overlap: {words}", partial(_hit_lines, content), ("overlap in data",))
    yield attack("a deep temporary folder", _nested_folder, ("clean", "stage", "blank", "plan", "shard"))
    quarantined = {
        "a line of 100 MB": lambda: b'{"input": "' + b"x" * 100_000_000 + b'"}\n',
        "a line of 200 MB": lambda: b'{"input": "' + b"x" * 200_000_000 + b'"}\n',
        "deep nesting": lambda: b"[" * 1_000_000 + b"\n",
        "other types": lambda: b'{"input": 1, "input_offset": "x"}\n' * 10,
        "10^6 lines": lambda: (
            b'{"input":"a.txt","input_offset":0,"num_bytes":1,"reason":"\\u001b[31m","detail":""}\n' * 10**6
        ),
    }
    for words, content in quarantined.items():
        forge = partial(_side_file, "quarantine", "quarantine/shard-00001.jsonl", 1, content)
        yield attack(f"a quarantine with {words}", forge, ("peek at place", "verify", "stage"))
    digests = {"17 bytes": lambda: b"x" * 17, "160 MB": lambda: b"\0" * 160_000_000, "none": lambda: b""}
    for words, content in digests.items():
        forge = partial(_side_file, "digests", "digests/shard-00000.digests", 0, content)
        yield attack(f"digests of {words}", forge, ("duplicates", "verify", "stage", "blank"))
    ids = {
        "3 million lines": lambda: b'[0,0,"doc-3"]\n' * 3_000_000,
        "huge numbers": lambda: b'[999999999999999999,999999999999999999,"doc-3"]\n',
        "larger numbers": lambda: b'[99999999999999999999999,0,"doc-3"]\n',
        "negative numbers": lambda: b'[-1,-1,"doc-3"]\n',
        "one endless line": lambda: b'[0,0,"' + b"x" * 130_000_000,
        "deep nesting": lambda: b"[" * 1_000_000 + b"\n",
        "NULs": lambda: bytes(1000),
    }
    for words, content in ids.items() if has_ids else ():
        forge = partial(_side_file, "ids", "ids/shard-00001.jsonl", 1, content)
        yield attack(f"ids with {words}", forge, ("peek at id", "verify", "stage", "blank by id"))


# The campaign. ------------------------------------------------------------------------------------------


def _add_all_files(data_set: SmallDataSet, *, is_quick: bool) -> None:
    """Make the stages "full", with every subfolder that the format defines, and "blanked"."""
    data = data_set.place / "data"
    data_set.reset("verified")
    ended = data_set.run("overlap in data")
    assert ended.is_well, ended
    plan_id = json.loads((data / "shard-00000.json").read_bytes())["spec"]["plan_id"]
    files = {
        "transform/code.py": "raise SystemExit(9)\n",
        "jobs/attempts/1_0.r0": f"begin\nplan_id={plan_id}\nidentity=1.1\ntime=1\nshards=0\n",
        "jobs/logs/1_0.log": "a log\n",
        ".index.json.host-1-0123abcd.tmp": "half",
        "tokenizer/.tokenizer.json.host-1-0123abcd.tmp": "half",
    }
    for name, content in files.items():
        path = data / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="ascii")
        os.utime(path, (_OLD_S, _OLD_S))
    shutil.copytree(data_set.place, data_set.templates / "full", symlinks=True)
    if is_quick:
        return
    data_set.reset("verified")
    for name in ("blank", "load"):
        ended = data_set.run(name)
        assert ended.is_well, ended
    shutil.rmtree(data)
    (data_set.place / "staged").rename(data)
    ended = data_set.run("verify")
    assert ended.is_well, ended
    shutil.copytree(data_set.place, data_set.templates / "blanked", symlinks=True)


def _without_first_shard(data_set: SmallDataSet) -> None:
    """Remove a manifest, so that the shard has to be made again."""
    (data_set.place / "data" / "shard-00000.json").unlink(missing_ok=True)
    (data_set.place / "data" / "index.json").unlink(missing_ok=True)


def outcomes(
    data_sets: Sequence[SmallDataSet], *, num_faults: int, every_file: bool = False
) -> Iterator[Outcome]:
    """Attack each kind of file of a data set and each output folder, then run each command that meets it.

    ``num_faults``: with a small number, only some are tried. ``every_file``: try each file with each command.
    """
    is_quick = num_faults <= _QUICK_FAULTS
    for data_set in data_sets:
        data_set.place.parent.chmod(0o755)  # other users reach the workplace
        _add_all_files(data_set, is_quick=is_quick)
    if is_quick:
        runs = [run for data_set in data_sets for run in _quick_runs(data_set)]
    elif every_file:
        runs = _runs_of_every_file(data_sets)
    else:
        runs = list(_grid(data_sets))
    if not is_quick:  # in a random order, so that a campaign that is stopped has tried some of each kind
        random.Random(0).shuffle(runs)
        print(f"hostile_sets: {len(runs):,} runs", file=sys.stderr)
    for run in runs:
        yield _attacked(run)


class _Run(NamedTuple):
    data_set: SmallDataSet
    attack: Attack
    command: str
    user: User = ""


def _quick_runs(data_set: SmallDataSet) -> list[_Run]:
    """Return a few runs; each attack meets one command."""
    attacks = [*_replacements(data_set, "full"), *_outputs(), *_forgeries(data_set)]
    runs: list[_Run] = []
    for attack in attacks:
        fast = [command for command in attack.commands if command not in _SLOW and "again" not in command]
        if fast and not _LARGE.match(attack.words):
            runs.append(_Run(data_set, attack, random.Random(attack.words).choice(fast)))
    runs = [run for run in runs if _is_possible(run)]
    chosen = runs[:: max(1, len(runs) // _QUICK_RUNS)]
    by_turns: list[User] = [*_users(), "", "", "", ""]
    return [run._replace(user=by_turns[number % len(by_turns)]) for number, run in enumerate(chosen)]


def _runs_of_every_file(data_sets: Sequence[SmallDataSet]) -> list[_Run]:
    runs: list[_Run] = []
    for data_set in data_sets:
        attacks = [*_replacements(data_set, "full"), *_outputs(), *_forgeries(data_set)]
        attacks += _replacements(data_set, "blanked")
        for attack in attacks:
            for command in attack.commands:
                runs.extend(_Run(data_set, attack, command, user) for user in _users())
    return [run for run in runs if _is_possible(run)]


def _grid(data_sets: Sequence[SmallDataSet]) -> Iterator[_Run]:
    """Yield one run of each class (see above)."""
    for data_set in data_sets:
        is_main = data_set.form == "with_ids" or len(data_sets) == 1
        yield from _grid_of_files(data_set, "full", is_main=is_main)
        if is_main:
            yield from _grid_of_files(data_set, "blanked", is_main=False)
            yield from _grid_of_outputs(data_set)
        for attack in _forgeries(data_set):
            if not is_main and not attack.words.startswith("forged: an idx"):
                continue
            for command in attack.commands:
                run = _Run(data_set, attack, command)
                if _is_possible(run) and (not attack.hidden or _meeting(run) == "calls"):
                    yield run


def _grid_of_files(data_set: SmallDataSet, stage: Stage, *, is_main: bool) -> Iterator[_Run]:
    """``is_main``: whether all files meet all damage by all users."""
    seen: set[tuple[str, ...]] = set()
    for attack in _replacements(data_set, stage):
        file = _kind_of_file(attack.hidden)
        if not is_main and (attack.kind not in _OF_CONTENT or not _OF_FORM.match(file)):
            continue
        turns = random.Random(attack.words).sample(attack.commands, len(attack.commands))
        for command in turns:
            run = _Run(data_set, attack, command)
            if not _is_possible(run):
                continue
            meeting = _meeting(run)
            one = (file, attack.kind, _READ_ALIKE.get(command, command), meeting)
            if one in seen or not meeting or (meeting == "lists" and attack.kind != _OF_TYPE):
                continue
            seen.add(one)
            yield run
            is_of_all = is_main and meeting == "calls" and attack.kind in _OF_USERS
            for user in _users()[1:] if is_of_all else ():
                if _is_possible(run._replace(user=user)):
                    yield run._replace(user=user)


def _grid_of_outputs(data_set: SmallDataSet) -> Iterator[_Run]:
    for attack in _outputs():
        for command in attack.commands:
            run = _Run(data_set, attack, command)
            # A name that a command does not write may still be one that must not be there.
            if _meeting(run) != "calls" and attack.kind not in ("a file", "a link outside"):
                continue
            yield run
            if attack.kind == "a file" and _is_possible(run._replace(user="other")):
                yield run._replace(user="other")


def _kind_of_file(name: str) -> str:
    name = re.sub(r"shard-\d+(\.[0-9a-f]+)?", "shard", name)
    return re.sub(r"\d{4}-\d+", "job", name)


def _meeting(run: _Run) -> Literal["calls", "lists", ""]:
    """Return whether the command makes a call on what is attacked, or lists its folder, when undisturbed."""
    expected = _undisturbed(run)
    name = f"/{run.attack.hidden}"
    meeting: Literal["lists", ""] = ""
    for call in expected.calls:
        path = os.path.normpath(call.path)
        if path == name or path.startswith(f"{name}/"):
            return "calls"
        if call.op == "readdir" and path == os.path.dirname(name):  # noqa: PTH120
            meeting = "lists"
    return meeting


def _undisturbed(run: _Run) -> Undisturbed:
    name = run.command.removesuffix(" again")
    return run.data_set.undisturbed(name, run.attack.stage, _prepare_of(run.command))


def _prepare_of(command: str) -> Callable[[SmallDataSet], object]:
    return _without_first_shard if command.endswith(" again") else _nothing


def _users() -> tuple[User, ...]:
    return _USERS if os.getuid() == 0 else ("",)


def _is_possible(run: _Run) -> bool:
    if run.data_set.form == "best_fit" and run.command == "peek at place":
        return False  # its rows have documents in any order
    # Another user may not be able to start this Python.
    starts_python = run.command in _SLOW or "run" in run.command
    return run.user in _users() and not (run.user == "other" and starts_python)


def _attacked(run: _Run) -> Outcome:
    """Run a command on an attacked workplace, and judge it."""
    data_set, attack, command, user = run
    place, outside = data_set.place, Outside(data_set.place.parent / "outside")
    expected = _undisturbed(run)
    data_set.reset(attack.stage)
    outside.make()
    _prepare_of(command)(data_set)
    attack.apply(place, outside)
    if user == "owner":
        for path in (place / "data").rglob("*"):
            os.chown(path, _OTHER_USER, _OTHER_USER, follow_symlinks=False)
    elif user:
        for path in (place, place / "tmp"):
            os.chown(path, _OTHER_USER, _OTHER_USER)
    kept = _entries(place / attack.kept) if attack.kept else {}
    around = _names_around(place)
    outside.remember()
    ended = data_set.start(command.removesuffix(" again"), partial(_limited, is_other=user == "other")).end()

    def judge() -> Verdict:
        outside.check(place)
        if _names_around(place) != around:
            raise Failure("wrong", "something beside the workplace's folders was added or removed")
        now = _entries(place / attack.kept) if attack.kept else {}
        for path, entry in kept.items():
            if now.get(path) != entry:
                raise Failure("wrong", f"{attack.kept} had a file of somebody else, which was replaced")
        if _SECRET.decode().strip() in ended.text:
            raise Failure("wrong", "a private line was printed")
        return _verdict(data_set, attack, command, ended, expected)

    words = attack.words + {"": "", "other": ", as another user", "owner": ", of another user"}[user]
    return outcome_of("hostile_sets", data_set, Hit(command, attack.stage, command), words, judge)


def _nothing(_: SmallDataSet) -> None:
    pass


def _limited(*, is_other: bool) -> None:
    """Limit this process to 1 GiB in addition to what it has, and let another user run it."""
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)  # each thread would reserve 64 MiB of addresses
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + _MEMORY_BYTES + _STACKS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if is_other:
        os.setgroups([])
        os.setgid(_OTHER_USER)
        os.setuid(_OTHER_USER)


def _names_around(place: Path) -> list[str]:
    """Return what is beside the workplace and, in it, beside the folders that commands write."""
    written = {"staged", "exported", "names", "trained", "report", "data", "tmp"}
    inside = [str(path) for path in place.iterdir() if path.name not in written]
    return sorted([*map(str, place.parent.iterdir()), *inside])


def _verdict(
    data_set: SmallDataSet, attack: Attack, command: str, ended: Ended, expected: Undisturbed
) -> Verdict:
    is_compared = not attack.may_differ
    if "flipped bit" in attack.words and command.startswith(_OTHER_DATA):
        is_compared = False  # they compare no hash of a tar
    if command == "report":
        is_compared = False  # it says what is damaged
    verdict = verdict_of_end(ended, expected if is_compared else None)
    if verdict != EQUAL or not is_compared:
        return verdict
    left = _published(data_set)
    other = [
        name for name in different(left, expected.files)
        if not (name == attack.hidden or name.startswith((f"{attack.hidden}/", "litter/")))
    ]  # fmt: skip
    if other:
        raise Failure("wrong", f"ended with 0, but other bytes: {', '.join(other[:3])}")
    return EQUAL


def _published(data_set: SmallDataSet) -> dict[str, str]:
    """Return the digests of the files that count. Links and holes are left out."""
    for path in data_set.place.rglob("*"):
        if path.is_symlink() or (path.is_file() and path.stat().st_size >= _MEMORY_BYTES):
            path.unlink()
    return data_set.published()
