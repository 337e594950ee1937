"""``ensure_prepared``, with which a training job makes its data set first.

Rank 0 plans the shards in a child process. Then the first rank of each node makes a share of them, as
``run --part`` does, and rank 0 verifies them. The other ranks wait for index.json, and compare the plan and
the inputs with their own arguments. Ranks coordinate through the file system only: if rank 0 fails, it writes
``.NAME.failed.json`` next to the data set's folder. Two jobs at once only waste time, since they write equal
bytes and skip shards that are done.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loader.ranks import ProcessRank, find_process_rank
from shardprep.command_line import check_names_are_utf8
from shardprep.console import say
from shardprep.errors import NotFound, ReadWriteError, Refused, ShardprepError, UsageError
from shardprep.files import read_regular, size_of_file
from shardprep.format.names import INDEX_NAME, PLAN_NAME
from shardprep.launch import NodePlace, find_node_place
from shardprep.local_paths import check_local_path
from shardprep.processes import start_python
from shardprep.publishing import publish_bytes

_SAY_EVERY_S = 60.0
_LOOK_EVERY_S = 0.5
_ENDS_WITHIN_S = 10.0  # a process that helped, when all is made
_LAUNCH = (  # together they identify one start of a job: equal in all its processes
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
_ERROR_LINE = re.compile(r"(?:shardprep \w+: )?error: (.+)")  # argparse puts the command first


def ensure_prepared(
    output_dir: str | os.PathLike[str],
    *,
    input_dir: str | os.PathLike[str],
    model_id: str,
    num_proc: int | None = None,
    limit_s: float = 24 * 3600.0,
    rank: int | None = None,
    world_size: int | None = None,
    **options: Any,
) -> str:
    """Make and verify a data set in ``output_dir`` unless it exists, and return that folder.

    All ranks must call it, before or after the process group is created (whose timeout is short). Rank 0 runs
    ``shardprep plan``, ``run`` and ``verify``, which continue an earlier attempt. The first rank of each
    other node runs ``shardprep run``, too, on that node's share of the shards; all others wait. The launcher
    must end the other ranks if rank 0 is killed, as srun and torchrun do.

        data = ensure_prepared("DATA", input_dir="RAW", model_id="MODEL", num_shards=64)
        loader = get_llama3_dataloader(data, batch_size=8)

    Args:
        num_proc: processes of each node that make shards. Default: one per CPU that its first rank may use.
        limit_s: seconds that a rank waits at most. Default: 24 hours.
        options: more flags of ``shardprep plan`` by name, such as ``num_shards=64, record="packed"``.

    Raises:
        Refused: ``output_dir`` was planned with other options (also if they are left out now), or
            ``input_dir`` has changed since: names, sizes, or a sample of each file.
        ShardprepError: rank 0 failed, and all ranks raise its error; or ``limit_s`` is over (ReadWriteError).
    """
    if not limit_s > 0:
        raise UsageError.of_value("limit_s", limit_s, "more than 0")
    check_local_path(os.fspath(output_dir), "output_dir")
    check_local_path(os.fspath(input_dir), "input_dir")
    folder, raw = Path(output_dir).absolute(), Path(input_dir).absolute()
    check_names_are_utf8(str(folder), str(raw), model_id)
    job = _Preparation(
        folder=folder,
        options={"input_dir": raw, "output_dir": folder, "model_id": model_id, **options},
        num_proc=num_proc,
        limit_s=limit_s,
        who=find_process_rank(rank, world_size),
        place=find_node_place(os.environ),
    )
    if job.who.rank == 0:
        job.lead()
    else:
        job.follow()
    return os.fspath(output_dir)


@dataclass(frozen=True, kw_only=True)
class _Preparation:
    """One rank's part in making a data set."""

    folder: Path
    options: dict[str, Any]  # of ``plan``
    num_proc: int | None
    limit_s: float
    who: ProcessRank
    place: NodePlace
    began: float = field(default_factory=time.monotonic)
    launch: str = field(default_factory=lambda: _launch_of(os.environ))

    @property
    def note(self) -> Path:
        """Return the file in which rank 0 says why it failed."""
        return self.folder.with_name(f".{self.folder.name}.failed.json")

    def lead(self) -> None:
        """Plan, make this node's share and what the other nodes leave, and verify. For rank 0."""
        with contextlib.suppress(OSError):
            self.note.unlink(missing_ok=True)
        try:
            if self._has(PLAN_NAME):
                _compare(self.options)
            else:
                _run("plan", self.options)
            if not self._has(INDEX_NAME):
                _run("run", self._making(), str(self.folder))
                _run("verify", {}, str(self.folder))
        except BaseException as error:
            if self.who.world_size > 1:
                self._write_note(error)
            raise

    def follow(self) -> None:
        """Wait until rank 0 has verified the data set. The first rank of a node makes shards until then."""
        if self.place.rank or self.place.num_nodes == 1:
            self._wait_for(INDEX_NAME)
            _compare(self.options)
            return
        self._wait_for(PLAN_NAME)
        _compare(self.options)
        if self._has(INDEX_NAME):
            return
        # An error of this process only means less help: rank 0 makes what is left, or says why it cannot.
        with _start("run", self._making(), str(self.folder), stdout=subprocess.DEVNULL) as process:
            try:
                self._wait_for(INDEX_NAME)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDS_WITHIN_S)  # it looks every few seconds whether all shards are made
            finally:
                process.terminate()

    def _has(self, name: str) -> bool:
        return size_of_file(self.folder / name) is not None

    def _making(self) -> dict[str, Any]:
        """Return the options of ``run`` on this node."""
        part = "0/1"
        if self.place.rank == 0:
            part = f"{self.place.node}/{self.place.num_nodes}"
        # The plan keeps the function's hash alone.
        return {"num_proc": self.num_proc, "part": part, "transform": self.options.get("transform")}

    def _write_note(self, error: BaseException) -> None:
        code = getattr(error, "exit_code", ReadWriteError.exit_code)
        failure = {"launch": self.launch, "exit_code": code, "error": str(error) or type(error).__name__}
        with contextlib.suppress(ShardprepError, OSError):  # must not hide the error itself
            publish_bytes(self.note, json.dumps(failure).encode())

    def _wait_for(self, name: str) -> None:
        """Wait until rank 0 has written a file. Raises its error if it fails in this start of the job."""
        next_line_s = 0.0
        while not self._has(name):
            failure = self._failure_of_rank_0()
            if failure is not None:
                raise failure
            waited_s = time.monotonic() - self.began
            if waited_s > self.limit_s:
                found = f"not prepared after {self.limit_s:g} s (limit_s)"
                expected = "ensure_prepared in every rank; see the log of rank 0"
                raise ReadWriteError(path=self.folder, found=found, expected=expected)
            if waited_s >= next_line_s:
                waiting = f"waiting for rank 0 to prepare {self.folder}, {waited_s:.0f} s so far"
                say(f"rank {self.who.rank}: {waiting}")
                next_line_s = waited_s + _SAY_EVERY_S
            time.sleep(min(_LOOK_EVERY_S, self.limit_s / 4))

    def _failure_of_rank_0(self) -> ShardprepError | None:
        # A missing or damaged note is ignored.
        with contextlib.suppress(ShardprepError, OSError, ValueError, LookupError, TypeError, RecursionError):
            content = json.loads(read_regular(self.note, max_bytes=1 << 20))
            if content["launch"] == self.launch:  # else another start of the job wrote it
                message = f"rank 0 could not prepare {self.folder}: {content['error']}"
                return _error_of(int(content["exit_code"]), message)
        return None


