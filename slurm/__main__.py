"""``python -m slurm``: submit, status, retry, report, cancel, logs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardprep.command_line import Command, Program, add_flags_of, given_of
from shardprep.console import Progress, counted, draw, output_is_read, print_lines, quoted, say
from shardprep.errors import NotFound, ReadWriteError, ShardprepError, UsageError
from shardprep.files import publish_bytes
from shardprep.format.names import id_ranges, ids_of_ranges
from slurm.commands import REQUEST_VARIABLES, Patience
from slurm.request import WHOLE_NODE, JobRequest, with_changes, with_variables
from slurm.submissions import Submission, SubmittedMeanwhile, append_event

if TYPE_CHECKING:
    from slurm.send import Sending
    from slurm.state import DatasetState

_POLL_S = 5.0
_MOST_SUBMITTERS = 5  # of one data set at the same time, before this one gives up


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors are a line on standard error, never a traceback."""
    return PROGRAM.run(sys.argv[1:] if argv is None else argv)


def given_request(args: argparse.Namespace) -> dict[str, Any]:
    """The request's fields that the user gave, by flag, or by sbatch's own variables (SBATCH_PARTITION)."""
    return with_variables(given_of(args, JobRequest), os.environ)


def chosen_request(args: argparse.Namespace) -> tuple[JobRequest, dict[str, str]]:
    """The whole request of a submit, and where each value came from that is no default."""
    from slurm.request import find_defaults
    from slurm.send import advised, most_cpus

    given, flags = given_request(args), given_of(args, JobRequest)
    defaults = find_defaults(args.output_dir, args.profile, os.environ)
    values, sources = with_changes(defaults.values, given), dict(defaults.sources)
    sources |= {name: "flag" if name in flags else REQUEST_VARIABLES[name] for name in given}
    if args.auto:
        advice, source = advised(
            args.output_dir,
            JobRequest(**values),
            args.shards_per_task,
            say,
            has_cpus="cpus_per_task" in given,
        )
        has_mem = "mem_per_cpu_gb" in values or given.get("cpus_per_task") == WHOLE_NODE
        is_given = {"mem_gb"} if has_mem else set[str]()
        advice = {name: value for name, value in advice.items() if name not in given.keys() | is_given}
        values, sources = {**values, **advice}, {**sources, **dict.fromkeys(advice, source)}
    if "cpus_per_task" not in values and (found := most_cpus(JobRequest(**values))):
        values["cpus_per_task"], sources["cpus_per_task"] = found
    sources = {name: source for name, source in sources.items() if name in values}
    return JobRequest(**values), sources


def submit(args: argparse.Namespace) -> int:
    """``submit O``: the missing shards as a job array, and a verify job after it."""
    from slurm.request import save_profile
    from slurm.send import prepare_submit

    request, sources = chosen_request(args)
    if args.dry_run:
        for name, source in sources.items():
            say(f"{name} is {getattr(request, name)!r} ({source})")

    def prepared() -> tuple[DatasetState, Sending | None]:
        return prepare_submit(
            args.output_dir,
            request,
            args.shards_per_task,
            say,
            shard_ids=_wanted(args),
            sources=sources,
            dry_run=args.dry_run,
        )

    state, sending = prepared()
    if args.save_profile:
        values = {name: getattr(request, name) for name in sources}
        path = save_profile(args.save_profile, values, os.environ, dry_run=args.dry_run)
        would = "not saved, as this is a dry run: it would be" if args.dry_run else "saved as"
        say(f"{would} profile {args.save_profile} in {path}")
    if sending is None:
        print_lines(f"nothing to submit: {_summary(state)}")
        if args.until_done and not args.dry_run:
            _control(args, state, state.next_number, request, state.jobs_to_wait_for())
        return _wait(args) if args.wait and not args.dry_run else 0
    return _send(args, sending, prepared)


