"""The plan that a task works by: the one in its folder, checked against what the user gave, or a new one."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from preprocess.plan.listing import find_inputs
from preprocess.plan.planning import make_plan
from preprocess.read.format import OpenInput, sample_sha256
from shardprep.console import counted, say
from shardprep.errors import NotFound, OtherTokenizer, ReadWriteError, Refused
from shardprep.files import NOT_THERE, read_regular, size_of_file
from shardprep.format.json_files import load_json
from shardprep.format.names import MAX_TOKENIZER_BYTES, PLAN_NAME, TOKENIZER_FILE, fingerprint_of
from shardprep.format.options import PLAN_FIELDS, PrepConfig, option_differences
from shardprep.format.plan import InputFile, Plan, is_one_file_a_shard, read_plan

# A task waits for another's plan for about as long as its own would take: 3 s and more for many files.
_LEAST_WAIT_S = 3.0
_STAMPED_PER_S = 2000
_LOOK_EVERY_S = 0.2
_NUM_STAT_THREADS = 16  # a stat is a round trip on a network file system
_CLAIM_NAME = f".{PLAN_NAME}.claimed.tmp"
_NUM_NAMED = 3  # inputs that differ


def plan_of_task(plan: Plan | None, given: dict[str, Any]) -> Plan:
    """Return the plan in ``output_dir``, checked against what the user gave, or make 'one file, one shard'.

    Of several tasks that find no plan, one plans and the others wait a little. One that does not see the plan
    in time plans, too: the first to publish wins, the others compare.
    """
    output_dir: Path = given["output_dir"]
    if plan is None:
        # Shard N is the N-th of the .txt files, README.txt and the like included.
        config = PrepConfig(**{**given, "also": ",".join(filter(None, ["*.txt", given.get("also")]))})
        say(f"no plan in {output_dir}: planning one shard per file of {config.input_dir}")
        plan = _plan_once(config)
    _check_given(plan, given)
    if "input_dir" in given and is_one_file_a_shard(plan):
        check_inputs(plan, given["input_dir"], names_alone=True)
    return plan


def _plan_once(config: PrepConfig) -> Plan:
    """Return the plan that another task is making, if it comes soon, else one's own.

    A file tells who plans. It is no lock: nothing is wrong without it.
    """
    folder, claim = config.output_dir, config.output_dir / _CLAIM_NAME
    is_ours = is_new_folder = False
    with contextlib.suppress(OSError):  # planning will say what is wrong with the folder
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            is_new_folder = True
        claim.touch(exist_ok=False)
        is_ours = True
    try:
        if not is_ours and size_of_file(claim) is not None:
            say("another task is planning: waiting for its plan")
            num_files = len(find_inputs(config.input_dir, config).paths)
            until = time.monotonic() + _LEAST_WAIT_S + num_files / _STAMPED_PER_S
            while size_of_file(claim) is not None and time.monotonic() < until:
                time.sleep(_LOOK_EVERY_S)
                if size_of_file(folder / PLAN_NAME) is not None:
                    break
        if (plan := read_plan(folder)) is not None:  # perhaps it came between the first look and the claim
            return plan
        return make_plan(config, say=say)[0]
    finally:
        with contextlib.suppress(OSError):
            if is_ours:
                claim.unlink()
            if is_new_folder:
                folder.rmdir()  # which does nothing to a folder that holds something


def _check_given(plan: Plan, given: dict[str, Any]) -> None:
    """Check given options against the plan's. Raises Refused or OtherTokenizer."""
    base = {item.name: getattr(plan.options, item.name) for item in PLAN_FIELDS}
    if given.get("record", plan.options.record) != plan.options.record:
        base = {}  # seq_len and keep_text of the one record are no options of the other
    if "text_field" in given or "text_template" in given:
        base = {name: value for name, value in base.items() if name not in ("text_field", "text_template")}
    differing = option_differences(plan.options, PrepConfig(**{**base, **given}), set(given))
    if differing:
        expected = "the options of its plan: leave them out, or use a new --output_dir"
        raise Refused(
            path=given["output_dir"], found="; ".join(differing), expected=expected, remedy="--output_dir"
        )
    model_id = given.get("model_id", plan.tokenizer.model_id)
    if model_id == plan.tokenizer.model_id:
        return
    found = "no local folder with a tokenizer.json, so it cannot be compared"
    with contextlib.suppress(*NOT_THERE, ValueError, TypeError, AttributeError):
        raw = read_regular(Path(model_id, TOKENIZER_FILE), max_bytes=MAX_TOKENIZER_BYTES)
        found = fingerprint_of(load_json(raw))
    if found != plan.tokenizer.fingerprint:
        what = found if " " in found else found[:12]
        raise OtherTokenizer(
            path=given["output_dir"],
            found=f"--model_id {model_id} ({what})",
            expected=f"the tokenizer of {plan.tokenizer.model_id} ({plan.tokenizer.fingerprint[:12]}), as "
            "planned: leave --model_id out, or use a new --output_dir",
            remedy="--output_dir",
        )


def check_inputs(plan: Plan, input_dir: Path, *, names_alone: bool = False) -> None:
    """Refuse a folder that no longer holds the planned inputs, and these alone.

    A file of the planned size and mtime is not opened. Of another mtime its sample is read and compared.
    ``names_alone``: look at no file. Raises Refused, ReadWriteError, NotFound for a folder without inputs.
    """
    planned = {item.path for item in plan.inputs}
    try:
        listing = find_inputs(input_dir, plan.options)
        found = {path.relative_to(input_dir).as_posix() for path in listing.paths}
        differing = [f"{name} was added" for name in sorted(found - planned)]
        differing += [f"{name} is missing" for name in sorted(planned - found)]
        if not names_alone:
            with ThreadPoolExecutor(_NUM_STAT_THREADS) as pool:
                changes = pool.map(lambda item: _change_of(input_dir, item), plan.inputs)
                differing += filter(None, changes)
    except NotFound as error:
        if names_alone:
            raise
        differing = [str(error)]
    if differing:
        more = f" and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
        raise Refused(
            path=input_dir,
            found="; ".join(differing[:_NUM_NAMED]) + more,
            expected=f"the {counted(len(plan.inputs), 'planned input file')}, as a plan is never changed: "
            "bring them back, or put new files into a folder and an --output_dir of their own, and give the "
            "loader a list of folders",
            remedy="--output_dir",
        )


def _change_of(input_dir: Path, planned: InputFile) -> str | None:
    """Return how an input differs from the planned one, or None for one that is missing or equal."""
    try:
        status = (input_dir / planned.path).stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ReadWriteError(f"input {input_dir / planned.path} cannot be read: {error.strerror}") from None
    if status.st_size != planned.num_bytes:
        return f"{planned.path} has {status.st_size} bytes, not {planned.num_bytes}"
    if status.st_mtime_ns == planned.mtime_ns:
        return None
    is_equal = sample_sha256(OpenInput(input_dir / planned.path)) == planned.sha256
    return None if is_equal else f"{planned.path} holds other bytes"
