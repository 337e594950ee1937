"""What is checked before anything is sent: the folder and the queue."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from shardprep.console import quoted, say, shards_text
from shardprep.errors import CannotWrite, UsageError
from shardprep.files import is_link
from shardprep.format import commands
from shardprep.format.data_folder import JOBS_FOLDER, LOGS_FOLDER, DataFolder
from shardprep.format.names import id_ranges
from shardprep.format.plan import Plan, need_plan
from shardprep.format.planned_tokenizer import check_tokenizer_files
from slurm.commands import SlurmRefused
from slurm.own import own_records
from slurm.request import JobRequest
from slurm.state import DatasetState

_LOG = re.compile(r"(?:verify-|control-)?([0-9]+)(?:_[0-9]+)?\.log")


def check_queue(state: DatasetState, wanted: set[int] | None) -> None:
    """Report which of the wanted shards (None: all) are not sent because they are queued already.

    Raises SlurmRefused if jobs without a record are queued: their shards would be made twice.
    """
    unrecorded = own_records(state).unrecorded
    if unrecorded:
        jobs = ", ".join(unrecorded)
        found = f"jobs {jobs} wait or run, but no record in {JOBS_FOLDER}/ names their shards"
        expected = "no such jobs; another command may be sending them now: wait, or end them"
        remedy = commands.on("cancel", state.folder)
        raise SlurmRefused(path=state.folder, found=found, expected=expected, remedy=remedy)
    queued = [each for each in state.ids("running", "pending") if wanted is None or each in wanted]
    if queued:
        named = shards_text(id_ranges(queued))
        say(f"left out, because they wait or run (or are just being cancelled): {named}")


def check_logs(folder: DataFolder, job_ids: Sequence[str]) -> None:
    """Raise CannotWrite if the log of one of these jobs, which have not begun, is there and not ours alone.

    Slurm opens logs as this user, and through links.
    """
    for name in folder.names(LOGS_FOLDER):
        match = _LOG.fullmatch(name)
        if match is None or match[1] not in job_ids:
            continue
        log = f"{LOGS_FOLDER}/{name}"
        status = folder.status_of(log)
        if status is None:
            continue
        # Where job ids began anew, this user's own log of an older job is appended to.
        is_ours = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()
        if not is_ours:
            found = "something that Slurm's log would be written to, before the job began"
            expected = "nothing; remove it, and find out who put it there"
            raise CannotWrite(path=folder.path_of(log), found=found, expected=expected)


def _check_not_for_everybody(place: Path, *, is_for_logs: bool) -> None:
    """Raise CannotWrite if everybody can replace a folder, or put links into that of logs."""
    try:
        mode = os.stat(place).st_mode  # noqa: PTH116 - as the caller's
    except OSError:
        return
    if mode & stat.S_IWOTH and (is_for_logs or not mode & stat.S_ISVTX):
        found = "a folder where everybody may write: Slurm would follow any link there as you"
        raise CannotWrite(path=place, found=found, remedy=f"chmod o-w {quoted(place)}")


def check_folder(folder: Path, request: JobRequest) -> Plan:
    """Check folder, tokenizer, set-up file and input as tasks need them, and return the plan."""
    plan = need_plan(DataFolder(folder))
    check_tokenizer_files(DataFolder(folder), plan.tokenizer_files)
    for place in (folder, folder / JOBS_FOLDER, folder / LOGS_FOLDER):
        if place != folder and is_link(place):  # records and Slurm's logs would go to its target
            raise CannotWrite(path=place, found="a link", expected="a folder in its place")
        if os.path.lexists(place) and not (os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)):  # noqa: PTH112 - Path's may raise
            todo = f"to share it with your group, its owner can type: chmod -R g+rwX {quoted(folder)}"
            raise CannotWrite(path=place, found="not a folder that you can write to", expected=f"one; {todo}")
        _check_not_for_everybody(place, is_for_logs=place == folder / LOGS_FOLDER)
    if request.setup and not (os.path.isabs(request.setup) and os.path.isfile(request.setup)):  # noqa: PTH113, PTH117 - Path's may raise OSError
        expected = "the path of a file for tasks to source"
        raise UsageError(path=request.setup, found=f"--setup {request.setup}", expected=expected)
    if plan.options.transform_sha256 and "--transform" not in request.worker_args:
        found = "a plan with a function for documents, and no file with it for the tasks"
        expected = "--worker_args with --transform"
        raise UsageError(path=folder, found=found, expected=expected, remedy=commands.submit(folder))
    if not os.path.isdir(plan.input_dir) and "--input_dir" not in request.worker_args:  # noqa: PTH112 - as above
        todo = "Has the input moved? --worker_args '--input_dir NEW'"
        say(f"warning: no {plan.input_dir} on this host; tasks on nodes without it exit with 66. {todo}")
    return plan