def retry(args: argparse.Namespace) -> int:
    """``retry O``: what failed, each as its failure asks."""
    try:
        return _retry(args)
    except ShardprepError as error:
        if args.until_done and not args.dry_run:
            append_event(args.output_dir, "stopped", why=str(error))
        raise


def _retry(args: argparse.Namespace) -> int:
    from preprocess.plan.plan_file import need_plan
    from slurm.retry import base_request, finish, prepare_retry, stop_after
    from slurm.state import find_state, reason_to_leave, remedy_of

    changes = given_request(args)

    def prepared() -> tuple[DatasetState, Sending | None]:
        plan = need_plan(args.output_dir)

        def look() -> DatasetState:
            return find_state(args.output_dir, plan)

        state = Patience(say).ask(look) if args.until_done else look()  # nobody else would ask again
        left, sending = prepare_retry(
            state,
            changes,
            max_attempts=args.max_attempts,
            shards_per_task=args.shards_per_task,
            say=say,
            shard_ids=_wanted(args),
        )
        for shard in left:
            why = reason_to_leave(shard, args.max_attempts, changes)
            say(f"left: shard {shard.shard_id:05d}: {shard.cause}; {why}; {remedy_of(shard.cause or '')}")
        return state, sending

    state, sending = prepared()
    is_controlled = args.until_done and not args.dry_run
    if is_controlled and sending is None and not state.ids("running", "pending"):
        return finish(state, args.max_attempts)
    if is_controlled and args.round > args.max_rounds:
        return stop_after(state, args.max_rounds)
    if is_controlled and sending is None:
        waited = [each for each in state.jobs_to_wait_for() if each not in state.shown.controllers]
        _control(args, state, state.next_number, base_request(state), waited)
        return 0
    if sending is None:
        num_left = len(state.ids("failed"))
        left_words = f"{counted(num_left, 'shard')} left as {'it is' if num_left == 1 else 'they are'}, "
        print_lines(f"nothing to retry: {left_words if num_left else ''}{_summary(state)}")
        if args.wait and not args.dry_run:
            return _wait(args)
        return ReadWriteError.exit_code if num_left else 0
    return _send(args, sending, prepared)


def _wanted(args: argparse.Namespace) -> set[int] | None:
    """The shards of --shards; None for all."""
    from preprocess.plan.plan_file import need_plan

    if args.shards is None:
        return None
    num_shards = need_plan(args.output_dir).num_shards
    try:
        return set(ids_of_ranges(args.shards, end=num_shards))
    except ValueError:
        raise UsageError(
            f"--shards is {args.shards!r}, expected ids of 0 to {num_shards - 1}, such as 0-9,12"
        ) from None


def _send(
    args: argparse.Namespace,
    sending: Sending | None,
    prepared: Callable[[], tuple[DatasetState, Sending | None]],
) -> int:
    """Send it; where somebody else submitted meanwhile, look again what is left to send."""
    if args.dry_run:
        assert sending is not None
        print_lines(*"\n".join(sending.scripts).split("\n"))
        return 0
    for _ in range(_MOST_SUBMITTERS):
        if sending is None:
            print_lines("nothing more to submit")
            return _wait(args) if args.wait else 0
        try:
            submission = sending.send()
            append_event(
                args.output_dir,
                args.command,
                number=submission.number,
                jobs=[job.job_id for job in submission.jobs],
                causes=sending.state.causes_of(submission),
                **({"round": args.round} if args.until_done and args.command == "retry" else {}),
            )
            _print_sent(submission)
            if args.until_done:
                ids = [job.job_id for job in submission.jobs]
                request = submission.arrays[0].request
                _control(args, sending.state, submission.number, request, ids)
            break
        except SubmittedMeanwhile as error:
            say(f"note: {error}")
            last = error
            _, sending = prepared()
    else:
        raise last
    if args.wait:
        return _wait(args)
    print_lines(f"next: shardprep status {quoted(args.output_dir)} --watch")
    return 0


