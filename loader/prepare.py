"""``ensure_prepared``: a training job that makes its own data set first, once, on one of its processes.

Rank 0 plans, makes the shards and verifies them, in processes of its own; the other ranks wait. They need
nothing but the file system, in ``.NAME.preparing`` beside the data set's folder:

    00001.json      a claim: {"launch": ..., "place": ..., "num_beats": 17, "exit_code": null, "error": null}
    1f0c...verdict  the same, of rank 0 of one launch: what its other ranks go on, or end, with

A claim is taken by a link under the next number, so that of two jobs one is first. Its owner rewrites it four
times per ``heartbeat_s``; one that stays the same for too long, by the watcher's clock, is dead. Two owners
at once would only cost time: shards are equal bytes, and done ones are skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from loader.ranks import find_process_rank
from shardprep.console import say
from shardprep.errors import (
    BadInput,
    CannotWrite,
    NotFound,
    ReadWriteError,
    Refused,
    ShardprepError,
    Stopped,
    UsageError,
)
from shardprep.files import PublishedFile, names_in, publish_bytes, read_regular, size_of_file
from shardprep.format.names import INDEX_NAME, PLAN_NAME

_MAX_CLAIM_BYTES = 1 << 20
_VERDICT = ".verdict"
_KEPT_S = 24 * 3600.0  # a verdict: the ranks of its launch have read it by then
_LAUNCH = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the file of a claim or a verdict holds."""

    launch: str  # which start of which job; "" where no launcher says so
    place: str  # the owner's process, for others on its machine
    num_beats: int = 0
    exit_code: int | None = None  # None while the owner is at work
    error: str | None = None

    def written(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()


def _read_claim(path: Path) -> Claim | None:
    try:
        data = json.loads(read_regular(path, max_bytes=_MAX_CLAIM_BYTES))
        return Claim(**{field.name: data[field.name] for field in dataclasses.fields(Claim)})
    except (ShardprepError, OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # being removed, or no claim of ours: it will not change


@contextmanager
def _end_told(tell: Callable[[int, str | None], None]) -> Iterator[None]:
    """Tell how the work within ends: its exit code, and the error if it is not 0."""
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
        with contextlib.suppress(ShardprepError, OSError):  # what ended the work is of more weight
            tell(exit_code, error)


class Claims:
    """The newest claim in a folder, and since when it has not changed, by this process's clock."""

    def __init__(self, folder: Path, own: Claim) -> None:
        self.folder = folder
        self.own = own
        self.is_changed = False  # since the first look
        self._since = time.monotonic()
        self.number, self.newest = self._look()

    def look(self) -> None:
        found = self._look()
        if found != (self.number, self.newest):
            self.number, self.newest = found
            self.is_changed, self._since = True, time.monotonic()

    def _look(self) -> tuple[int, Claim | None]:
        """Number and content of the newest; 0 and None without one; None where it cannot be read."""
        number = max(self._numbers(), default=0)
        return number, _read_claim(self._path(number)) if number else None

    @property
    def unchanged_s(self) -> float:
        return time.monotonic() - self._since

    def take(self, number: int) -> bool:
        """Whether the claim of this number is now ours."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"{self.folder} cannot be made: {error.strerror}") from None
        file = PublishedFile(self._path(number))
        file.write(self.own.written())
        file.sync()
        return file.publish_first()

    @contextmanager
    def beating(self, number: int, every_s: float) -> Iterator[None]:
        """Within, a claim of ours changes; it holds the error of what fails within."""
        is_over = threading.Event()
        path = self._path(number)

        def beat() -> None:
            num_beats = 0
            while not is_over.wait(every_s):
                num_beats += 1
                with contextlib.suppress(ShardprepError):  # one beat that fails is no reason to stop
                    publish_bytes(path, dataclasses.replace(self.own, num_beats=num_beats).written())

        thread = threading.Thread(target=beat, name="ensure_prepared heartbeat", daemon=True)
        thread.start()

        def tell(exit_code: int, error: str | None) -> None:
            is_over.set()
            thread.join()
            if exit_code:
                publish_bytes(path, dataclasses.replace(self.own, exit_code=exit_code, error=error).written())

        with _end_told(tell):
            yield

    def remove(self) -> None:
        """When index.json is there, nobody looks at claims any more. Verdicts stay."""
        with contextlib.suppress(OSError):
            for number in self._numbers():
                self._path(number).unlink(missing_ok=True)
            self.folder.rmdir()  # which does nothing to a folder that holds something

    def _numbers(self) -> list[int]:
        names = names_in(self.folder)
        return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()]

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05d}.json"


class Verdict:
    """What rank 0 of this launch found, for its other ranks: the data set is as asked for, or an error.

    A file that stays: nobody knows when the last rank has read it. A day later another rank 0 removes it.
    """

    def __init__(self, folder: Path, own: Claim, *asked: Any) -> None:
        digest = hashlib.sha256(json.dumps([own.launch, *asked], sort_keys=True, default=str).encode())
        self._path = folder / f"{digest.hexdigest()[:16]}{_VERDICT}"
        self._own = own
        self._first = self.read()

    def read(self) -> Claim | None:
        """The verdict; its ``exit_code`` is 0 where the data set is as asked for."""
        return _read_claim(self._path)

    @property
    def can_be_told(self) -> bool:
        """Whether it is known which launch this is, and the file can be written, as far as one can see."""
        folder = self._path.parent if self._path.parent.exists() else self._path.parent.parent
        return bool(self._own.launch) and os.access(folder, os.W_OK | os.X_OK)

    @property
    def is_doubtful(self) -> bool:
        """Whether it may be of an earlier start: it was there at first, and its writer is gone."""
        found = self.read()
        return found is not None and found == self._first and is_gone(found.place)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Say how the work within ends, and remove what an earlier start said."""
        with contextlib.suppress(OSError):
            for path in self._path.parent.glob(f"*{_VERDICT}"):
                if path == self._path or time.time() - path.stat().st_mtime > _KEPT_S:
                    path.unlink(missing_ok=True)

        def tell(exit_code: int, error: str | None) -> None:
            if self.can_be_told:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                claim = dataclasses.replace(self._own, exit_code=exit_code, error=error)
                publish_bytes(self._path, claim.written())

        with _end_told(tell):
            yield


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


_BEGIN_S = 600.0  # how long the others wait for a first sign of rank 0, which may still import
_BEATS_PER_HEARTBEAT = 4
_SAY_EVERY_S = 60.0  # that this rank waits
# An owner whose claim stays the same for so many heartbeat_s is dead. Rank 0 takes over before others fail.
_DEAD_FOR_OWNERS, _DEAD_FOR_WAITERS = 1.0, 1.75

_ERRORS: dict[int, type[ShardprepError]] = {
    kind.exit_code: kind for kind in (UsageError, BadInput, NotFound, CannotWrite, ReadWriteError, Refused)
}
# What is told to ``plan`` alone: it decides no byte of a document, so the other commands do not know it.
_FOR_PLAN = ("num_shards", "shard_bytes", "stripe", "hash_inputs")


def ensure_prepared(
    output_dir: str | os.PathLike[str],
    *,
    input_dir: str | os.PathLike[str],
    model_id: str,
    num_proc: int | None = None,
    limit_s: float = 24 * 3600.0,
    heartbeat_s: float = 15.0,
    rank: int | None = None,
    world_size: int | None = None,
    **options: Any,
) -> str:
    """Return ``output_dir`` when the data set in it is whole and verified; make it before, if it is not.

    Every rank calls it, before the process group is made (its timeout is short) or after. Rank 0 runs
    ``shardprep plan``, ``run`` and ``verify``, which go on where an earlier attempt ended.

    ``options``: flags of ``shardprep plan`` by name, such as ``num_shards=64, record="packed"``.
    ``num_proc``: processes that make shards; default: one per CPU that rank 0 may use.
    ``limit_s``: how long a rank waits at most, in seconds.
    ``heartbeat_s``: a rank that waits fails within twice this time, in seconds, when rank 0 fails or dies.
    ``rank``, ``world_size``: default: of torch.distributed or the launcher, as for the loader.

    Raises on every rank what made rank 0 fail: UsageError, BadInput, NotFound, CannotWrite, ReadWriteError,
    or Refused where ``output_dir`` was planned with other options, or ``input_dir`` no longer holds the
    planned files: by name, size, and a sample of each file whose mtime differs. Raises ReadWriteError where
    rank 0 died or the limit is over.
    """
    if not (heartbeat_s > 0 and limit_s > 0):
        raise UsageError(f"heartbeat_s is {heartbeat_s}, limit_s is {limit_s}; expected more than 0")
    folder = Path(output_dir).absolute()
    who = find_process_rank(rank, world_size)
    own = Claim(launch=launch_of(os.environ), place=place_of(os.getpid()))
    notes = folder.with_name(f".{folder.name}.preparing")
    verdict = Verdict(notes, own, os.fspath(input_dir), model_id, options)
    wait = _Wait(folder, Claims(notes, own), heartbeat_s, limit_s, who.rank)
    given = {
        "input_dir": Path(input_dir).absolute(), "output_dir": folder, "model_id": model_id, **options
    }  # fmt: skip

    def check() -> None:
        """Raises Refused where the data set was planned with other options or from other inputs."""
        # Shard 0 is done already, so it compares and ends.
        _run("shard", "--shard_id=0", "--check_inputs", *_flags(given, but=_FOR_PLAN))

    if who.rank != 0:
        if wait.is_left_to_compare(verdict):
            check()
        return os.fspath(output_dir)
    told = verdict.told() if who.world_size > 1 else contextlib.nullcontext()
    with told, wait.for_own_claim() as is_owned:
        if is_owned and size_of_file(folder / PLAN_NAME) is None:
            _run("plan", *_flags(given))
        else:
            check()
        if is_owned:
            _run("run", str(folder), *_flags({"num_proc": num_proc}))
            _run("verify", str(folder))
    return os.fspath(output_dir)


class _Wait:
    """What a rank does that must not prepare, or not yet."""

    def __init__(self, folder: Path, claims: Claims, heartbeat_s: float, limit_s: float, rank: int) -> None:
        self._folder = folder
        self._claims = claims
        self._heartbeat_s = heartbeat_s
        self._limit_s = limit_s
        self._rank = rank
        self._began = time.monotonic()
        self._said: float | None = None

    def is_left_to_compare(self, verdict: Verdict) -> bool:
        """Return when the data set is verified; raise what rank 0 failed with.

        True where rank 0 cannot say that it is as asked for, so that this rank must compare by itself.
        """
        while True:
            found = verdict.read()
            if self._is_verified() and (verdict.is_doubtful or not verdict.can_be_told):
                return True
            if found is not None and not verdict.is_doubtful:
                if found.exit_code:
                    self._raise_error_of(found)
                return False
            self._say(
                f"waiting for rank 0 to prepare {self._folder}, or to compare it with what is asked for"
            )
            self._check_limit()
            self._claims.look()
            self._check_rank_0(self._claims.newest, self._claims.own.launch)
            self._sleep()

    def _check_rank_0(self, claim: Claim | None, launch: str) -> None:
        """Raise where rank 0 failed, died, or does not begin."""
        claims = self._claims
        is_of_the_past = launch and claim is not None and claim.launch not in {"", launch}
        if claim is None or (is_of_the_past and not claims.is_changed):
            if not claims.is_changed and time.monotonic() - self._began > _BEGIN_S:
                raise ReadWriteError(
                    f"{self._folder} is not prepared, and rank 0 has not begun to for {_BEGIN_S:.0f} s; "
                    "every rank must call ensure_prepared, see the log of rank 0"
                )
            return
        is_over = claims.unchanged_s > self._heartbeat_s * _DEAD_FOR_WAITERS
        if claim.exit_code is not None:
            if is_over or claim.launch == launch != "":
                self._raise_error_of(claim)
        elif is_over and not self._is_verified():
            raise ReadWriteError(
                f"the process that prepared {self._folder} gave no sign for {claims.unchanged_s:.0f} s, so "
                "it died; what it finished is kept: start the job again to go on"
            )

    def _raise_error_of(self, claim: Claim) -> NoReturn:
        _raise(claim.exit_code or 0, f"rank 0 could not prepare {self._folder}: {claim.error}")

    @contextmanager
    def for_own_claim(self) -> Iterator[bool]:
        """True while the claim is ours; False where the data set is verified, perhaps by another job."""
        claims = self._claims
        while not self._is_verified():
            self._check_limit()
            claims.look()
            if not self._is_free(claims.newest):
                self._say(f"{self._folder} is being prepared by another job: waiting for it")
            elif claims.take(claims.number + 1):
                with claims.beating(claims.number + 1, self._heartbeat_s / _BEATS_PER_HEARTBEAT):
                    yield True
                claims.remove()
                return
            self._sleep()
        yield False

    def _is_free(self, claim: Claim | None) -> bool:
        unchanged_s = self._claims.unchanged_s
        if claim is None or claim.exit_code is not None or is_gone(claim.place):
            return claim is not None or self._claims.number == 0 or unchanged_s > self._heartbeat_s
        return unchanged_s > self._heartbeat_s * _DEAD_FOR_OWNERS

    def _is_verified(self) -> bool:
        return size_of_file(self._folder / INDEX_NAME) is not None

    def _check_limit(self) -> None:
        if time.monotonic() - self._began > self._limit_s:
            raise ReadWriteError(
                f"{self._folder} is not prepared after {self._limit_s:g} s (limit_s); see the log of rank 0"
            )

    def _say(self, line: str) -> None:
        """Say it when the waiting begins, and once a minute."""
        now = time.monotonic()
        if self._said is not None and now - self._said < _SAY_EVERY_S:
            return
        by_now = "" if self._said is None else f", for {now - self._began:.0f} s by now"
        say(f"rank {self._rank}: {line}{by_now}")
        self._said = now

    def _sleep(self) -> None:
        time.sleep(min(1.0, self._heartbeat_s / 10))


def _flags(given: Mapping[str, Any], but: Container[str] = ()) -> list[str]:
    flags: list[str] = []
    for name, value in given.items():
        if name in but or value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags.append(f"--{name}={value}")
    return flags


# Ours come before a preprocess.py in the current folder. The process dies with the one that started it.
_CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from shardprep.signals import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
    "from shardprep.__main__ import main; sys.exit(main())"
)


_ERROR_LINE = re.compile(r"(?:shardprep \w+: )?error: (.+)")  # argparse puts the command before it


def _run(*words: str) -> None:
    """Run one command; its lines go to this process's standard error. Raises the error that it ended with."""
    home = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", _CODE, home, str(os.getpid()), *words]
    last_error = ""
    null, pipe, both = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(
        command, stdin=null, stdout=pipe, stderr=both, text=True, errors="replace"
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                say(line.rstrip("\n"))
                if found := _ERROR_LINE.match(line):
                    last_error = found[1]
        except BaseException:
            process.terminate()
            raise
    if code := process.returncode:
        shown = f"signal {-code}" if code < 0 else f"exit code {code}"
        _raise(code, f"shardprep {words[0]} ended with {shown}" + (f": {last_error}" if last_error else ""))


def _raise(exit_code: int, message: str) -> NoReturn:
    raise _ERRORS.get(exit_code, ReadWriteError)(message)
