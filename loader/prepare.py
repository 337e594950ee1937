"""``ensure_prepared``: a training job that makes its own data set first, once, on one of its processes.

Rank 0 plans, makes the shards and verifies them, in processes of its own; the other ranks wait. They need
nothing but the file system, in ``.NAME.preparing`` beside the data set's folder:

    00001.json      a claim: {"launch": ..., "place": ..., "num_beats": 17, "exit_code": null, "error": null}
    1f0c...verdict  the same, of rank 0 of one launch: what its other ranks wait for, go on with or end with

A claim is taken by a link under the next number, so that of two jobs one is first. Rank 0 rewrites its files
four times per ``heartbeat_s``; one that stays the same for too long, by the watcher's clock, is dead. Two
owners at once would only cost time: shards are equal bytes, and done ones are skipped.
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
from shardprep.files import (
    PublishedFile,
    check_names_are_utf8,
    names_in,
    publish_bytes,
    read_regular,
    size_of_file,
)
from shardprep.format.checked_json import load_json
from shardprep.format.names import INDEX_NAME, PLAN_NAME
from shardprep.own_packages import HOME

_MAX_CLAIM_BYTES = 1 << 20
_VERDICT = ".verdict"
_KEPT_S = 24 * 3600.0  # a verdict: the ranks of its launch have read it by then
_LAUNCH = (  # the same in all processes of one start of a job, others in the next one
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
        data = load_json(read_regular(path, max_bytes=_MAX_CLAIM_BYTES))
        return Claim(**{field.name: data[field.name] for field in dataclasses.fields(Claim)})
    except (ShardprepError, OSError, ValueError, TypeError, KeyError):
        return None  # being removed, or no claim of ours: it will not change


class Note:
    """A file with a Claim, and since when it has not changed, by this process's clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.claim = _read_claim(path)
        self.is_changed = False  # since the first look
        self._since = time.monotonic()

    def look(self) -> None:
        found = _read_claim(self.path)
        if found != self.claim:
            self.claim, self.is_changed, self._since = found, True, time.monotonic()

    @property
    def unchanged_s(self) -> float:
        return time.monotonic() - self._since


@contextmanager
def _beating(path: Path, own: Claim, every_s: float) -> Iterator[None]:
    """Within, a claim of ours changes; then it says how the work within ended."""
    is_over = threading.Event()

    def write(**given: Any) -> None:
        with contextlib.suppress(ShardprepError, OSError):  # the work itself is of more weight
            publish_bytes(path, dataclasses.replace(own, **given).written())

    def beat() -> None:
        num_beats = 0
        while not is_over.wait(every_s):
            num_beats += 1
            write(num_beats=num_beats)

    write()
    thread = threading.Thread(target=beat, name="ensure_prepared heartbeat", daemon=True)
    thread.start()
    end: dict[str, Any] = {"exit_code": 0}
    try:
        yield
    except ShardprepError as failure:
        end = {"exit_code": failure.exit_code, "error": str(failure)}
        raise
    except BaseException as failure:
        end = {"exit_code": Stopped.exit_code, "error": f"rank 0 was stopped ({type(failure).__name__})"}
        raise
    finally:
        is_over.set()
        thread.join()
        write(**end)


class Claims:
    """The claims of jobs, numbered; the newest one holds."""

    def __init__(self, folder: Path, own: Claim) -> None:
        self._folder = folder
        self._own = own
        self.newest = Note(self._path(max(self._numbers())))

    def look(self) -> None:
        path = self._path(max(self._numbers()))
        if path == self.newest.path:
            self.newest.look()
        else:
            self.newest = Note(path)

    def is_free(self, heartbeat_s: float) -> bool:
        """Whether nobody has claimed the work, its owner has failed, or seems to be dead."""
        claim = self.newest.claim
        if max(self._numbers()) == 0 or (claim and (claim.exit_code is not None or is_gone(claim.place))):
            return True
        return self.newest.unchanged_s > heartbeat_s * _DEAD_FOR_OWNERS

    @contextmanager
    def taken(self, every_s: float) -> Iterator[bool]:
        """Whether the next claim is now ours; while it is, it changes. It goes when the work is done."""
        path = self._path(max(self._numbers()) + 1)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"{self._folder} cannot be made: {error.strerror}") from None
        file = PublishedFile(path)
        file.write(self._own.written())
        file.sync()
        if not file.publish_first():
            yield False
            return
        with _beating(path, self._own, every_s):
            yield True
        with contextlib.suppress(OSError):
            for number in self._numbers():
                self._path(number).unlink(missing_ok=True)
            self._folder.rmdir()  # which does nothing to a folder that holds something

    def _numbers(self) -> list[int]:
        """Of all claims, from a 0 on that none has."""
        return [0, *(int(name[:-5]) for name in names_in(self._folder) if re.fullmatch(r"\d+\.json", name))]

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:05d}.json"


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
    check_names_are_utf8(str(folder), str(Path(input_dir).absolute()), model_id)
    who = find_process_rank(rank, world_size)
    launch = " ".join(f"{name}={os.environ[name]}" for name in _LAUNCH if os.environ.get(name))
    own = Claim(launch=launch, place=place_of(os.getpid()))
    notes = folder.with_name(f".{folder.name}.preparing")
    asked = json.dumps([own.launch, os.fspath(input_dir), model_id, options], sort_keys=True, default=str)
    verdict = notes / f"{hashlib.sha256(asked.encode()).hexdigest()[:16]}{_VERDICT}"
    wait = _Wait(folder, heartbeat_s, limit_s, who.rank)
    given = {
        "input_dir": Path(input_dir).absolute(), "output_dir": folder, "model_id": model_id, **options
    }  # fmt: skip

    def check() -> None:
        """Raises Refused where the data set was planned with other options or from other inputs."""
        # Shard 0 is done already, so it compares and ends.
        _run("shard", "--shard_id=0", "--check_inputs", *_flags(given, but=_FOR_PLAN))

    def prepare() -> None:
        if size_of_file(folder / PLAN_NAME) is None:
            _run("plan", *_flags(given))
        else:
            check()
        _run("run", str(folder), *_flags({"num_proc": num_proc}))
        _run("verify", str(folder))

    if who.rank == 0:
        with contextlib.ExitStack() as held:
            if who.world_size > 1:
                _remove_verdicts(notes, verdict)
                held.enter_context(_beating(verdict, own, heartbeat_s / _BEATS_PER_HEARTBEAT))
            wait.prepare_or_check(Claims(notes, own), prepare, check)
    elif not wait.has_verdict(Note(verdict), own.launch):
        check()
    return os.fspath(output_dir)


