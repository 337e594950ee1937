"""Four campaigns that damage or replace a file of a data set and then run commands that read it."""

from __future__ import annotations

import io
import os
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from json.decoder import JSONDecoder
from pathlib import Path

from tests.external_tars import write_tar
from tests.faults.judging import Fault, Outcome, spread, struck
from tests.faults.small_data_sets import Hit, SmallDataSet, Stage, nothing
from tests.forged import with_its_hash

_HEADER_BYTES = 512  # also the block size of a tar
_TYPE_OFFSET = 156  # of the type field in a header
_QUICK_FAULTS = 8  # with at most this many faults, each file gets one kind of replacement
_SLOW = ("run",)  # commands that start processes, which takes seconds


@dataclass(frozen=True)
class DisturbedFile:
    """A file of a data set, and commands that read it."""

    name: str  # below data/
    stage: Stage
    commands: str  # separated by commas
    free_text: str = ""  # JSON path of a string that no hash covers, where any text is valid
    headers_only: bool = False  # damage only tar headers: without a manifest, contents cannot be checked
    sizes_only: bool = False  # the commands only check the size, which another shard's file may share
    prepare: Callable[[SmallDataSet], object] = nothing


def _keep_tars_only(data_set: SmallDataSet) -> None:
    """Remove everything except the tars."""
    for path in (data_set.place / "data").iterdir():
        if path.is_file() and path.suffix != ".tar":
            path.unlink()


def _put_external_tars(data_set: SmallDataSet) -> None:
    """Replace the tars by ones that webdataset wrote, without idx or manifest."""
    _keep_tars_only(data_set)
    samples = [{"token_ids.json": [300, *range(1, 6 + n), 301], "text.txt": "text"} for n in range(6)]
    for path in (data_set.place / "data").glob("*.tar"):
        write_tar(path, samples)


def _find_wrong(data_set: SmallDataSet) -> None:
    """Flip a bit of a token id and let verify find it."""
    _flip(_HEADER_BYTES + 200, 0, data_set.place / "data" / "shard-00001.tar")
    assert data_set.run("verify").code == 65


_FILES = (
    DisturbedFile("plan.json", "planned", "shard", free_text="tokenizer.model_id"),
    DisturbedFile("plan.json", "verified", "verify, verify --fast, status", free_text="tokenizer.model_id"),
    DisturbedFile("tokenizer/tokenizer.json", "planned", "shard"),
    DisturbedFile("tokenizer/tokenizer.json", "verified", "verify, load"),
    DisturbedFile("tokenizer/tokenizer_config.json", "planned", "shard"),
    DisturbedFile("tokenizer/tokenizer_config.json", "verified", "verify, load"),
    DisturbedFile("index.json", "verified", "load, stage, verify"),
    DisturbedFile(
        "shard-00000.json", "made", "load, verify, shard, status", free_text="spec.tokenizer.model_id"
    ),
    DisturbedFile("shard-00000.idx", "verified", "load, stage, verify"),
    DisturbedFile("shard-00000.tar", "verified", "stage, verify"),
    DisturbedFile("shard-00000.tar", "verified", "load tars", headers_only=True, prepare=_keep_tars_only),
    DisturbedFile("shard-00001.tar", "verified", "load tars", headers_only=True, prepare=_put_external_tars),
    DisturbedFile("quarantine/shard-00001.jsonl", "verified", "verify"),
    DisturbedFile("jobs/0000.json", "made", "status"),
    DisturbedFile("findings.json", "verified", "shard 1", prepare=_find_wrong),
)
# Files that are replaced by other kinds of files.
_REPLACED = (
    *_FILES,
    DisturbedFile("../raw/a.txt", "raw", "plan"),
    DisturbedFile("../raw/a.txt", "planned", "shard, run"),
    DisturbedFile("../raw/b.txt", "planned", "shard, run"),
    DisturbedFile("shard-00000.tar", "verified", "load, status, verify --fast", sizes_only=True),
    DisturbedFile("shard-00000.idx", "verified", "status, verify --fast", sizes_only=True),
    DisturbedFile("jobs", "made", "status"),
    DisturbedFile("quarantine", "made", "verify"),
    DisturbedFile("tokenizer", "planned", "shard"),
)

Change = Callable[[Path], object]  # of a file
Damage = tuple[str, Change]  # a description and the change
DamagesOf = Callable[[DisturbedFile, bytes, int, list[SmallDataSet]], Iterator[Damage]]


