"""Estimate what a plan costs, by a sample that goes through a worker's stages.

The sample has 2 MiB, from 8 places, and the CPU time is scaled up. If no record of it is usable, planning
fails.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from preprocess.make.counts import Counting
from preprocess.make.engine import Engine
from preprocess.make.layout import BatchLayout
from preprocess.make.writer import ShardWriter
from preprocess.plan.conversations import ConversationSample, form_line
from preprocess.plan.estimate import Estimate
from preprocess.plan.mending import problem_of_fields
from preprocess.plan.sampling import first_records, sample_of_plan
from preprocess.plan.scratch import scratch_folder
from preprocess.read import chat
from preprocess.read.documents import DocumentBatch, advice_about
from preprocess.read.text_fields import from_json, value_at
from preprocess.read.transform import Transform
from shardprep import errors
from shardprep.console import counted, printable, short_bytes
from shardprep.format import plan as plans
from shardprep.format.data_folder import DataFolder
from shardprep.format.documents import DocumentNames, lines_of
from shardprep.format.excluded import unmatched_of
from shardprep.format.inputs import place_text
from shardprep.format.manifest import RunFacts
from shardprep.format.plan import Plan

_SAMPLE_BYTES = 2 << 20  # of the input that is sampled
_NUM_SHOWN = 20  # names of fields, in an error
_STARTUP_S = 3.0  # for a task's Python and tokenizer, a generous estimate
_LONG_SHARD_S = 600.0  # on one core; a longer shard gets a warning
_MANY_SHARDS = 1000  # this many small shards, each of one input file, get a warning
_SHARD_BYTES = 256 << 20  # of input, which takes minutes on one core
_SMALL_SHARD_BYTES = 4 << 20  # of input: the start of a task takes longer than its work


class Lookup:
    """Looks up the documents of a sample in the list of --exclude."""

    def __init__(self, listed: DocumentNames, path: Path) -> None:
        self._listed = listed
        self._path = path
        self._is_matched = np.zeros(len(listed.keys), np.bool_)
        self._some_id = ""  # of a document, to compare with the names

    def see(self, documents: DocumentBatch) -> None:
        ids = documents.columns.get("id")
        path = documents.input_path
        offsets = documents.offsets
        positions = self._listed.of_documents(path, offsets, ids, documents.digests)
        self._is_matched[positions[positions >= 0]] = True
        self._some_id = self._some_id or next(filter(None, ids or ()), "")

    def line(self, *, has_all: bool, id_field: str) -> str:
        """Return what is known about names that match nothing. ``has_all``: all documents were seen."""
        lines = lines_of(self._path, self._listed, ~self._is_matched, id_field=id_field)
        unmatched = unmatched_of(self._listed, self._is_matched, lines)
        if has_all:
            return unmatched.sentence(self._some_id)
        shown = f", such as {unmatched.examples[0]}" if unmatched.examples else ""
        compared = f"; ids of documents are such as {self._some_id}" if self._some_id else ""
        return (
            f"--exclude: {counted(unmatched.num_names, 'name')}{shown}{compared}; after the run, verify says "
            "how many match no document"
        )


def measure(
    plan: Plan, engine: Engine, transform: Transform | None, lookup: Lookup | None = None
) -> Estimate:
    """Estimate the cost by a sample in a worker's stages."""
    num_bytes = num_text_bytes = 0
    mask_rule = plan.options.chat_mask_rule
    has_value: dict[str, bool] = {}  # whether any record has a value, by column, such as "id" and "source"
    layout = BatchLayout(plan.spec, plan.options, 0)
    with scratch_folder() as path, ShardWriter(DataFolder(path), plan.spec, plan.options, 0) as writer:
        conversations = ConversationSample(plan.options) if plan.options.is_chat else None
        began = time.process_time()
        render_began_s = chat.cpu_s() if conversations else 0.0
        for documents in sample_of_plan(plan, _SAMPLE_BYTES, transform):
            if lookup is not None:
                lookup.see(documents)
            tokens = engine.encode_documents(documents, end_id=plan.end_id, mask_rule=mask_rule)
            writer.append(layout.lay_out(documents, tokens))
            num_bytes += documents.num_bytes
            num_text_bytes += documents.texts.num_bytes
            if conversations is not None:
                conversations.see(documents, tokens)
            for name, column in documents.columns.items():
                has_value[name] = has_value.get(name, False) or any(column)
        cpu_s = time.process_time() - began
        if conversations is not None:
            render_s = chat.cpu_s() - render_began_s
            cpu_s += render_s
        manifest = writer.commit(RunFacts())
    counting = writer.counting
    _check_sample(plan, counting)
    warnings = []
    if counting.bad_fraction > plan.max_bad_fraction:
        what = f"are left out ({', '.join(sorted(counting.bad_reasons))})"
        limit = f"a shard with more than {plan.max_bad_fraction:.0%} fails"
        warnings.append(f"{counting.bad_fraction:.0%} of the documents in a sample {what}; {limit}")
    fields = {"id": plan.options.id_field, "source": plan.options.source_field}
    unseen = [f"--{name}_field {fields[name]}" for name in fields if not has_value.get(name, True)]
    if unseen:
        warnings.append(f"no record of a sample has a value for {', '.join(unseen)}; check the spelling")
    sizes = plan.shard_bytes()
    num_shards = plan.num_shards
    notes = list(conversations.lines()) if conversations is not None else []
    if conversations is not None and transform is None:
        notes[:0] = filter(None, [form_line(_sampled_records(plan), plan.options)])
    if conversations is not None and counting.num_documents:
        share = render_s / max(cpu_s, 1e-9)
        rate = counting.num_documents / max(render_s, 1e-3)
        notes.append(
            f"rendering conversations takes {share:.0%} of the CPU time, in a process of its own: "
            f"about {rate:,.0f} documents per second"
        )
    if counting.num_of_field:
        shown = ", ".join(f"{printable(name)} {number:,}" for name, number in counting.num_of_field.items())
        notes.append(f"fields of the text, in a sample: {shown}")
    if lookup is not None:
        has_all = num_bytes >= sum(sizes) and not plan.options.limit
        notes.append(lookup.line(has_all=has_all, id_field=plan.options.id_field))
    num_bytes = max(1, num_bytes)
    num_documents = counting.num_documents * sum(sizes) / num_bytes
    fraction = min(1.0, (plan.options.limit or num_documents) / max(1.0, num_documents))  # 1 without --limit
    scale = sum(sizes) / num_bytes * fraction
    stamps = (manifest.tar, manifest.idx, manifest.digests, manifest.ids)
    sample_bytes = sum(stamp.num_bytes for stamp in stamps if stamp)
    longest_s = cpu_s * fraction * max(sizes) / num_bytes + _STARTUP_S  # on one core
    if longest_s > _LONG_SHARD_S:
        more = round(num_shards * longest_s / _LONG_SHARD_S) + 1
        warnings.append(f"a shard will take {longest_s / 60:.0f} minutes on one core; --num_shards {more}?")
    fewer = max(1, round(sum(sizes) / _SHARD_BYTES))
    if num_shards >= max(_MANY_SHARDS, 2 * fewer) and plans.is_one_file_a_shard(plan):
        each_one = f"each of {num_shards} input files is a shard of its own, and so a task"
        warnings.append(f"{each_one}; for even shards plan into a new folder with --num_shards {fewer}")
    elif num_shards >= _MANY_SHARDS and sum(sizes) < num_shards * _SMALL_SHARD_BYTES:
        size = short_bytes(sum(sizes) / num_shards)
        warnings.append(f"{num_shards:,} shards of {size} are many small files; --num_shards {fewer}?")
    num_full = num_shards - sizes.count(0)
    if 0 < num_full < num_shards and not plans.is_one_file_a_shard(plan):
        empty = f"{num_shards - num_full:,} of {counted(num_shards, 'shard')} will be empty"
        warnings.append(f"{empty}: the input has too few lines, rows or files; --num_shards {num_full}?")
    return Estimate(
        num_tokens=round(counting.num_tokens * scale),
        output_bytes=round(sample_bytes * scale),
        core_s=cpu_s * scale + _STARTUP_S * num_shards,
        longest_s=longest_s,
        num_cores=len(os.sched_getaffinity(0)),
        output_per_text_byte=sample_bytes / max(1, num_text_bytes),
        notes=[*(f"warning: {warning}" for warning in warnings), *notes],
    )