def _remove_verdicts(notes: Path, own: Path) -> None:
    """Remove what earlier starts said. A verdict of another name stays for a day: nobody knows when the last
    of its ranks has read it."""
    with contextlib.suppress(OSError):
        notes.mkdir(parents=True, exist_ok=True)
        for path in notes.glob(f"*{_VERDICT}"):
            if path == own or time.time() - path.stat().st_mtime > _KEPT_S:
                path.unlink(missing_ok=True)


class _Wait:
    """What a rank does that must not prepare, or not yet."""

    def __init__(self, folder: Path, heartbeat_s: float, limit_s: float, rank: int) -> None:
        self._folder = folder
        self._heartbeat_s = heartbeat_s
        self._limit_s = limit_s
        self._rank = rank
        self._began = time.monotonic()
        self._said: float | None = None

    def has_verdict(self, verdict: Note, launch: str) -> bool:
        """Whether rank 0 of this launch says that the data set is as asked for; raise what it failed with.

        False where the data set is verified and rank 0 cannot say so: this rank must compare by itself.
        """
        while (is_as_asked := self._verdict(verdict, launch)) is None:
            self._pause(
                f"waiting for rank 0 to prepare {self._folder}, or to compare it with what is asked for"
            )
            verdict.look()
        return is_as_asked

    def _verdict(self, verdict: Note, launch: str) -> bool | None:
        claim, is_verified = verdict.claim, self._is_verified()
        if claim is None:
            if time.monotonic() - self._began > _BEGIN_S:
                raise ReadWriteError(
                    f"{self._folder} is not prepared, and rank 0 has not begun to for {_BEGIN_S:.0f} s; "
                    "every rank must call ensure_prepared, see the log of rank 0"
                )
            parent = verdict.path.parent
            can_be_told = os.access(parent if parent.exists() else parent.parent, os.W_OK | os.X_OK)
            return False if is_verified and not can_be_told else None
        # One that was there at first may be of an earlier start: without a launcher, or with its writer gone.
        is_ours = verdict.is_changed or (launch != "" and not is_gone(claim.place))
        is_over = verdict.unchanged_s > self._heartbeat_s * _DEAD_FOR_WAITERS
        if claim.exit_code and (is_ours or is_over):
            _raise(claim.exit_code, f"rank 0 could not prepare {self._folder}: {claim.error}")
        if claim.exit_code is None and is_over and not is_verified:
            raise ReadWriteError(
                f"the process that prepared {self._folder} gave no sign for {verdict.unchanged_s:.0f} s, so "
                "it died; what it finished is kept: start the job again to go on"
            )
        if claim.exit_code == 0 and is_ours:
            return True
        return False if is_verified and (is_over or claim.exit_code == 0) else None

    def prepare_or_check(
        self, claims: Claims, prepare: Callable[[], None], check: Callable[[], None]
    ) -> None:
        """Prepare while the claim is ours; only compare where the data set is verified already."""
        while not self._is_verified():
            claims.look()
            if claims.is_free(self._heartbeat_s):
                with claims.taken(self._heartbeat_s / _BEATS_PER_HEARTBEAT) as is_taken:
                    if is_taken:
                        prepare()
                        return
            self._pause(f"{self._folder} is being prepared by another job: waiting for it")
        check()

    def _is_verified(self) -> bool:
        return size_of_file(self._folder / INDEX_NAME) is not None

    def _pause(self, line: str) -> None:
        """Sleep before another look; say why when the waiting begins, and once a minute."""
        now = time.monotonic()
        if now - self._began > self._limit_s:
            raise ReadWriteError(
                f"{self._folder} is not prepared after {self._limit_s:g} s (limit_s); see the log of rank 0"
            )
        if self._said is None or now - self._said >= _SAY_EVERY_S:
            by_now = "" if self._said is None else f", for {now - self._began:.0f} s by now"
            say(f"rank {self._rank}: {line}{by_now}")
            self._said = now
        time.sleep(min(1.0, self._heartbeat_s / 10))


def _flags(given: Mapping[str, Any], but: Container[str] = ()) -> list[str]:
    return [
        f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"
        for name, value in given.items()
        if value is not None and name not in but
    ]


# Ours come before a preprocess.py in the current folder. The process dies with the one that started it.
_CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from shardprep.signals import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
    "from shardprep.__main__ import main; sys.exit(main())"
)


_ERROR_LINE = re.compile(r"(?:shardprep \w+: )?error: (.+)")  # argparse puts the command before it


def _run(*words: str) -> None:
    """Run one command; its lines go to this process's standard error. Raises the error that it ended with."""
    command = [sys.executable, "-c", _CODE, str(HOME), str(os.getpid()), *words]
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