def _control(
    args: argparse.Namespace, state: DatasetState, number: int, request: JobRequest, job_ids: list[str]
) -> None:
    """``--until_done``: the job that looks at what became of these jobs, and goes on."""
    from slurm.retry import send_controller

    flags = ["--max_rounds", args.max_rounds, "--round", 1]
    if args.command == "retry":
        flags[-1:] = [args.round + 1, "--max_attempts", args.max_attempts]
    job_id = send_controller(state, number, request, job_ids, [str(each) for each in flags])
    print_lines(f"job {job_id}: sends again what fails, until all is verified (--until_done)")


def _print_sent(submission: Submission) -> None:
    for array in submission.arrays:
        mem = "no memory limit" if array.mem_mb is None else f"{array.mem_mb} MB"
        limit = "no time limit" if array.time_min is None else f"{array.time_min} min"
        shards = id_ranges(shard_id for ids in array.shards_of_tasks() for shard_id in ids)
        tasks = counted(len(array.tasks), "task")
        print_lines(f"job {array.job_id}: {tasks} of {mem}, {limit}, for shards {shards}")
    print_lines(f"job {submission.verify_job_id}: verify, when they have ended")


def _wait(args: argparse.Namespace) -> int:
    """One bar over the whole data set until no job of it is queued; 0 only where it is verified then."""
    from preprocess.plan.plan_file import need_plan
    from slurm.state import find_state

    plan = need_plan(args.output_dir)
    sizes, counted = plan.shard_bytes(), set[int]()
    patience = Patience(say)
    with Progress(f"{plan.num_shards} shards", sum(sizes)) as progress:
        while True:
            state = patience.ask(lambda: find_state(args.output_dir, plan))
            fresh = set(state.ids("done")) - counted
            counted |= fresh
            progress.add(sum(sizes[shard_id] for shard_id in fresh))
            if not state.jobs_to_wait_for():
                break
            time.sleep(_POLL_S)
    _print_report(_report(state))
    return 0 if state.is_verified else ReadWriteError.exit_code


def status(args: argparse.Namespace) -> int:
    """``status O``: where every shard is, and why what failed did."""
    from preprocess.plan.plan_file import need_plan
    from slurm.state import find_state
    from slurm.status import metrics_text

    plan = need_plan(args.output_dir)
    shown: list[str] = []
    while True:
        state = find_state(args.output_dir, plan, if_away=lambda _: None)
        data = _report(state)
        if args.metrics:
            publish_bytes(args.metrics, metrics_text(data).encode("utf-8"))
        if args.watch and not args.json and sys.stdout.isatty():
            shown = _redraw(data, shown)
        else:
            _print_report(data, as_json=args.json)
        goes_on = state.live_job_ids() or (state.shown.away and state.ids("not visible"))
        if not args.watch or not goes_on or not output_is_read():
            return 0
        time.sleep(_POLL_S)


def _redraw(data: dict[str, Any], shown: list[str]) -> list[str]:
    """Show the screen; returns its lines. A window of another size is drawn anew."""
    from slurm.status import changes, screen_lines

    width, height = shutil.get_terminal_size()
    can_draw = "utf" in (sys.stdout.encoding or "").lower()
    lines = screen_lines(data, width=max(width, 20), ascii_only=not can_draw)[: max(height - 1, 1)]
    same_size = shown and len(shown[1]) == len(lines[1])
    draw(changes(shown if same_size else [], lines))
    return lines


def _report(state: DatasetState) -> dict[str, Any]:
    from slurm.status import report

    return report(state)


def _print_report(data: dict[str, Any], *, as_json: bool = False) -> None:
    from slurm.status import report_lines

    print_lines(*([json.dumps(data)] if as_json else report_lines(data)))


