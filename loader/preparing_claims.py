"""Who prepares a data set: claims, small files in ``.NAME.preparing`` beside the data set's folder.

    00001.json    {"launch": ..., "place": ..., "num_beats": 17, "exit_code": null, "error": null}

A claim is taken by a link under the next number, so that of two jobs one is first. Who waits compares what
the file holds with what it held before, by its own clock.

Two owners at once would do no harm, only cost time: shards are equal bytes, and done ones are skipped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardprep.atomic_files import PublishedFile, publish_bytes
from shardprep.errors import CannotWrite, ShardprepError
from shardprep.regular_files import names_in, read_regular

_MAX_CLAIM_BYTES = 1 << 20
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
        try:
            data = json.loads(read_regular(self._path(number), max_bytes=_MAX_CLAIM_BYTES))
            return number, Claim(**{field.name: data[field.name] for field in dataclasses.fields(Claim)})
        except (ShardprepError, OSError, ValueError, TypeError, KeyError, RecursionError):
            return number, None  # being removed, or no claim of ours: it will not change

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
        file.write(self._content(self.claim()))
        file.sync()
        return file.publish_first()

    def claim(self) -> Claim:
        return Claim(launch=self.launch, place=place_of(os.getpid()))

    def write(self, number: int, claim: Claim) -> None:
        publish_bytes(self._path(number), self._content(claim))

    def remove(self) -> None:
        """When index.json is there, nobody looks at claims any more."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:05d}.json"

    @staticmethod
    def _content(claim: Claim) -> bytes:
        return json.dumps(dataclasses.asdict(claim)).encode()


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
