"""The plan of a task of ``--shard_id N``: the one in its folder, compared with the flags, or a new one."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from preprocess.plan.dividing import NUM_THREADS
from preprocess.plan.inputs import find_inputs
from preprocess.plan.planning import make_plan
from preprocess.read.inputs import RangeReader
from shardprep import errors, files
from shardprep.console import counted, say
from shardprep.format import json_files, names, plan_options
from shardprep.format import plan as plans
from shardprep.format.attempts import start_ticks
from shardprep.format.data_folder import DataFolder
from shardprep.format.plan import Cut, InputFile, Plan, ranges_between
from shardprep.format.plan_options import PrepConfig
from shardprep.format.spec import fingerprint_of

# A task waits for another task's plan about as long as it would take to plan: 3 s, or more for many files.
_MIN_WAIT_S = 3.0
_FILES_STAMPED_PER_S = 2000
_LOOK_EVERY_S = 0.2
_CLAIM_NAME = f".{names.PLAN_NAME}.claimed.tmp"
_NUM_NAMED = 3  # names of inputs that differ, in an error


def ensure_plan_matches(given: dict[str, Any], *, may_plan: bool, checks_inputs: bool) -> None:
    """Compare the plan in ``output_dir`` with the flags of a task, or make one with a shard per file.

    Raises Refused for other options or inputs, OtherTokenizer, and as ``make_plan``.
    """
    folder = DataFolder(given["output_dir"])
    plan = plans.read_plan(folder) if may_plan else plans.need_plan(folder)
    if plan is not None and checks_inputs:
        check_inputs(plan, given.get("input_dir", PrepConfig.input_dir))
    if plan is None:
        # Shard N is the N-th .txt file, and files like README.txt count, too.
        config = PrepConfig(**{**given, "also": ",".join(filter(None, ["*.txt", given.get("also")]))})
        say(f"no plan in {folder}: planning one shard per file of {config.input_dir}")
        plan = _plan_once(config)
    base = {item.name: getattr(plan.options, item.name) for item in plan_options.PLAN_FIELDS}
    if given.get("record", plan.options.record) != plan.options.record:
        base = {}  # options of the planned record, such as seq_len, may not exist for the given one
    if {"text_field", "text_template"} & given.keys():  # each replaces the other
        base = {name: value for name, value in base.items() if name not in ("text_field", "text_template")}
    differing = plan_options.option_differences(plan.options, PrepConfig(**{**base, **given}), set(given))
    if differing:
        found = "; ".join(differing)
        expected = "its plan's options, or a new --output_dir"
        raise errors.Refused(path=folder, found=found, expected=expected, remedy="--output_dir")
    _refuse_other_model(plan, given.get("model_id", plan.tokenizer.model_id), folder)
    if "input_dir" in given and plans.is_one_file_a_shard(plan):
        check_inputs(plan, given["input_dir"], names_alone=True)


def _refuse_other_model(plan: Plan, model_id: str, folder: DataFolder) -> None:
    """Raise OtherTokenizer if a model has not the plan's tokenizer.json."""
    if model_id == plan.tokenizer.model_id:
        return
    fingerprint = ""
    with contextlib.suppress(*files.NOT_THERE, ValueError, TypeError, AttributeError):
        path = Path(model_id, names.TOKENIZER_FILE)
        raw = files.read_regular(path, max_bytes=names.MAX_TOKENIZER_BYTES)
        fingerprint = fingerprint_of(json_files.load_json(raw))
    if fingerprint != plan.tokenizer.fingerprint:
        found = f"--model_id {model_id}, whose tokenizer.json differs, or cannot be compared"
        fields = {"found": found, "expected": plan.tokenizer.model_id, "remedy": "--output_dir"}
        advice = "leave --model_id out, or use a new --output_dir"
        raise errors.OtherTokenizer(path=folder, advice=advice, **fields)


def _plan_once(config: PrepConfig) -> Plan:
    """Return the plan of another task that is planning, if it is written soon, or else make one."""
    # A file shows that a task is planning. It is not a lock: if several tasks plan, the first plan counts.
    is_new_folder = False
    with contextlib.suppress(OSError):  # planning will say what is wrong with the folder
        config.output_dir.mkdir()
        is_new_folder = True
    folder = DataFolder(config.output_dir)
    is_ours = _claim(folder)
    try:
        plan = plans.read_plan(folder)
        if not is_ours and folder.status_of(_CLAIM_NAME) is not None:
            say("another task is planning: waiting for its plan")
            num_files = len(find_inputs(config.input_dir, config).paths)
            until = time.monotonic() + _MIN_WAIT_S + num_files / _FILES_STAMPED_PER_S
            while plan is None and folder.status_of(_CLAIM_NAME) is not None and time.monotonic() < until:
                time.sleep(_LOOK_EVERY_S)
                plan = plans.read_plan(folder)
        return plan or plans.read_plan(folder) or make_plan(config, looks=False)[0]
    finally:
        with contextlib.suppress(OSError, errors.ShardprepError):
            if is_ours:
                folder.remove(_CLAIM_NAME)
            if is_new_folder:
                config.output_dir.rmdir()  # fails if the folder is not empty


def _claim(folder: DataFolder) -> bool:
    """Show other tasks that this process is planning. Return False if another one is."""
    pid = os.getpid()
    ours = f"{os.uname().nodename} {pid} {start_ticks(pid)}".encode()
    for _ in range(2):
        try:
            folder.create(_CLAIM_NAME, ours)
        except FileExistsError:
            pass
        except (OSError, errors.ShardprepError):  # planning will say what is wrong with the folder
            return False
        else:
            return True
        # The file of a planner that was killed on this host would cost every later task the wait.
        host, _, process = folder.read_beginning(_CLAIM_NAME, 400).decode(errors="replace").partition(" ")
        numbers = process.split()
        is_here = host == os.uname().nodename and len(numbers) == 2 and numbers[0].isdecimal()
        if not is_here or str(start_ticks(int(numbers[0]))) == numbers[1]:
            return False
        with contextlib.suppress(OSError):
            folder.remove(_CLAIM_NAME)
    return False


def check_inputs(plan: Plan, input_dir: Path, *, names_alone: bool = False) -> None:
    """Raise Refused if a folder no longer has the planned inputs, or with ``names_alone`` their names."""
    planned = {item.path: item for item in plan.inputs}

    def change_of(item: InputFile) -> str:
        try:
            RangeReader(next(ranges_between(input_dir, [item], Cut(0, 0), Cut(1, 0))), None)
        except errors.Refused as error:
            return f"{item.path} has {error.found}"
        return ""

    try:
        taken = find_inputs(input_dir, plan.options).taken
        differing = [f"{name} was added" for name in sorted(taken.keys() - planned.keys())]
        differing += [f"{name} is missing" for name in sorted(planned.keys() - taken.keys())]
        if not names_alone:
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                there = [item for path, item in planned.items() if path in taken]
                differing += filter(None, pool.map(change_of, there))
    except errors.NotFound as error:
        if names_alone:
            raise
        where = "" if error.path == str(input_dir) else f"{error.path}: "
        differing = [f"{where}{error.found or error}"]
    if differing:
        more = f" and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
        expected = f"the {counted(len(planned), 'planned input file')}"
        advice = "bring them back, or plan new ones in a folder of their own, with another --output_dir, and "
        advice += "give the loader a list of folders"
        fields = {"found": "; ".join(differing[:_NUM_NAMED]) + more, "expected": expected, "advice": advice}
        raise errors.Refused(path=input_dir, remedy="--output_dir", **fields)
