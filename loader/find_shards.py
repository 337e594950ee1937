"""What a user names as ``input_shards`` -> the shards of a run, their samples numbered as one sequence.

A folder is a whole data set. Shards of our data sets are known by manifest or index.json and opened when
they are needed; external tars are scanned here, once. What is no local file is copied once, by webdataset, to
where the loader can read at random:

    DIR/<16 digits of the URL>-part-07.tar                      an external tar
    DIR/<16 digits of the folder's URL>/shard-00000.tar ...     a shard of ours, with its manifest and idx
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt
from braceexpand import braceexpand

from loader.external_tars import TarSamples, scan_tar
from loader.order import Int64s
from shardprep.console import quoted
from shardprep.errors import (
    BrokenShard,
    CannotWrite,
    NotFound,
    OtherTokenizer,
    ReadWriteError,
    UnknownMember,
    UsageError,
)
from shardprep.files import (
    FileStamp,
    PublishedFile,
    check_names_are_utf8,
    is_folder,
    names_in,
    read_beginning,
    size_of_file,
    sync_folder,
    with_retries,
)
from shardprep.format.dataset_spec import DatasetSpec, TokenizerSpec, blank_id
from shardprep.format.done import read_findings, refuse_found, refuse_other_plan
from shardprep.format.idx import idx_num_bytes
from shardprep.format.manifest import (
    VALIDATION_COLUMN,
    manifest_ids,
    merge_manifests,
    read_index,
    read_manifest,
)
from shardprep.format.names import (
    INDEX_NAME,
    PLAN_NAME,
    idx_path,
    manifest_path,
    rerun_command,
    tar_path,
)

SplitName = Literal["train", "validation"]


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raises UsageError for a value of an argument that is none of a Literal's."""
    if value not in get_args(choices):
        raise UsageError.of_value(name, value, " or ".join(map(repr, get_args(choices))))


