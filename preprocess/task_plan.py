"""Which plan a ``--shard_id N`` works by: the one in its folder, or the one it makes and publishes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preprocess.input_files import list_inputs
from preprocess.options import PrepConfig, flags_of
from preprocess.plan import Plan, is_one_file_a_shard, need_plan, read_plan
from preprocess.planning import Sharding, make_plan
from preprocess.tokenizer_files import TOKENIZER_FILE, describe_tokenizer
from shardprep.console import die_with_parent, raise_on_stop_signals, say, stop_signals_wait
from shardprep.errors import NotFound, OtherTokenizer, ReadWriteError, Refused, ShardprepError, Stopped
from shardprep.format.names import TOKENIZER_DIR, id_ranges
from shardprep.regular_files import size_of_file


class PlanningFailed(ShardprepError):
    """The planning process ended with an error that it has printed."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def plan_of_task(given: dict[str, Any]) -> Plan:
    """The plan in ``output_dir``, checked against what the user gave; without one, 'one file, one shard'.

    Several tasks may plan at once: the first to publish wins, the others compare. Planning runs in
    a process of its own, because resolving a tokenizer imports transformers and the worker never does.
    """
    config = PrepConfig(**given) if "output_dir" not in given else None
    output_dir: Path = config.output_dir if config else given["output_dir"]
    plan = read_plan(output_dir)
    if plan is None:
        config = PrepConfig(**given)
        say(f"no plan in {output_dir}: planning one shard a file of {config.input_dir}")
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_plan_in_child, args=(config, os.getpid()))
        with stop_signals_wait():
            process.start()
        try:
            process.join()
        finally:
            process.terminate()
        if process.exitcode:
            raise PlanningFailed(process.exitcode if process.exitcode > 0 else ReadWriteError.exit_code)
        return need_plan(output_dir)
    _check_given(plan, given)
    if "input_dir" in given and is_one_file_a_shard(plan):
        _check_listing(plan, given["input_dir"])
    return plan


def _plan_in_child(config: PrepConfig, parent: int) -> None:
    try:
        raise_on_stop_signals()
        die_with_parent(parent)
        make_plan(config, Sharding(), say=say)
    except (ShardprepError, Stopped) as error:
        say(f"error: {error}")
        raise SystemExit(error.exit_code) from None


def _check_given(plan: Plan, given: dict[str, Any]) -> None:
    """Raises Refused or OtherTokenizer where given options are not the plan's."""
    base = flags_of(plan.options)
    if given.get("record", plan.options.record) != plan.options.record:
        base = {}  # seq_len and keep_text of the one record are no options of the other
    if "text_field" in given or "text_template" in given:
        base = {name: value for name, value in base.items() if name not in ("text_field", "text_template")}
    wanted = dataclasses.asdict(PrepConfig(**{**base, **given}).bytes_options())
    planned = dataclasses.asdict(plan.options)
    differing = [
        f"--{name} was {planned[name]}, now {wanted[name]}"
        for name in wanted
        if name in given and wanted[name] != planned[name]
    ]
    if differing:
        raise Refused(
            f"{given['output_dir']} was planned with other options: {'; '.join(differing)}; leave them out, "
            "or use a new --output_dir"
        )
    model_id = given.get("model_id", plan.tokenizer.model_id)
    if model_id == plan.tokenizer.model_id:
        return
    folder = Path(model_id)
    is_local = size_of_file(folder / TOKENIZER_FILE) is not None
    found = describe_tokenizer(folder, model_id).fingerprint if is_local else None
    if found != plan.tokenizer.fingerprint:
        raise OtherTokenizer(
            f"{given['output_dir']} was planned with the tokenizer of {plan.tokenizer.model_id} (fingerprint "
            f"{plan.tokenizer.fingerprint[:12]}, files in {TOKENIZER_DIR}/), --model_id is {model_id} "
            f"({found[:12] if found else 'not a local folder, so it cannot be compared'}); "
            "leave --model_id out, or use a new --output_dir"
        )


def _check_listing(plan: Plan, input_dir: Path) -> None:
    """Raises Refused where the N-th file is no longer the planned one."""
    found = [
        path.relative_to(input_dir).as_posix()
        for path in list_inputs(input_dir, recursive=plan.options.recursive)
    ]
    planned = [item.path for item in plan.inputs]
    if found != sorted(planned):
        other = sorted(set(found) ^ set(planned))
        raise Refused(
            f"{input_dir} holds {len(found)} input files, the plan has {len(planned)}; differing: "
            f"{', '.join(other[:3])}. A plan is never changed: put new files into a folder of their own, "
            "with an --output_dir of its own, and give the loader a list of folders"
        )


def array_note(environ: Mapping[str, str], num_shards: int, folder: Path) -> str | None:
    """What this task's job array leaves out of the plan, with the line that submits it; else None."""
    try:
        first, last, step = (int(environ[f"SLURM_ARRAY_TASK_{name}"]) for name in ("MIN", "MAX", "STEP"))
        count = int(environ["SLURM_ARRAY_TASK_COUNT"])
    except (KeyError, ValueError):
        return None
    covered = set(range(first, last + 1, max(1, step)))
    if count != len(covered):  # a list such as 1,5,7: Slurm does not tell its tasks which
        return None
    if not (left := sorted(set(range(num_shards)) - covered)):
        return None
    ids = id_ranges(left)
    return (
        f"this job array covers {num_shards - len(left)} of the plan's {num_shards} shards; it leaves out "
        f"{ids}: sbatch --array={ids} slurm/prep_array.sh {folder}"
    )


def check_task_shard(plan: Plan, shard_id: int) -> None:
    """Raises NotFound for a shard past the plan's end."""
    if shard_id < 0:
        raise NotFound(f"--shard_id is {shard_id}, the first shard is 0")
    plan.ranges(shard_id)
