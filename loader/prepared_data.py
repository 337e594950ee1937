"""``ensure_prepared``: a training job that makes its own data set first, once, on one of its processes.

Rank 0 plans, makes the shards and verifies them, in processes of its own; the other ranks wait. They need
nothing but the file system: no process group, no port, no clock that agrees with another node's.

Whoever prepares holds a claim, a small file beside the data set's folder, and rewrites it four times per
``heartbeat_s``: see preparing_claims.py. A claim that stays the same for too long is dead. index.json, which
``verify`` writes last, ends the preparing. Rank 0 then compares the data set with what was asked for, and the
other ranks of its launch wait for its verdict, a file beside the claims.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from loader.preparing_claims import Claims, Verdict, WatchedClaim, is_gone, launch_of
from loader.process_rank import find_process_rank
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
from shardprep.format.names import INDEX_NAME, PLAN_NAME
from shardprep.regular_files import size_of_file

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
    claims = Claims(folder.with_name(f".{folder.name}.preparing"), launch_of(os.environ))
    commands = _Commands(folder, Path(input_dir).absolute(), model_id, num_proc, options)
    wait = _Wait(claims, heartbeat_s, limit_s, who.rank)
    verdict = claims.verdict(os.fspath(input_dir), model_id, options)
    if who.rank != 0:
        wait.for_verdict(folder, verdict, commands)
        return os.fspath(output_dir)
    with verdict.told() if who.world_size > 1 else contextlib.nullcontext():
        if _is_verified(folder):
            commands.check()
            return os.fspath(output_dir)
        with wait.for_own_claim(folder) as owned:
            if owned:
                commands.prepare()
            else:
                commands.check()
    return os.fspath(output_dir)


def _is_verified(folder: Path) -> bool:
    return size_of_file(folder / INDEX_NAME) is not None


class _Wait:
    """What a rank does that must not prepare, or not yet."""

    def __init__(self, claims: Claims, heartbeat_s: float, limit_s: float, rank: int) -> None:
        self._claims = claims
        self._heartbeat_s = heartbeat_s
        self._limit_s = limit_s
        self._rank = rank
        self._began = time.monotonic()
        self._said: float | None = None

    def for_verdict(self, folder: Path, verdict: Verdict, commands: _Commands) -> None:
        """Return when rank 0 says that the data set is as asked for; raise what it failed with.

        Where it cannot say so, this rank compares by itself, once the data set is verified.
        """
        watched = WatchedClaim(self._claims)
        while True:
            found, is_verified = verdict.read(), _is_verified(folder)
            if is_verified and (verdict.is_doubtful or not verdict.can_be_told):
                commands.check()
                return
            if found is not None and not verdict.is_doubtful:
                if found.exit_code:
                    _raise(found.exit_code, f"rank 0 could not prepare {folder}: {found.error}")
                return
            self._say(f"waiting for rank 0 to prepare {folder}, or to compare it with what is asked for")
            self._check_limit(folder)
            watched.look()
            if watched.claim is None or watched.is_of_the_past:
                self._check_begun(folder, watched)
            elif watched.claim.exit_code is not None:
                if watched.is_of_this_launch or self._is_over(watched):
                    message = f"rank 0 could not prepare {folder}: {watched.claim.error}"
                    _raise(watched.claim.exit_code, message)
            elif self._is_over(watched) and not _is_verified(folder):
                raise ReadWriteError(
                    f"the process that prepared {folder} gave no sign for {watched.unchanged_s:.0f} s, so it "
                    "died; what it finished is kept: start the job again to go on"
                )
            self._sleep()

    def _check_begun(self, folder: Path, watched: WatchedClaim) -> None:
        if not watched.is_changed and time.monotonic() - self._began > _BEGIN_S:
            raise ReadWriteError(
                f"{folder} is not prepared, and rank 0 has not begun to for {_BEGIN_S:.0f} s; every rank "
                "must call ensure_prepared, see the log of rank 0"
            )

    @contextmanager
    def for_own_claim(self, folder: Path) -> Iterator[bool]:
        """True while the claim is ours; False where another job has made the data set meanwhile."""
        watched = WatchedClaim(self._claims)
        while not _is_verified(folder):
            self._check_limit(folder)
            watched.look()
            if self._is_free(watched):
                if self._claims.take(watched.number + 1):
                    with self._beating(watched.number + 1):
                        yield True
                    self._claims.remove()
                    return
            else:
                self._say(f"{folder} is being prepared by another job: waiting for it")
            self._sleep()
        yield False

    def _is_free(self, watched: WatchedClaim) -> bool:
        claim = watched.claim
        if claim is None or claim.exit_code is not None or is_gone(claim.place):
            return claim is not None or watched.number == 0 or watched.unchanged_s > self._heartbeat_s
        return watched.unchanged_s > self._heartbeat_s * _DEAD_FOR_OWNERS

    def _is_over(self, watched: WatchedClaim) -> bool:
        return watched.unchanged_s > self._heartbeat_s * _DEAD_FOR_WAITERS

    def _check_limit(self, folder: Path) -> None:
        if time.monotonic() - self._began > self._limit_s:
            raise ReadWriteError(
                f"{folder} is not prepared after {self._limit_s:g} s (limit_s); see the log of rank 0"
            )

    def _say(self, line: str) -> None:
        """Say it when the waiting begins, and once a minute."""
        now = time.monotonic()
        if self._said is None:
            say(f"rank {self._rank}: {line}")
        elif now - self._said >= _SAY_EVERY_S:
            say(f"rank {self._rank}: {line}, for {now - self._began:.0f} s by now")
        else:
            return
        self._said = now

    def _sleep(self) -> None:
        time.sleep(min(1.0, self._heartbeat_s / 10))

    @contextmanager
    def _beating(self, number: int) -> Iterator[None]:
        """Within, the claim changes; it holds the error of what fails within."""
        is_over = threading.Event()
        claim = self._claims.claim()

        def beat() -> None:
            num_beats = 0
            while not is_over.wait(self._heartbeat_s / _BEATS_PER_HEARTBEAT):
                num_beats += 1
                with contextlib.suppress(ShardprepError):  # one beat that fails is no reason to stop
                    self._claims.write(number, dataclasses.replace(claim, num_beats=num_beats))

        thread = threading.Thread(target=beat, name="ensure_prepared heartbeat", daemon=True)
        thread.start()
        failure: tuple[int, str] | None = None
        try:
            yield
        except ShardprepError as error:
            failure = error.exit_code, str(error)
            raise
        except BaseException as error:
            failure = Stopped.exit_code, f"rank 0 was stopped ({type(error).__name__})"
            raise
        finally:
            is_over.set()
            thread.join()
            if failure:
                with contextlib.suppress(ShardprepError):
                    self._claims.write(
                        number, dataclasses.replace(claim, exit_code=failure[0], error=failure[1])
                    )


class _Commands:
    """The commands that prepare a data set, each in a process of its own that dies with this one."""

    def __init__(
        self, folder: Path, input_dir: Path, model_id: str, num_proc: int | None, options: Mapping[str, Any]
    ) -> None:
        self._folder = folder
        self._num_proc = num_proc
        given = {"input_dir": input_dir, "output_dir": folder, "model_id": model_id, **options}
        self._of_plan = _flags(given)
        self._of_documents = _flags({name: value for name, value in given.items() if name not in _FOR_PLAN})

    def check(self) -> None:
        """Raises Refused where the data set was planned with other options or from other inputs."""
        # Shard 0 is done already, so it compares and ends.
        _run("shard", "--shard_id=0", "--check_inputs", *self._of_documents)

    def prepare(self) -> None:
        """Plan, run and verify; raises the error of the one that fails."""
        if size_of_file(self._folder / PLAN_NAME) is None:
            _run("plan", *self._of_plan)
        else:
            self.check()
        _run("run", str(self._folder), *_flags({"num_proc": self._num_proc}))
        _run("verify", str(self._folder))


def _flags(given: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in given.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags


# Ours come before a preprocess.py in the current folder. The process dies with the one that started it.
_CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from shardprep.console import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
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