def _disturbed(
    campaign: str,
    files: Sequence[DisturbedFile],
    damages_of: DamagesOf,
    data_sets: Sequence[SmallDataSet],
    *,
    num_faults: int,
) -> Iterator[Outcome]:
    """Run each command on each damage of its file.

    ``damages_of`` gets the file, its contents, the number of damages to make, and the other data sets.
    With few faults, every second command is tried: of ``edited_files`` those that ``bit_flips`` leaves out.
    """
    turn = 0 if campaign == "edited_files" else 1
    for data_set in data_sets:
        others = [each for each in data_sets if each is not data_set]
        for file in files:
            path = Path(os.path.normpath(data_set.place / "data" / file.name))  # inputs are beside data/
            for name in file.commands.split(", "):
                turn += 1
                if num_faults <= _QUICK_FAULTS and (turn % 2 or name in _SLOW):
                    continue
                data_set.reset(file.stage)
                file.prepare(data_set)
                if not path.exists():
                    continue
                data = path.read_bytes() if path.is_file() else b""
                is_rewritten = name.startswith("verify") and file.name == "index.json"
                for words, change in damages_of(file, data, num_faults, others):
                    fault = Fault(
                        words=f"{file.name}: {words}",
                        prepare=file.prepare,
                        before=partial(_change_at, path, change),
                        damaged="" if is_rewritten else f"data/{file.name}",
                    )
                    yield struck(campaign, data_set, Hit(name, file.stage, name), fault)


def _change_at(path: Path, change: Change, _: Path) -> None:
    change(path)