def _launch_of(environ: Mapping[str, str]) -> str:
    """Return what identifies this start of the job."""
    return " ".join(f"{name}={environ[name]}" for name in _LAUNCH if environ.get(name))


def _compare(given: Mapping[str, Any]) -> None:
    """Raise Refused if the data set was planned with other options or from other inputs.

    ``plan`` compares all of them, those that are left out, too. It writes nothing with --dry_run.
    """
    try:
        _run("plan", {**given, "dry_run": True})
    except NotFound as error:  # the inputs are gone, so these are not the ones that were planned
        raise Refused(str(error)) from error


def _error_of(exit_code: int, message: str) -> ShardprepError:
    """Return an error of the class that has this exit code: the first one, which is the most general."""
    kinds = {kind.exit_code: kind for kind in reversed(ShardprepError.__subclasses__())}
    return kinds.get(exit_code, ReadWriteError)(message)


def _run(name: str, given: Mapping[str, Any], *words: str) -> None:
    """Run one command, and pass its lines on to standard error. Raises the error that it ended with."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    last_error = ""
    with _start(name, given, *words, text=True, errors="replace", **pipes) as process:
        try:
            for line in process.stdout or ():
                say(line.rstrip("\n"))
                if found := _ERROR_LINE.match(line):
                    last_error = f": {found[1]}"
        except BaseException:
            process.terminate()
            raise
    if code := process.returncode:
        shown = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise _error_of(code, f"shardprep {name} ended with {shown}{last_error}")


def _start(name: str, given: Mapping[str, Any], *words: str, **settings: Any) -> subprocess.Popen[Any]:
    """Start one command, which ends with this process. ``settings``: of Popen."""
    flags = []
    for option, value in given.items():
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{option}")
        elif value is not None:
            flags.append(f"--{option}={value}")
    call = ["shardprep.__main__:run_for_parent", str(os.getpid()), name, *words, *flags]
    return start_python(*call, stdin=subprocess.DEVNULL, **settings)