def cancel(args: argparse.Namespace) -> int:
    """``cancel O``: every job of this data set that waits or runs. Shards that are done stay done."""
    from preprocess.plan.plan_file import need_plan
    from slurm.commands import slurm_output
    from slurm.state import find_state

    state = find_state(args.output_dir, need_plan(args.output_dir))
    if args.shards is not None:
        return _cancel_shards(args, state)
    live = state.live_jobs()
    unrecorded = [*state.shown.controllers, *state.shown.strays, *state.shown.unrecorded]
    if unrecorded:  # first, as a controller would send again what is cancelled
        live[state.shown.cluster] = [*unrecorded, *live.get(state.shown.cluster, [])]
    failed: list[ShardprepError] = []
    for cluster, job_ids in live.items():
        try:
            slurm_output("scancel", *job_ids, cluster=None if cluster == state.shown.cluster else cluster)
        except ShardprepError as error:  # the other cluster's end all the same
            failed.append(error)
    if failed:
        raise failed[0]
    cancelled = [*state.live_job_ids(), *unrecorded]
    if cancelled:
        append_event(args.output_dir, "cancel", jobs=cancelled)
    if state.foreign:
        ids = " ".join(job.job_id for each in state.foreign for job in each.jobs)
        say(f"left alone: jobs of the folder that this one was copied from; to end them: scancel {ids}")
    print_lines(
        f"cancelled: {', '.join(cancelled)}" if cancelled else f"nothing is queued; {_summary(state)}"
    )
    if unseen := state.ids("not visible"):
        say(f"warning: {state.why_not_visible()}; shards {id_ranges(unseen)} may wait or run all the same")
    return 0


def _cancel_shards(args: argparse.Namespace, state: DatasetState) -> int:
    """``--shards``: the tasks that make these shards, and no others in them."""
    from slurm.commands import slurm_output

    wanted = _wanted(args) or set()
    tasks: dict[str, set[int]] = {}
    for shard in state.shards:
        for each in shard.attempts:
            if each.state in ("running", "pending") and "_" in each.task:
                tasks.setdefault(each.task, set()).add(shard.shard_id)
    chosen = {task: ids for task, ids in tasks.items() if ids & wanted}
    if more := {task: ids for task, ids in chosen.items() if not ids <= wanted}:
        words = "; ".join(f"task {task} makes {id_ranges(ids)}" for task, ids in more.items())
        raise UsageError(f"--shards {args.shards} names a part of a task: {words}; name all of its shards")
    if chosen:
        slurm_output("scancel", *chosen)
        append_event(args.output_dir, "cancel", jobs=sorted(chosen), shards=args.shards)
    print_lines(f"cancelled: {', '.join(chosen)}" if chosen else f"none of them is queued; {_summary(state)}")
    return 0


def logs(args: argparse.Namespace) -> int:
    """``logs O N``: the attempts at one shard, newest last, with the ends of their logs."""
    from preprocess.plan.plan_file import need_plan
    from slurm.state import find_state, last_lines, log_tail, remedy_of

    plan = need_plan(args.output_dir)
    if not 0 <= args.shard_id < plan.num_shards:
        raise NotFound(f"there is no shard {args.shard_id}: the plan has {plan.num_shards}, from 0")
    shard = find_state(args.output_dir, plan, if_away=lambda _: None).shards[args.shard_id]
    lines = [f"shard {shard.shard_id:05d} is {shard.state}, {counted(len(shard.attempts), 'attempt')}"]
    for each in shard.attempts:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.record.began)) if each.record else ""
        where = f" on {each.node}" if each.node else ""
        lines.append(f"{when or 'task'} {each.task}{where}: {each.cause or each.state}".strip())
        lines += [f"  {each.message}"] if each.message else []
        if each.log:
            lines += [f"  | {line[:300]}" for line in last_lines(log_tail(Path(each.log)), args.lines)]
            lines.append(f"  {each.log}")
        lines += [f"  {remedy_of(each.cause)}"] if each.cause and each is shard.attempts[-1] else []
    print_lines(*lines)
    return 0


