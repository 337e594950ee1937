"""Who prepares a data set: claims, small files in ``.NAME.preparing`` beside the data set's folder.

    00001.json    {"launch": ..., "place": ..., "num_beats": 17, "exit_code": null, "error": null}
    1f0c....verdict    the same, of rank 0 of one launch: what its other ranks go on, or end, with

A claim is taken by a link under the next number, so that of two jobs one is first. Who waits compares what
the file holds with what it held before, by its own clock.

Two owners at once would do no harm, only cost time: shards are equal bytes, and done ones are skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardprep.atomic_files import PublishedFile, publish_bytes
from shardprep.errors import CannotWrite, ShardprepError, Stopped
from shardprep.regular_files import names_in, read_regular

_MAX_CLAIM_BYTES = 1 << 20
_VERDICT = ".verdict"
_KEPT_S = 24 * 3600.0  # a verdict: the ranks of its launch have read it by then
_LAUNCH = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the file of a claim holds."""

    launch: str  # which start of which job; "" where no launcher says so
    place: str  # the owner's process, for others on its machine
    num_beats: int = 0
    exit_code: int | None = None  # None while the owner is at work
    error: str | None = None


def _read_claim(path: Path) -> Claim | None:
    try:
        data = json.loads(read_regular(path, max_bytes=_MAX_CLAIM_BYTES))
        return Claim(**{field.name: data[field.name] for field in dataclasses.fields(Claim)})
    except (ShardprepError, OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # being removed, or no claim of ours: it will not change


def _content(claim: Claim) -> bytes:
    return json.dumps(dataclasses.asdict(claim)).encode()


class Claims:
    """The claims in one folder."""

    def __init__(self, folder: Path, launch: str) -> None:
        self._folder = folder
        self.launch = launch

    def newest(self) -> tuple[int, Claim | None]:
        """Its number and content; 0 and None where there is none; None where it cannot be read."""
        number = max(self._numbers(), default=0)
        if not number:
            return 0, None
        return number, _read_claim(self._path(number))

    def _numbers(self) -> list[int]:
        names = names_in(self._folder)
        return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()]

    def take(self, number: int) -> bool:
        """Whether the claim of this number is now ours."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"{self._folder} cannot be made: {error.strerror}") from None
        file = PublishedFile(self._path(number))
        file.write(_content(self.claim()))
        file.sync()
        return file.publish_first()

    def claim(self) -> Claim:
        return Claim(launch=self.launch, place=place_of(os.getpid()))

    def write(self, number: int, claim: Claim) -> None:
        publish_bytes(self._path(number), _content(claim))

    def remove(self) -> None:
        """When index.json is there, nobody looks at claims any more. Verdicts stay."""
        with contextlib.suppress(OSError):
            for number in self._numbers():
                self._path(number).unlink(missing_ok=True)
            self._folder.rmdir()  # which does nothing to a folder that holds something

    def verdict(self, *asked: Any) -> Verdict:
        """Where rank 0 says what became of a call of this launch with these arguments."""
        digest = hashlib.sha256(json.dumps([self.launch, *asked], sort_keys=True, default=str).encode())
        return Verdict(self._folder / f"{digest.hexdigest()[:16]}{_VERDICT}", self.claim())

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:05d}.json"


class Verdict:
    """What rank 0 of this launch found, for its other ranks: the data set is as asked for, or an error.

    A file that stays: nobody knows when the last rank has read it. A day later another rank 0 removes it.
    """

    def __init__(self, path: Path, claim: Claim) -> None:
        self._path = path
        self._claim = claim
        self._first = self.read()

    @property
    def can_be_told(self) -> bool:
        """Whether it is known which launch this is, and the file can be written, as far as one can see."""
        folder = self._path.parent if self._path.parent.exists() else self._path.parent.parent
        return bool(self._claim.launch) and os.access(folder, os.W_OK | os.X_OK)

    def read(self) -> Claim | None:
        """The verdict; its ``exit_code`` is 0 where the data set is as asked for."""
        return _read_claim(self._path)

    @property
    def is_doubtful(self) -> bool:
        """Whether it may be of an earlier start: it was there at first, and its writer is gone."""
        found = self.read()
        return found is not None and found == self._first and is_gone(found.place)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Say how the work within ends, and remove what an earlier start said."""
        self._remove_old()
        exit_code, error = 0, None
        try:
            yield
        except ShardprepError as failure:
            exit_code, error = failure.exit_code, str(failure)
            raise
        except BaseException as failure:
            exit_code, error = Stopped.exit_code, f"rank 0 was stopped ({type(failure).__name__})"
            raise
        finally:
            if self.can_be_told:
                with contextlib.suppress(ShardprepError, OSError):
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    claim = dataclasses.replace(self._claim, exit_code=exit_code, error=error)
                    publish_bytes(self._path, _content(claim))

    def _remove_old(self) -> None:
        with contextlib.suppress(OSError):
            for path in self._path.parent.glob(f"*{_VERDICT}"):
                if path == self._path or time.time() - path.stat().st_mtime > _KEPT_S:
                    path.unlink(missing_ok=True)


class WatchedClaim:
    """The newest claim, and since when it has not changed, by this process's clock."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self.number, self.claim = claims.newest()
        self.is_changed = False  # since the first look
        self._since = time.monotonic()

    def look(self) -> None:
        now = self._claims.newest()
        if now != (self.number, self.claim):
            self.number, self.claim = now
            self.is_changed, self._since = True, time.monotonic()

    @property
    def unchanged_s(self) -> float:
        return time.monotonic() - self._since

    @property
    def is_of_this_launch(self) -> bool:
        """Whether it is surely ours; without a launcher nobody can say."""
        return self.claim is not None and self.claim.launch == self._claims.launch != ""

    @property
    def is_of_the_past(self) -> bool:
        """Whether an earlier launch left it, and nobody has changed it since the first look."""
        launch = self._claims.launch
        if self.claim is None or self.is_changed or not launch:
            return False
        return self.claim.launch not in {"", launch}


def launch_of(environ: Mapping[str, str]) -> str:
    """The same text in all processes of one start of a job; another in the next one; "" if unknown."""
    return " ".join(f"{name}={environ[name]}" for name in _LAUNCH if environ.get(name))


def place_of(pid: int) -> str:
    """A process, so that who reads it on the same machine can see if it lives; "" where that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return ""
    state, started = fields[0], fields[19]
    return "" if state in "ZX" else f"{boot} {namespace} {pid} {started}"


def is_gone(place: str) -> bool:
    """Whether the process ran here and is surely dead."""
    here = place_of(os.getpid()).split(" ")
    words = place.split(" ")
    if len(words) != len(here) or words[:2] != here[:2] or not words[2].isdigit():
        return False
    return place_of(int(words[2])) != place