@dataclass(frozen=True, kw_only=True)
class DatasetShards:
    """Shards of one of our data sets, all or some; the arrays have a row per shard."""

    folder: Path
    spec: DatasetSpec
    shard_ids: Int64s
    num_samples: Int64s
    num_tokens: Int64s
    tar_bytes: Int64s
    tar_sha256: npt.NDArray[np.str_]  # the first 16 hex digits
    num_validation: Int64s | None = None  # samples, where the plan has a fraction for it
    has_blanks: bool = False  # documents of some shards are blanked

    def path_of(self, row: int) -> Path:
        return tar_path(self.folder, int(self.shard_ids[row]))

    def remedy_of(self, row: int) -> str:
        return f"run: {rerun_command(int(self.shard_ids[row]), self.folder)}"

    @property
    def idx_bytes(self) -> Int64s:
        """int64[shards]: of each idx."""
        return idx_num_bytes(self.spec.kind, self.num_samples)

    @property
    def row_tokens(self) -> int:
        """Tokens of every sample where they are packed rows, else 0."""
        return self.spec.seq_len

    @property
    def has_mask(self) -> bool:
        """Whether rows say which of their tokens have a label."""
        return self.spec.record == "chat"

    @property
    def fingerprint(self) -> str:
        """Of plan, shards and content; the folder is outside it, so that a data set may move."""
        parts = [self.shard_ids.astype("<i8").tobytes(), ",".join(self.tar_sha256.tolist()).encode()]
        return hashlib.sha256(b"|".join([self.spec.plan_id.encode(), *parts])).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ExternalTar:
    """A tar without a manifest, as others write them, with its headers scanned."""

    path: Path
    samples: TarSamples
    tar_bytes: int

    @property
    def num_samples(self) -> Int64s:
        """As DatasetShards has it: a row per shard, and this is one."""
        return np.array([len(self.samples.rows)])

    @property
    def num_tokens(self) -> Int64s:
        """Where they were counted; else a guess of 4 bytes per token."""
        counted = self.samples.rows["num_tokens"]
        return np.array([counted.sum() if (counted >= 0).all() else self.tar_bytes // 4])

    def path_of(self, _row: int) -> Path:
        return self.path

    def remedy_of(self, _row: int) -> str:
        return "it changed since it was scanned: copy it again, and start anew"

    @property
    def row_tokens(self) -> int:
        """Tokens of every sample where they are packed rows, else 0."""
        return self.samples.row_tokens

    @property
    def has_mask(self) -> bool:
        """Whether rows say which of their tokens have a label."""
        return bool(self.samples.rows["mask_offset"].any())

    @property
    def fingerprint(self) -> str:
        """Of sizes, places and some of the content; the path is outside it."""
        return self.samples.fingerprint


class ShardSet:
    """Shards in the order they were named; sample g is counted through all of them."""

    def __init__(
        self,
        sources: Iterable[DatasetShards | ExternalTar],
        split: SplitName | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.datasets = [source for source in self.sources if isinstance(source, DatasetShards)]
        self.has_external = len(self.datasets) < len(self.sources)
        self.split = split  # None: the samples of both sides
        # Shard s is row s - source_first[i] of source i.
        self.source_first = np.cumsum([0, *(len(source.num_samples) for source in self.sources)])
        self.num_records = self._column("num_samples")  # of each shard, on both sides of a split
        self.first_record = np.cumsum(self.num_records) - self.num_records
        self.num_planned = self._column("num_validation")  # samples for validation by plan; -1: by none
        self.has_planned = bool((self.num_planned >= 0).any())
        if split == "train":
            self._check_all_planned()
        if not self.has_planned:  # validation is all of these shards
            self.split = None
        counts = self.num_records
        if self.split is not None:
            of_side = self.num_planned if split == "validation" else self.num_records - self.num_planned
            counts = np.where(self.num_planned >= 0, of_side, self.num_records)
        self.first_sample = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.num_shards = len(counts)
        self.num_samples = int(self.first_sample[-1])
        lengths = {source.row_tokens for source in self.sources}
        self.has_rows = any(lengths)  # whether some samples are packed rows
        # Tokens of every sample where all are packed rows of one length, else 0.
        self.row_tokens = lengths.pop() if len(lengths) == 1 else 0
        self.has_masks = any(source.has_mask for source in self.sources)
        num_tokens = sum(int(source.num_tokens.sum()) for source in self.sources)
        self.mean_tokens = max(num_tokens / max(int(self.num_records.sum()), 1), 1.0)  # of a sample, roughly

    def _column(self, name: str) -> Int64s:
        """What the sources say of each shard, -1 where a source does not: int64[shards]."""
        parts = [np.zeros(0, np.int64)]
        for source in self.sources:
            said = getattr(source, name, None)
            parts.append(np.full(len(source.num_samples), -1) if said is None else said)
        return np.concatenate(parts).astype(np.int64)

    def _check_all_planned(self) -> None:
        """Raises UsageError where nothing says which samples of a shard are for training."""
        if (self.num_planned >= 0).all():
            return
        path = next((each.folder for each in self.datasets if not each.spec.validation_fraction), None)
        raise UsageError(
            'split="train" needs data sets that were planned with --validation_fraction'
            f"{f', which {path} was not' if path else ''}; plan one with it, or leave split out",
            path=path,
            found='split="train"',
            remedy="--validation_fraction",
        )

    def rows_of(self, shard: int, samples: Int64s) -> Int64s:
        """Where samples of one shard stand in it: int64[n] -> int64[n]."""
        return self.rows_of_each(samples, np.full(samples.shape, shard))

    def rows_of_each(self, samples: Int64s, shard: Int64s) -> Int64s:
        """Where samples stand in their shards: int64[n], int64[n] -> int64[n]. Those for validation are the
        last ones of a shard, so for training nothing moves."""
        rows = samples - self.first_sample[shard]
        if self.split == "validation":
            num_planned = self.num_planned[shard]
            rows += np.where(num_planned >= 0, self.num_records[shard] - num_planned, 0)
        return rows

    @property
    def split_words(self) -> str:
        """Which side this is and by which rule, for people; "" where no document is held out."""
        if self.split is not None:
            fractions = dict.fromkeys(data.spec.validation_fraction for data in self.datasets)
            rules = [f"{fraction:g} of the documents by their content" for fraction in fractions if fraction]
            return f"split: {self.split}, by plan, {', '.join(rules)}"
        return (
            "split: none, with the documents that the plan holds out for validation"
            if self.has_planned
            else ""
        )

    def stored(self, samples: Int64s) -> Int64s:
        """Samples -> their places in the shards, counted through all of them on both sides of a split."""
        if self.split is None:
            return samples
        shard = self.shard_of(samples)
        return self.first_record[shard] + self.rows_of_each(samples, shard)

    @property
    def blank_id(self) -> int | None:
        """What binary ids of blanked documents are; None where no document is blanked."""
        blanks = [blank_id(data.spec.tokenizer.vocab_size) for data in self.datasets if data.has_blanks]
        return blanks[0] if blanks else None

    @property
    def tar_bytes(self) -> int:
        """Bytes of all tars; of a split its part, as by the number of samples."""
        num_bytes = sum(int(np.sum(source.tar_bytes)) for source in self.sources)
        return (
            num_bytes if self.split is None else num_bytes * self.num_samples // int(self.num_records.sum())
        )

    @property
    def fingerprint(self) -> str:
        """sha256 of all sources, in their order."""
        return hashlib.sha256("".join(source.fingerprint for source in self.sources).encode()).hexdigest()

    def end_of(self, first: int, fingerprint: str) -> int | None:
        """Where those sources from ``first`` on end whose fingerprint begins so; None: there are none."""
        found = hashlib.sha256()
        for number, source in enumerate(self.sources[first:], first):
            found.update(source.fingerprint.encode())
            if found.hexdigest().startswith(fingerprint):
                return number + 1
        return None

    def of_sources(self, first: int, end: int) -> ShardSet:
        """Some of the sources that stand side by side."""
        return ShardSet(self.sources[first:end], self.split)

    def locate(self, shard: int) -> tuple[DatasetShards | ExternalTar, int]:
        """The source of a shard, counted through all sources, and its row there."""
        number = int(np.searchsorted(self.source_first, shard, side="right")) - 1
        return self.sources[number], shard - int(self.source_first[number])

    def shard_of(self, samples: Int64s) -> Int64s:
        """The shard of each sample, counted through all sources; same shape."""
        return np.searchsorted(self.first_sample, samples, side="right") - 1

    def describe(self, sample: int) -> str:
        """``sample 17 of DATA/shard-00003.tar``, for messages."""
        shard = int(self.shard_of(np.array(sample)))
        record = int(self.rows_of(shard, np.array([sample]))[0])
        return f"sample {record} of {self.path_of(sample)}"

    def path_of(self, sample: int) -> Path:
        """Return the tar that holds a sample."""
        source, row = self.locate(int(self.shard_of(np.array(sample))))
        return source.path_of(row)


logger = logging.getLogger(__name__)

InputShards: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

NAMEABLE = "a folder, an index.json, tars or a pattern of tars"
_BRACES = re.compile(r"\{([^{}]*)\}")
_URL = re.compile(r"^(?:[a-zA-Z][a-zA-Z0-9+.-]*://|pipe:)")


def find_inputs(input_shards: InputShards, cache_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Every absolute path that was named, brace patterns and globs expanded, in the order given.

    What is no local file is copied to ``cache_dir``. 100,000 shards take 0.4 s, hence no Path.
    """
    named: list[Any] = [input_shards]
    if isinstance(input_shards, Iterable) and not isinstance(input_shards, (str, os.PathLike)):
        named = list(input_shards)
    if wrong := [each for each in named if not isinstance(each, (str, os.PathLike))]:
        raise UsageError(
            f"input_shards has {wrong[0]!r}, expected the path of a folder, an index.json or a tar",
            found=f"input_shards={wrong[0]!r}",
            expected="the path of a folder, an index.json or a tar",
        )
    names_in: dict[str, frozenset[str] | None] = {}
    paths: list[str] = []
    names = [os.fspath(each) for each in named]
    check_names_are_utf8(*names)
    for name in names:
        if _URL.match(name):
            paths += [copy_url(url, cache_dir) for url in expand_braces(name)]
        else:
            paths += _expand(name, names_in)
    check_names_are_utf8(*paths)
    if not paths:
        raise UsageError(f"input_shards is empty; name {NAMEABLE}", expected=NAMEABLE)
    if len(set(paths)) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise UsageError(
            f"{twice} is named twice in input_shards, so an epoch would see its samples twice; name it once",
            path=twice,
            expected="once",
        )
    return paths


def _expand(name: str, names_in: dict[str, frozenset[str] | None]) -> list[str]:
    if _exists(_absolute(name), names_in):
        return [_absolute(name)]
    found: list[str] = []
    for pattern in expand_braces(name):
        path = _absolute(pattern)
        if _exists(path, names_in):
            found.append(path)
            continue
        matches = sorted(map(str, Path("/").glob(path[1:]))) if glob.has_magic(pattern) else []
        if not matches:
            of = "" if pattern == name else f" (of {name})"
            raise NotFound(f"{path} does not exist{of}; name {NAMEABLE}", path=path, expected=NAMEABLE)
        found += matches
    return found


def _absolute(name: str) -> str:
    """Without following links: a linked tar's manifest stands beside the link."""
    return os.path.abspath(name)  # noqa: PTH100  Path.resolve would follow them


def _exists(path: str, names_in: dict[str, frozenset[str] | None]) -> bool:
    """One listing a folder: 100,000 shards would else cost as many requests of a parallel file system."""
    folder, name = os.path.split(path)
    if folder not in names_in:
        try:
            names_in[folder] = frozenset(entry.name for entry in os.scandir(folder))
        except OSError:  # it may still be entered where it may not be listed
            names_in[folder] = None
    names = names_in[folder]
    return Path(path).exists() if names is None or not name else name in names


def expand_braces(pattern: str) -> list[str]:
    """``a{0..2}{x,y}`` as a shell expands it, the last brace fastest; zeros in front are kept.

    Each is named once. Raises UsageError for braces that hold neither a range nor a comma.
    """
    try:
        names = list(dict.fromkeys(braceexpand(pattern, escape=False)))
    except ValueError:  # unbalanced: a single brace is part of a name
        return [pattern]
    if left := _BRACES.search(names[0]):
        expected = "{00000..00009} or {a,b}"
        raise UsageError(
            f"{pattern!r} has the braces {left[0]!r}, expected {expected}",
            path=pattern,
            found=left[0],
            expected=expected,
        )
    return names


_NAME = re.compile(r"[\w.-]+\.tar")
_OUR_SHARD = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^?#]*)/shard-(\d{5})\.tar")
_USER = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*://)[^/@]*@")
_EXIT_STATUS = re.compile(r": exit -?\d+")
_BLOCK_BYTES = 1 << 20


def shown_url(url: str) -> str:
    """A URL as messages have it: without password, query and the words of a command, which may be secrets."""
    if url.startswith("pipe:"):
        return f"{url.split(maxsplit=1)[0]} ..."
    place, mark, _ = url.partition("?")
    return _USER.sub(r"\1", place.partition("#")[0]) + ("?..." if mark else "")


def copy_url(url: str, cache_dir: str | os.PathLike[str] | None) -> str:
    """The local copy of a URL that webdataset opens (``https:``, ``s3:``, ``gs:``, ``pipe:`` ...).

    A copy that is there is taken for it, so a tar must never change under its URL. Processes that copy one at
    a time each write it, to files of their own: keep ``cache_dir`` on the node.
    """
    if cache_dir is None:
        raise UsageError(
            f"{shown_url(url)} is no local file; pass cache_dir=, a folder with room for the copies, as the "
            "order and the resume need tars that can be read at random",
            path=shown_url(url),
            remedy="cache_dir=",
        )
    wanted = Path(_absolute(os.fspath(cache_dir)))

    def stem(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    try:
        folder = _safe_folder(wanted)
        ours = _OUR_SHARD.fullmatch(url)
        if ours and (path := _our_copy(ours[1], int(ours[2]), folder / stem(ours[1]))) is not None:
            return str(path)
        names = _NAME.findall(url)
        path = folder / f"{stem(url)}-{names[-1] if names else 'copy.tar'}"
        if not _is_there(path):
            _fetch(url, path, lambda temporary, _: _check_tar(url, temporary))
    except OSError as error:
        raise ReadWriteError(f"{shown_url(url)} cannot be copied to {wanted}: {error}") from error
    return str(path)


def _our_copy(root: str, shard_id: int, folder: Path) -> Path | None:
    """The copy of a shard of ours, the tar last; None where no manifest says that it is one."""
    path, said = tar_path(folder, shard_id), manifest_path(folder, shard_id)
    if _is_there(path) and _is_there(said):
        return path
    folder.mkdir(exist_ok=True)
    try:
        _fetch(f"{root}/{said.name}", said, lambda *_: None)
    except NotFound as error:
        shown = shown_url(f"{root}/{path.name}")
        logger.warning("%s is taken for an external tar: %s", shown, error)
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    manifest = read_manifest(folder, shard_id)

    def check(target: Path, found: FileStamp, stamp: FileStamp) -> None:
        if found != stamp:
            raise BrokenShard(
                f"what webdataset read from {shown_url(root)}/{target.name} has {found.num_bytes} bytes "
                f"of sha256 {found.sha256[:12]}, its manifest says {stamp.num_bytes} of "
                f"{stamp.sha256[:12]}; put the shard's three files there anew, and try again"
            )

    for target, stamp in ((idx_path(folder, shard_id), manifest.idx), (path, manifest.tar)):
        _fetch(f"{root}/{target.name}", target, lambda _, found: check(target, found, stamp))  # noqa: B023
    return path


def _safe_folder(wanted: Path) -> Path:
    """The folder itself where it is the user's alone, else one of the user's own inside of it.

    Elsewhere, as right under /tmp, others could put a file or a link where a copy is looked for.
    """
    wanted.mkdir(parents=True, exist_ok=True)
    if _is_own(wanted.stat()):
        return wanted
    folder = wanted / f"shardprep-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _is_own(found):
        raise CannotWrite(
            f"{folder} is no folder of user {os.getuid()} alone (owner {found.st_uid}, mode "
            f"{stat.filemode(found.st_mode)}), and others can write to {wanted}; name another cache_dir"
        )
    return folder


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & stat.S_IWOTH


def _is_there(path: Path) -> bool:
    """Whether a copy is there; a link of that name is none of ours."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        raise BrokenShard(f"{path} is no regular file, so no copy of ours; remove it, and try again")
    return True


def _fetch(url: str, target: Path, check: Callable[[Path, FileStamp], None]) -> None:
    """Publish what webdataset reads from a URL, once ``check`` takes it under its temporary name.

    Raises NotFound where it cannot be read, OSError where it cannot be written.
    """
    try:
        with PublishedFile(target) as copy:
            for block in _blocks(url):
                copy.write(block)
            check(copy.temporary, copy.sync())
            copy.publish()
    except (CannotWrite, ReadWriteError) as error:
        raise OSError(str(error)) from error
    sync_folder(target.parent)


def _blocks(url: str) -> Iterator[bytes]:
    """Blocks of what a URL gives. Raises NotFound, for whatever reason webdataset cannot read it."""
    from webdataset.gopen import gopen

    try:
        with gopen(url, "rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
    except Exception as error:  # each of gopen's openers raises errors of its own
        shown = shown_url(url)
        if shown == url:
            raise NotFound(f"{url} cannot be read by webdataset ({type(error).__name__}: {error})") from error
        status = _EXIT_STATUS.search(str(error))  # the rest repeats the URL
        reason = f"{type(error).__name__}{status[0] if status else ''}"
        raise NotFound(f"{shown} cannot be read by webdataset ({reason})") from None


def _check_tar(url: str, path: Path) -> None:
    try:
        scan_tar(path)
    except BrokenShard as error:
        what = "cannot be loaded" if isinstance(error, UnknownMember) else "is no whole tar"
        raise type(error)(f"what webdataset read from {shown_url(url)} {what}: {error}") from None


T = TypeVar("T")
_SHARD_TAR = re.compile(r"shard-(\d{5})\.tar")
_COMPRESSED_TAR = re.compile(r"\.(tar\.\w+|tgz)$")
_INDEX_START = re.compile(rb'\{\s*"format":\s*"shardprep-index"')


def find_shards(
    input_shards: InputShards,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    count_tokens: bool = False,
    split: SplitName | None = None,
) -> ShardSet:
    """Find what a user named; an incomplete folder is refused.

    ``count_tokens``: tars without an idx are read once for the lengths of their samples.
    """
    return find_sources(
        {"all": input_shards},
        cache_dir=cache_dir,
        count_tokens=count_tokens,
        split=split,
    )["all"]


def find_sources(
    sources: Mapping[str, InputShards],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    count_tokens: bool = False,
    split: SplitName | None = None,
) -> dict[str, ShardSet]:
    """The shards of each named source, as ``find_shards`` finds them; no shard in two of them."""
    if not sources or not all(isinstance(name, str) and name for name in sources):
        raise UsageError(
            f"input_shards names the sources {list(sources)}, expected names with shards for each",
            found=list(sources),
            expected="names with shards for each",
        )
    found = {}
    for name, input_shards in sources.items():
        finder = _Finder(count_tokens)
        for path in find_inputs(input_shards, cache_dir):
            _retried(path, finder.add, path)
        shards = found[name] = ShardSet(finder.sources(), split)
        if shards.num_samples == 0:
            side = "" if shards.split is None else f" for {shards.split}"
            raise UsageError(f"{input_shards} holds no sample{side}")
    _check_sources([dataset for shards in found.values() for dataset in shards.datasets])
    return found


class _Finder:
    """Takes the named paths one by one; what is read again after an error counts once."""

    def __init__(self, count_tokens: bool) -> None:
        self._count_tokens = count_tokens
        self._found: list[DatasetShards | ExternalTar] = []
        self._named: dict[Path, list[int]] = {}  # shards named one by one, of our data sets
        self._is_dataset: dict[str, bool] = {}

    def add(self, path: str) -> None:
        folder, name = os.path.split(path)
        shard_id = self._our_shard_id(folder, name)
        if shard_id is not None:
            self._named.setdefault(Path(folder), []).append(shard_id)
        elif name == INDEX_NAME:
            self._found.append(_dataset(Path(folder)))
        elif name.endswith(".tar"):
            self._found += self._external([path])
        elif is_folder(Path(path)):
            self._found += self._in_folder(Path(path))
        else:
            raise UsageError(
                f"{path} cannot be loaded, expected a tar, a folder or an {INDEX_NAME}; name tars as in "
                f"{Path(folder) / 'shard-*.tar'}, and decompress .tar.gz files first",
                path=path,
                expected=f"a tar, a folder or an {INDEX_NAME}",
            )

    def sources(self) -> list[DatasetShards | ExternalTar]:
        some = [_retried(folder, _dataset, folder, ids) for folder, ids in self._named.items()]
        return [*self._found, *some]

    def _our_shard_id(self, folder: str, name: str) -> int | None:
        match = _SHARD_TAR.fullmatch(name)
        if match is None:
            return None
        if folder not in self._is_dataset:
            self._is_dataset[folder] = _has_index_or_plan(Path(folder))
        is_ours = (
            self._is_dataset[folder] or size_of_file(manifest_path(Path(folder), int(match[1]))) is not None
        )
        return int(match[1]) if is_ours else None

    def _in_folder(self, folder: Path) -> list[DatasetShards] | list[ExternalTar]:
        if _has_index_or_plan(folder) or manifest_ids(folder):
            return [_dataset(folder)]
        names = names_in(folder)
        for path in (folder / name for name in names if _COMPRESSED_TAR.search(name)):
            raise UsageError(f"{path} is compressed; decompress it, or name the other tars one by one")
        tars = [str(folder / name) for name in names if name.endswith(".tar")]
        if not tars:
            remedy = f"shardprep plan --input_dir {quoted(folder)} --output_dir DATA --model_id MODEL"
            raise NotFound(
                f"{folder} holds no shards: no {INDEX_NAME}, no manifest and no .tar; if it holds raw text, "
                f"run: {remedy}",
                path=folder,
                remedy=remedy,
            )
        return self._external(tars)

    def _external(self, paths: list[str]) -> list[ExternalTar]:
        def scanned(tar: Path) -> ExternalTar:
            samples = scan_tar(tar, count_tokens=self._count_tokens)
            return ExternalTar(path=tar, samples=samples, tar_bytes=tar.stat().st_size)

        return [_retried(path, scanned, Path(path)) for path in paths]


def _retried(path: Path | str, attempt: Callable[..., T], *given: Any) -> T:
    return with_retries(f"{path} cannot be read", lambda: attempt(*given))


def _has_index(folder: Path) -> bool:
    """Whether there is an index.json, and it is ours: others write files of that name, too."""
    return _INDEX_START.match(read_beginning(folder / INDEX_NAME, 200)) is not None


def _has_index_or_plan(folder: Path) -> bool:
    return _has_index(folder) or size_of_file(folder / PLAN_NAME) is not None


def _dataset(folder: Path, shard_ids: list[int] | None = None) -> DatasetShards:
    """A data set, or the shards of it that were named one by one; the others need not be there.

    Done-ness is asked as everywhere; the sizes of files are compared when they are opened. With an index.json
    that is four opens for a whole data set, of which plan.json and findings.json are two.
    """
    if shard_ids is None or _has_index(folder):
        index = read_index(folder)
        num_shards = len(index.columns)
        ids = rows = np.arange(num_shards) if shard_ids is None else np.array(shard_ids)
        if beyond := ids[ids >= num_shards].tolist():
            path = tar_path(folder, beyond[0])
            raise NotFound(
                f"{path} is none of the {num_shards} shards that {folder / INDEX_NAME} lists; take it out of "
                "the folder or out of input_shards",
                path=path,
                expected=f"{num_shards} shards",
            )
    else:
        index = merge_manifests(folder, (read_manifest(folder, shard_id) for shard_id in shard_ids))
        ids, rows = np.array(shard_ids), np.arange(len(shard_ids))
    refuse_other_plan(folder, index.spec.plan_id)
    refuse_found(folder, read_findings(folder, index.spec.plan_id), ids.tolist())
    return DatasetShards(
        folder=folder,
        spec=index.spec,
        shard_ids=ids,
        num_samples=index.column("num_samples")[rows],
        num_tokens=index.column("num_tokens")[rows],
        tar_bytes=index.column("tar_bytes")[rows],
        tar_sha256=np.array(index.tar_sha256)[rows],
        num_validation=index.column(VALIDATION_COLUMN)[rows] if index.spec.validation_fraction else None,
        has_blanks=bool(index.blanked),
    )


def _check_sources(datasets: list[DatasetShards]) -> None:
    """Refuse data sets of different tokenizers, and one named twice, whose shards would be seen twice."""
    tokenizers: dict[str, tuple[Path, TokenizerSpec]] = {}
    folders: set[Path] = set()
    for dataset in datasets:
        tokenizers.setdefault(dataset.spec.tokenizer.fingerprint, (dataset.folder, dataset.spec.tokenizer))
        if dataset.folder in folders:
            raise UsageError(
                f"{dataset.folder} is named twice, as in two sources, or as a folder and by its shards; name "
                "it once",
                path=dataset.folder,
                expected="once",
            )
        folders.add(dataset.folder)
    if len(tokenizers) > 1:
        found = "; ".join(
            f"{folder} was made with {spec.model_id} ({spec.fingerprint[:12]})"
            for folder, spec in tokenizers.values()
        )
        (_, first), (folder, other), *_ = tokenizers.values()
        raise OtherTokenizer(
            f"{found}; token ids of different tokenizers cannot be mixed: prepare one again",
            path=folder,
            found=other.fingerprint[:12],
            expected=first.fingerprint[:12],
        )
