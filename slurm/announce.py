"""What a person is told about jobs that are sent, or that a dry run would send."""

from __future__ import annotations

import itertools
import math

from shardprep.console import counted, print_lines, say, shards_text
from shardprep.format import commands
from shardprep.format.jobs import JobArray, Submission
from shardprep.format.names import id_ranges, ids_of_ranges
from slurm.controller import CONTROLLER_TEXT
from slurm.nodes import node_hours, nodes_note
from slurm.request import SendOptions, request_of
from slurm.site import Site
from slurm.state import DatasetState
from slurm.submission import JobsToSend


def announce(options: SendOptions, state: DatasetState, submission: Submission, controller: str) -> None:
    """Print the jobs of a submission, and what to type next."""
    for array in submission.arrays:
        print_lines(_array_line(array))
    print_lines(f"job {submission.verify.job_id}: verify, when they have ended")
    if controller:
        print_lines(f"job {controller}: {CONTROLLER_TEXT}")
    if not options.wait:
        print_lines(f"next: {commands.on('status', state.folder, '--watch')}")


def _array_line(array: JobArray) -> str:
    """Return a line about an array: its tasks, what each may use, and its shards."""
    mem = "no memory limit" if array.mem_mb is None else f"{array.mem_mb} MB"
    limit = "no time limit" if array.time_min is None else f"{array.time_min} min"
    ids = list(itertools.chain(*array.shards_of_tasks()))
    tasks = counted(len(array.tasks), "task")
    if len(ids) > len(array.tasks):
        tasks += f" of up to {math.ceil(len(ids) / len(array.tasks))} shards"
    limit += _node_hours_text(array)
    return f"job {array.job_id}: {tasks}, {mem}, {limit}, for {shards_text(id_ranges(ids))}"


def _node_hours_text(array: JobArray) -> str:
    """Return what tasks on whole nodes are billed at most, with a comma before it, or ""."""
    request = request_of(array)
    if request.num_cpus is not None or array.time_min is None:
        return ""
    hours = node_hours(request, len(array.tasks), array.time_min)
    return f", at most {hours:,.1f} node-hours"


def say_what_nodes_save(state: DatasetState, jobs: JobsToSend, site: Site, *, is_cut: bool) -> None:
    sizes = state.plan.shard_bytes()
    for array in jobs.arrays:
        tasks = [ids_of_ranges(task) for task in array.tasks]
        limits = site.limits(array.request)
        note = nodes_note(array.request, limits, sizes, tasks, state.made.done.values(), is_cut=is_cut)
        if note:
            say(note)


def summary_lines(jobs: JobsToSend) -> list[str]:
    """Return comments above the scripts of a dry run: jobs, tasks at once, and the most that they may use."""
    num_jobs = counted(len(jobs.scripts()), "job")
    lines = [f"# {num_jobs}, not submitted: arrays of tasks, then verify"]
    for array in jobs.arrays:
        request = array.request
        num_tasks = len(array.tasks)
        at_once = min(request.max_parallel, num_tasks)
        words = [f"# {counted(num_tasks, 'task')}, {at_once} at once"]
        unit = "CPU"
        if request.num_cpus is None:
            unit = "node"
            nodes = "a whole node"
            if request.nodes is not None:
                nodes = counted(request.nodes, "whole node")
            words.append(f"{nodes} each")
        else:
            words.append(f"{counted(request.num_cpus, 'CPU')} each")
        if request.time_min is None:
            words.append("no time limit named")
        else:
            unit_hours = node_hours(request, num_tasks, request.time_min) * (request.num_cpus or 1)
            hours = math.ceil(num_tasks / at_once) * request.time_min / 60
            words.append(f"at most {request.time_min} min each")
            words.append(f"at most {unit_hours:,.1f} {unit}-hours and {hours:,.1f} hours in all")
        lines.append(", ".join(words))
    return lines