def _check_sample(plan: Plan, counting: Counting) -> None:
    """Raise BadInput, with what to change, if no document of the sample is usable."""
    unusable = counting.unusable
    if counting.num_documents or not unusable or plan.max_bad_fraction == 1:
        return
    if {bad.reason for bad in unusable} <= {"no_field", "wrong_type"}:
        problem = problem_of_fields(plan.input_dir, _sampled_records(plan), plan.options)
        if problem is not None:
            raise problem
    if {bad.reason for bad in unusable} == {"preference_pair"}:
        raise errors.BadInput(
            path=plan.input_dir,
            found="preference pairs, chosen and rejected, which are no rows for a language model's loss",
            expected="conversations",
            advice="for one side, plan with --text_field chosen; pairs are for a preference trainer",
            remedy="--text_field chosen",
        )
    first = unusable[0]
    reasons = ", ".join(sorted({bad.reason for bad in unusable}))
    found = f"all documents of a sample, {len(unusable):,}, would be left out ({reasons}), and the limit is "
    found += f"{plan.max_bad_fraction:.2%}"
    advice = " ".join(advice_about(unusable, plan.options))
    keys = _keys_of_messages(plan) if plan.options.is_chat and not plan.options.transform_sha256 else []
    if keys and not {"role", "content"} <= {*keys}:
        found += f"; their messages have the keys {', '.join(keys)}"
        advice = f"plan with --transform FILE in place of --text_field: {_mapping(plan, keys)}"
    found += f"; the first is {place_text(first.input, first.input_offset)}: {first.detail}"
    wanted = "messages with role and content" if plan.options.is_chat else "usable documents"
    raise errors.BadInput(path=plan.input_dir, found=found, expected=wanted, advice=advice)


def _keys_of_messages(plan: Plan) -> list[str]:
    """Return the keys of the first message in the sampled records, or []."""
    path = tuple(plan.options.text_field.split("."))
    for record in _sampled_records(plan):
        messages = value_at(record, path)
        if isinstance(messages, str):
            messages = from_json(messages)
        if isinstance(messages, list) and messages and isinstance(messages[0], dict):
            return [printable(str(key)) for key in messages[0]][:_NUM_SHOWN]
    return []


def _mapping(plan: Plan, keys: list[str]) -> str:
    """Return a function for --transform, in one line, that gives messages their usual keys."""
    speaker, said = ("from", "value") if {"from", "value"} <= {*keys} else ("SPEAKER", "TEXT")
    roles = "{'human': 'user', 'gpt': 'assistant'}"
    message = f"{{'role': {roles}.get(m['{speaker}'], m['{speaker}']), 'content': m['{said}']}}"
    field = "".join(f"[{name!r}]" for name in plan.options.text_field.split("."))
    return f"def transform(record): return [{message} for m in record{field}]"


def _sampled_records(plan: Plan) -> list[Any]:
    """Return records from the beginning of the first input."""
    item = next(item for item in plan.inputs if item.num_bytes)
    return first_records(plan.input_dir, item, plan.options)
