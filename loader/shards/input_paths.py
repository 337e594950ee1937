"""What a user names as ``input_shards`` -> paths of tars, data set folders and index.json files that exist.

``exclude_shards`` names shards to leave out. They are left out before the sampling order is made, and a name
that fits no shard is an error.

A tar that is no local file is copied once, by webdataset, to where the loader can read at random:

    DIR/<16 digits of the URL>-part-07.tar                      an external tar
    DIR/<16 digits of the folder's URL>/shard-00000.tar ...     a shard of ours, with its manifest and idx

So a shard of ours is one wherever it came from: it has the same fingerprint, and a run may go on with it.
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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from braceexpand import braceexpand

from loader.shards.tar_samples import scan_tar
from shardprep.atomic_files import PublishedFile, sync_folder
from shardprep.errors import BrokenShard, CannotWrite, NotFound, ReadWriteError, UnknownMember, UsageError
from shardprep.format.manifest import read_manifest
from shardprep.format.names import idx_path, manifest_path, tar_path
from shardprep.regular_files import FileStamp


class ExcludedShards:
    """What ``exclude_shards`` names: a shard's number, its tar's name, or the tar's path."""

    def __init__(self, names: Iterable[int | str | os.PathLike[str]]) -> None:
        self._found: dict[int | str, set[str]] = {_key(name): set() for name in names}

    def __bool__(self) -> bool:
        return bool(self._found)

    def has(self, path: str, shard_id: int | None) -> bool:
        """Whether a tar is excluded; ``shard_id`` is its number in a data set of ours."""
        if not self._found:
            return False
        keys = (path, path.rpartition("/")[2], shard_id)
        named = [key for key in keys if key is not None and key in self._found]
        for key in named:
            self._found[key].add(path)
        return bool(named)

    def check_all_found(self) -> None:
        """Raises UsageError for a name that fits no shard, or more than one."""
        for name, paths in self._found.items():
            if not paths:
                raise UsageError(
                    f"exclude_shards names {name!r}, which is none of the shards; expected the number of a "
                    "shard of ours, or the name or path of a tar"
                )
            if len(paths) > 1:
                raise UsageError(
                    f"exclude_shards names {name!r}, which fits {' and '.join(sorted(paths)[:2])}; "
                    "name the path"
                )


def _key(name: int | str | os.PathLike[str]) -> int | str:
    """A number, a tar's name, or an absolute path."""
    if isinstance(name, int):
        return name
    text = os.fspath(name)
    return os.path.abspath(text) if "/" in text else text  # noqa: PTH100  links are not followed


InputShards: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

_BRACES = re.compile(r"\{([^{}]*)\}")
_URL = re.compile(r"^(?:[a-zA-Z][a-zA-Z0-9+.-]*://|pipe:)")


def find_inputs(input_shards: InputShards, cache_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Every absolute path that was named, brace patterns and globs expanded, in the order given.

    What is no local file is copied to ``cache_dir`` by webdataset. Raises NotFound naming what does
    not exist, UsageError for none or for one named twice. 100,000 shards take 0.4 s, hence no Path.
    """
    named = [input_shards] if isinstance(input_shards, (str, os.PathLike)) else list(input_shards)
    names_in: dict[str, frozenset[str] | None] = {}
    paths: list[str] = []
    for name in [os.fspath(each) for each in named]:
        if _URL.match(name):
            paths += [copy_url(url, cache_dir) for url in expand_braces(name)]
        else:
            paths += _expand(name, names_in)
    if not paths:
        raise UsageError("input_shards is empty; name a folder, an index.json, tars or a pattern of tars")
    if len(set(paths)) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise UsageError(f"{twice} is named twice in input_shards; an epoch would see its samples twice")
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
            raise NotFound(
                f"{path} does not exist{of}; name a folder, an index.json, tars or a pattern of tars"
            )
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
        raise UsageError(f"{pattern!r} has the braces {left[0]!r}, expected {{00000..00009}} or {{a,b}}")
    return names


logger = logging.getLogger(__name__)

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

    A copy that is there is taken for it, so a tar must never change under its URL. Two processes that
    copy one at a time both write it, each to a file of its own, and rename: keep ``cache_dir`` on the
    node. In one that others can write to, or own, a folder of the user's own is made. Raises UsageError
    without a ``cache_dir``, NotFound, BrokenShard, CannotWrite, ReadWriteError.
    """
    if cache_dir is None:
        raise UsageError(
            f"{shown_url(url)} is no local file; pass cache_dir=, a folder with room for the copies, as the "
            "order and the resume need tars that can be read at random"
        )
    wanted = Path(os.path.abspath(cache_dir))  # noqa: PTH100
    try:
        folder = _safe_folder(wanted)
        ours = _OUR_SHARD.fullmatch(url)
        if ours and (path := _our_copy(ours[1], int(ours[2]), folder / _stem(ours[1]))) is not None:
            return str(path)
        names = _NAME.findall(url)
        path = folder / f"{_stem(url)}-{names[-1] if names else 'copy.tar'}"
        if not _is_there(path):
            with _fetched(url, path) as (copy, _):
                _check_tar(url, copy.temporary)
                copy.publish()
    except OSError as error:
        raise ReadWriteError(f"{shown_url(url)} cannot be copied to {wanted}: {error}") from error
    return str(path)


def _our_copy(root: str, shard_id: int, folder: Path) -> Path | None:
    """The copy of a shard of ours, the tar last; None where no manifest says that it is one."""
    path = tar_path(folder, shard_id)
    if _is_there(path) and _is_there(manifest_path(folder, shard_id)):
        return path
    folder.mkdir(exist_ok=True)
    target = manifest_path(folder, shard_id)
    try:
        with _fetched(f"{root}/{target.name}", target) as (copy, _):
            copy.publish()
    except NotFound as error:
        shown = shown_url(f"{root}/{path.name}")
        logger.warning("%s is taken for an external tar: %s", shown, error)
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    manifest = read_manifest(folder, shard_id)
    for target, stamp in ((idx_path(folder, shard_id), manifest.idx), (path, manifest.tar)):
        with _fetched(f"{root}/{target.name}", target) as (copy, found):
            if found != stamp:
                raise BrokenShard(
                    f"what webdataset read from {shown_url(root)}/{target.name} has {found.num_bytes} bytes "
                    f"of sha256 {found.sha256[:12]}, its manifest says {stamp.num_bytes} of "
                    f"{stamp.sha256[:12]}; put the shard's three files there anew, and try again"
                )
            copy.publish()
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


def _stem(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _fetched(url: str, target: Path) -> Iterator[tuple[PublishedFile, FileStamp]]:
    """What webdataset reads from a URL, synced under a temporary name; gone in the end unless published.

    Raises NotFound where it cannot be read, OSError where it cannot be written.
    """
    try:
        copy = PublishedFile(target)
        try:
            for block in _blocks(url):
                copy.write(block)
            yield copy, copy.sync()
        finally:
            copy.discard()
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
    except UnknownMember as error:
        raise UnknownMember(f"what webdataset read from {shown_url(url)} cannot be loaded: {error}") from None
    except BrokenShard as error:
        raise BrokenShard(f"what webdataset read from {shown_url(url)} is no whole tar: {error}") from None