def _flips(file: DisturbedFile, data: bytes, number: int, _: object) -> Iterator[Damage]:
    """Flip bits spread over the file, each time another bit of a byte."""
    if file.headers_only:
        types, others = _header_offsets(data)
        offsets = [types[place] for place in spread(len(types), -(-number // 4))]
        offsets += [others[place] for place in spread(len(others), number)]
    else:
        free = _free_bytes(file, data)
        offsets = [offset for offset in spread(len(data), number) if offset not in free]
    for place, offset in enumerate(offsets):
        bit = (offset * 5 + place) % 8
        yield f"bit {bit} of byte {offset}", partial(_flip, offset, bit)


def _flip(offset: int, bit: int, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def _free_bytes(file: DisturbedFile, data: bytes) -> range:
    """Return the byte range of the string where any text is valid."""
    for path, start, end in _spans(data.decode("latin-1")) if file.free_text else ():  # 1 letter per byte
        if path == file.free_text:
            return range(start, end)
    return range(0)


def _header_offsets(tar: bytes) -> tuple[list[int], list[int]]:
    """Return the offsets of the type bytes of all headers (a member counts by its type), and the others."""
    types: list[int] = []
    others: list[int] = []
    with tarfile.open(fileobj=io.BytesIO(tar)) as members:
        for member in members:
            types.append(member.offset + _TYPE_OFFSET)
            header = range(member.offset, member.offset + _HEADER_BYTES)
            others += [offset for offset in header if tar[offset]]
    return types, others


_PIECES = (
    b"", b"0", b"-1", b"1e999", b"9" * 400, b"[" * 5000, b'"', b"\\ud800", b"null", b"{}", b"\0" * 8,
    b"\xff" * 8,
)  # fmt: skip


def _edits(file: DisturbedFile, data: bytes, number: int, _: object) -> Iterator[Damage]:
    """Edit the file at random places; the description has the seed."""
    free = _free_bytes(file, data)
    for seed in range(number):
        edited = _edited(data, random.Random(seed))
        if edited != data and data[free.start : free.stop] in edited:
            yield f"edits of seed {seed}", _writing(edited)


def _writing(data: bytes) -> Change:
    return lambda path: path.write_bytes(data)


def _edited(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        end = at + chance.choice([0, 1, 8, 64, len(data)])  # data[at:end] is replaced
        piece = chance.choice([*_PIECES, chance.randbytes(8), data[at:end] * 2])
        data = data[:at] + piece + data[end:]
    return data


def _replacements(
    file: DisturbedFile, data: bytes, number: int, others: list[SmallDataSet]
) -> Iterator[Damage]:
    """Replace a file of a data set or an input by each kind of other file."""
    kinds = list(_KINDS.items())
    if file.stage == "raw":  # plan leaves out what is neither a file nor a link
        kinds = [each for each in kinds if "link" in each[0]]
    elif file.name == "findings.json":  # a dangling link equals no file
        kinds = [each for each in kinds if each[0] != "a dangling link"]
    if data and file.stage != "raw":
        kinds += [("empty", _cut_to(0)), ("a half", _cut_to(len(data) // 2))]
        # With another plan it is another data set, and tars without manifests may be of any data set.
        is_noticed = not file.headers_only and (file.name, file.stage) != ("plan.json", "planned")
        for other in others if is_noticed else []:
            source = other.templates / file.stage / "data" / file.name
            if source.is_file() and not file.name.startswith(("../", "tokenizer/")):  # those are equal
                kinds.append((f"the one of {other.form}", partial(shutil.copyfile, source)))
        if file.name.startswith("shard-") and is_noticed and not file.sizes_only:
            sibling = file.name.translate({ord("0"): "1", ord("1"): "0"}).replace("1111", "0000")
            kinds.append(("the other shard's", lambda path: shutil.copyfile(path.with_name(sibling), path)))
        if file.name.endswith(".tar"):
            cuts = spread(len(data) // _HEADER_BYTES, number)
            kinds += [(f"cut to {cut} blocks", _cut_to(cut * _HEADER_BYTES)) for cut in cuts]
    if number <= _QUICK_FAULTS and file.stage != "raw":
        kinds = [kinds[_REPLACED.index(file) % len(kinds)]]
    yield from kinds


def _cut_to(size: int) -> Change:
    return lambda path: os.truncate(path, size)


def _instead(make: Change) -> Change:
    """Return a change that moves a file away and calls ``make`` for its path."""

    def apply(path: Path) -> None:
        path.rename(path.with_name(f".moved_{path.name}"))
        make(path)

    return apply


_KINDS: dict[str, Change] = {
    "a FIFO": _instead(lambda path: os.mkfifo(path)),
    "/dev/zero": _instead(lambda path: path.symlink_to("/dev/zero")),
    "a folder": _instead(lambda path: path.mkdir()),
    "a dangling link": _instead(lambda path: path.symlink_to("nowhere")),
    "a link to itself": _instead(lambda path: path.symlink_to(path)),
    "/dev/null": _instead(lambda path: path.symlink_to("/dev/null")),
}
_DEEP = "[" * 100_000 + "]" * 100_000
_VALUES = (
    "1180591620717411303424",  # 2**70
    "3000000000", "-1", "0", "1.5", "1e999", "NaN", "-Infinity", "true", "null", '""', '"text"',
    '"a\\u0000b"', '"\\ud800"', "[]", "[[]]", "{}", '{"a": 1}', "9" * 5000, _DEEP,
)  # fmt: skip


def _bad_values(file: DisturbedFile, data: bytes, number: int, _: object) -> Iterator[Damage]:
    """Replace or remove values spread over the file, then replace the whole file.

    If a file states its own hash, the hash is updated, so that the check of the value itself is tested. Every
    third change keeps the old hash, as after a flipped bit.
    """
    text = data.decode()
    places = [
        (place, value)
        for place in _spans(text)
        for value in (*_VALUES, None)
        if not (place[0] == file.free_text and value and value.startswith('"'))
    ]
    for count, chosen in enumerate(spread(len(places), 2 * number)):
        (path, start, end), value = places[chosen]
        words = f"{path} is {'left out' if value is None else value[:24]}"
        changed = text[:start] + (value or "") + text[end:]
        if value is None:  # rename its key
            key_end = text.rfind('"', 0, start)
            changed = text[:key_end] + "_" + text[key_end:] if text[start - 1] in ": " else text
        forged = None if count % 3 == 2 else with_its_hash(changed.encode())
        yield f"{words}{', and the hash is right' if forged else ''}", _writing(forged or changed.encode())
    contents = {
        "deep nesting": _DEEP.encode(),
        "null": b"null",
        "NUL bytes": bytes(len(data)),
        "deep objects": b'{"a":' * 100_000,
        "[]": b"[]",
        "{}": b"{}",
        "no UTF-8": data.replace(b"e", b"\xff", 1),
        "UTF-16": text.encode("utf-16"),
        "a BOM": b"\xef\xbb\xbf" + data,
        "another version": data.replace(b'"version":', b'"version":9', 1),
    }
    whole = list(contents.items())
    if number <= _QUICK_FAULTS:
        place = 3 * len(data) % len(whole)
        whole = [*whole, *whole][place : place + 3]
    for words, content in whole:
        yield words, _writing(content)


def _behind_blanks(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip(" \t\r\n,:"))


def _spans(text: str, path: str = "", start: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield (path, start, end) of each value in a JSON text; of arrays, only the first two and the last."""
    decode = JSONDecoder().raw_decode
    if path:
        yield path, start, decode(text, start)[1]
    if text[start] not in "{[":
        return
    items: list[tuple[str, int]] = []
    at = _behind_blanks(text, start + 1)
    while text[at] not in "}]":
        name = str(len(items))
        if text[start] == "{":
            name, at = decode(text, at)
            at = _behind_blanks(text, at)
        items.append((f"{path}.{name}" if path else name, at))
        at = _behind_blanks(text, decode(text, at)[1])
    for name, at in items if text[start] == "{" else [*items[:2], *items[2:][-1:]]:
        yield from _spans(text, name, at)


# Without findings.json: findings that were forged away, with a correct hash, do not count.
_JSON = [
    file for file in _FILES
    if file.name.endswith(".json") and file.name not in ("findings.json", "tokenizer/tokenizer.json")
]  # fmt: skip
_WHOLE_FILES = [file for file in _FILES if not file.headers_only]

bit_flips = partial(_disturbed, "bit_flips", _FILES, _flips)
edited_files = partial(_disturbed, "edited_files", _WHOLE_FILES, _edits)
replaced_files = partial(_disturbed, "replaced_files", _REPLACED, _replacements)
bad_json = partial(_disturbed, "bad_json", _JSON, _bad_values)