def _summary(state: DatasetState) -> str:
    return f"{len(state.ids('done'))} of {state.plan.num_shards} shards are done"


def _folder_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output_dir", type=_real_path, help="folder of the data set")


def _real_path(text: str) -> Path:
    return Path(os.path.realpath(text))  # Path.resolve raises where links go round


def _cancel_flags(parser: argparse.ArgumentParser) -> None:
    _folder_flag(parser)
    parser.add_argument("--shards", help="only the tasks of these, such as 0-9,12 (default: all)")


def _logs_flags(parser: argparse.ArgumentParser) -> None:
    _folder_flag(parser)
    parser.add_argument("shard_id", type=int, help="which shard, from 0")
    parser.add_argument("--lines", type=int, default=20, help="of each log, from its end (default 20)")


def _submit_flags(parser: argparse.ArgumentParser) -> None:
    _sending_flags(parser)
    parser.add_argument(
        "--profile", help="a profile of shardprep.toml: in O, in ~/.config, or in /etc (default: none)"
    )
    parser.add_argument(
        "--save_profile",
        help="keep what is asked for in ~/.config/shardprep.toml, by this name (default: no)",
    )
    parser.add_argument(
        "--auto",
        action="store_true",
        help="choose CPUs, memory and time: by the shards that are made, or a sample of the input",
    )


def _sending_flags(parser: argparse.ArgumentParser) -> None:
    _folder_flag(parser)
    add_flags_of(parser, JobRequest)
    parser.add_argument(
        "--shards_per_task", type=int, help="shards of a task (default 1, more where the site's limits ask)"
    )
    parser.add_argument("--shards", help="only these, such as 0-9,12 (default: all)")
    parser.add_argument("--dry_run", action="store_true", help="print the job scripts, submit nothing")
    parser.add_argument("--wait", action="store_true", help="show progress until all jobs have ended")
    parser.add_argument(
        "--until_done",
        action="store_true",
        help="leave a small job on the cluster that sends again what fails, and at the end writes a report",
    )
    parser.add_argument(
        "--max_rounds", type=int, default=5, help="of --until_done: how often it sends again (default 5)"
    )


def _retry_flags(parser: argparse.ArgumentParser) -> None:
    _sending_flags(parser)
    parser.add_argument(
        "--max_attempts",
        type=int,
        default=3,
        help="leave a shard that failed the same way so often (default 3)",
    )
    parser.add_argument("--round", type=int, default=1, help=argparse.SUPPRESS)


def _status_flags(parser: argparse.ArgumentParser) -> None:
    _folder_flag(parser)
    parser.add_argument("--watch", action="store_true", help="repeat until nothing is queued")
    parser.add_argument("--json", action="store_true", help="for programs: docs/status_json.md")
    parser.add_argument(
        "--metrics", type=Path, help="also write this file, in Prometheus' text format (default: none)"
    )


PROGRAM = Program(
    name="python -m slurm",
    description="Make a planned data set's shards with a Slurm job array.",
    dashed_values=("--sbatch_args", "--worker_args", "--srun_args"),
    commands={
        "submit": Command(
            summary="submit the missing shards, and a verify job after them",
            add_flags=_submit_flags,
            run=submit,
        ),
        "retry": Command(
            summary="submit again what failed, each as its failure asks", add_flags=_retry_flags, run=retry
        ),
        "status": Command(
            summary="say where every shard is, and why what failed did", add_flags=_status_flags, run=status
        ),
        "report": Command(
            summary="one page of the data set: what it holds, how it was made, how to make it again",
            add_flags="slurm.report.command:add_flags",
            run="slurm.report.command:report",
        ),
        "cancel": Command(
            summary="cancel every job of this data set that waits or runs",
            add_flags=_cancel_flags,
            run=cancel,
        ),
        "logs": Command(
            summary="show the attempts at one shard and the ends of their logs",
            add_flags=_logs_flags,
            run=logs,
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main())
