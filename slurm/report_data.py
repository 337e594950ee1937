"""What ``report`` says about a data set: its contents, how it was made, and how to make it again."""

from __future__ import annotations

import bisect
import datetime
import itertools
import os
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

import shardprep
from shardprep.format.manifest import Manifest, ShardCounts, SourceCounts, TextCounts, longest_of
from shardprep.format.names import TOKENIZER_DIR, id_ranges
from shardprep.format.plan import Plan, is_one_file_a_shard
from shardprep.format.plan_options import PrepConfig, flags_of
from shardprep.format.spec import TokenizerSpec
from shardprep.processes import python_command
from slurm.state import DatasetState
from slurm.status_data import status_of

REPORT_VERSION = 4  # increased when a field is removed or changes its meaning
_NUMBERS = [name for name, kind in get_type_hints(ShardCounts).items() if kind is int]  # others are mappings


@dataclass(frozen=True, kw_only=True)
class ReportedPlan:
    """What was planned."""

    plan_id: str
    num_shards: int
    input_dir: str
    num_inputs: int
    input_bytes: int
    inputs_left_out: dict[str, list[str]]  # reason -> names
    record: str
    token_format: str
    seq_len: int | None
    validation_fraction: float
    pack: str | None  # None: documents are not packed
    tokenizer: TokenizerSpec


@dataclass(frozen=True, kw_only=True)
class ReportedShards:
    """The states of all shards, as ranges."""

    verified: bool
    done: str
    running: str
    pending: str
    not_submitted: str
    not_visible: str
    wrong: str
    broken: dict[str, str]
    other_plan: str
    num_done: int
    num_running: int
    num_pending: int
    num_failed: int
    num_not_submitted: int
    num_not_visible: int
    failed: dict[str, str]  # cause -> shards
    remedies: dict[str, str]  # cause -> what to do
    missing: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to make the same data set again."""

    commands: list[str]
    transform_sha256: str
    versions: dict[str, dict[str, int]]  # of what made the shards: name -> version -> shards


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that the report contains: the fields of ``report --json``, see docs/json.md."""

    format: str = "shardprep-report"
    version: int = REPORT_VERSION
    folder: str
    written: str
    shardprep: str  # version
    plan: ReportedPlan
    shards: ReportedShards
    counts: dict[str, int]
    validation: dict[str, int]  # part of the counts
    tar_bytes: int
    idx_bytes: int
    sources: list[dict[str, Any]]  # one has the fields of SourceCounts, and text statistics
    left_out: dict[str, int]  # reason -> documents
    per_shard: dict[str, dict[str, float]]  # amount -> least, median, most
    work: dict[str, Any]
    slurm_away: str
    again: Recipe


def report_of(state: DatasetState, manifests: Sequence[Manifest]) -> Report:
    """Return everything that the report contains."""
    plan = state.plan
    status = status_of(state)
    counts = [each.counts for each in manifests]
    quarantined: Counter[str] = Counter()
    for each in counts:
        quarantined.update(each.quarantined)
    return Report(
        folder=str(state.folder),
        written=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        shardprep=shardprep.__version__,
        plan=_reported_plan(plan),
        shards=ReportedShards(
            verified=state.is_verified,
            done=status.done,
            running=status.running,
            pending=status.pending,
            not_submitted=status.not_submitted,
            not_visible=status.not_visible,
            wrong=status.wrong,
            broken=status.broken,
            other_plan=status.other_plan,
            num_done=status.num_done,
            num_running=status.num_running,
            num_pending=status.num_pending,
            num_failed=status.num_failed,
            num_not_submitted=status.num_not_submitted,
            num_not_visible=status.num_not_visible,
            failed=status.causes,
            remedies=status.remedies,
            missing=id_ranges(set(range(plan.num_shards)) - state.made.done.keys()),
        ),
        counts={name: sum(getattr(each, name) for each in counts) for name in _NUMBERS},
        validation=_sums([each.validation for each in counts if each.validation]),
        tar_bytes=sum(each.tar.num_bytes for each in manifests),
        idx_bytes=sum(each.idx.num_bytes for each in manifests),
        sources=_sources(manifests),
        left_out=dict(quarantined.most_common()),
        per_shard=_per_shard(state, manifests),
        work=_work(state),
        slurm_away=status.slurm_away if status.has_jobs else "",
        again=_recipe(state.folder, plan, manifests),
    )


def _reported_plan(plan: Plan) -> ReportedPlan:
    left_out: dict[str, list[str]] = {}
    for reason, name in plan.left_out:
        left_out.setdefault(reason, []).append(name)
    return ReportedPlan(
        plan_id=plan.plan_id,
        num_shards=plan.num_shards,
        input_dir=str(plan.input_dir),
        num_inputs=len(plan.inputs),
        input_bytes=sum(item.num_bytes for item in plan.inputs),
        inputs_left_out=left_out,
        record=plan.options.record,
        token_format=plan.options.token_format,
        seq_len=plan.options.seq_len,
        validation_fraction=plan.options.validation_fraction,
        pack=plan.options.pack if plan.spec.has_rows else None,
        tokenizer=plan.tokenizer,
    )


def _sums(counts: Iterable[msgspec.Struct]) -> dict[str, int]:
    """Add up several counts, field by field."""
    sums: Counter[str] = Counter()
    for each in counts:
        for item in msgspec.structs.fields(each):
            value = getattr(each, item.name)
            if isinstance(value, int):
                sums[item.name] += value
    return dict(sums)


def _sources(manifests: Sequence[Manifest]) -> list[dict[str, Any]]:
    """Return the counts of each source, most tokens first. If there are several, their sum comes first."""
    counts = defaultdict[str, list[SourceCounts]](list)
    texts = defaultdict[str, list[TextCounts]](list)
    for manifest in manifests:
        of_shard = manifest.run.texts or {}
        for name, each in manifest.counts.sources.items():
            counts[name].append(each)
            if name in of_shard:
                texts[name].append(of_shard[name])
    every = [_source("all", list(chain(*counts.values())), list(chain(*texts.values())), is_all=True)]
    if not counts:
        return []
    if len(counts) == 1:  # the sum over one source is the source itself
        return every
    single = [_source(name, counts[name], texts[name], is_all=False) for name in counts]
    single.sort(key=lambda each: (-each["num_tokens"], each["name"]))
    return every + single


def _source(
    name: str, counts: Sequence[SourceCounts], texts: Sequence[TextCounts], *, is_all: bool
) -> dict[str, Any]:
    sums = _sums(counts)
    text = _text_statistics(texts, sums.get("num_tokens", 0))
    return {"name": name, "is_all": is_all, **sums, **text}


def _text_statistics(texts: Sequence[TextCounts], num_tokens: int) -> dict[str, Any]:
    """Return the size of texts in UTF-8, and percentiles of document lengths, up to 12 % too high."""
    num_bytes = sum(each.num_bytes for each in texts)
    documents_of_length: Counter[int] = Counter()
    for each in texts:
        for low, (num_documents, _) in each.lengths.items():
            documents_of_length[int(low)] += num_documents
    bytes_per_token = round(num_bytes / num_tokens, 3) if num_tokens else None
    numbers: dict[str, Any] = {"text_bytes": num_bytes, "bytes_per_token": bytes_per_token}
    lows = sorted(documents_of_length)
    num_up_to = list(itertools.accumulate(documents_of_length[low] for low in lows))
    for percent in (50, 90, 99):
        length = None
        if lows:
            place = bisect.bisect_left(num_up_to, percent / 100 * num_up_to[-1])
            length = longest_of(lows[place])
        numbers[f"length_p{percent}"] = length
    return numbers


def _per_shard(state: DatasetState, manifests: Sequence[Manifest]) -> dict[str, dict[str, float]]:
    """Return minimum, median and maximum of sizes, times and memory over shards."""
    made = state.made.done.values()
    values: dict[str, list[float]] = {
        "tar_bytes": [each.tar.num_bytes for each in manifests],
        "num_tokens": [each.counts.num_tokens for each in manifests],
        "wall_s": [each.run.wall_s for each in made],
        "max_rss_bytes": [each.run.max_rss_bytes for each in made],
    }
    return {
        name: {"least": min(numbers), "median": statistics.median(numbers), "most": max(numbers)}
        for name, numbers in values.items()
        if numbers
    }


def _work(state: DatasetState) -> dict[str, Any]:
    """Return when the shards were made, on which nodes, and at what cost."""
    made = [manifest.run for manifest in state.made.done.values()]
    if not made:
        return {}
    return {
        "began": min(each.began for each in made),
        "ended": max(each.ended for each in made),
        "cpu_s": round(sum(each.cpu_s for each in made), 1),
        "had_cpu_s": round(sum(each.wall_s * each.num_cpus for each in made), 1),
        "transform_cpu_s": round(sum(each.transform_cpu_s for each in made), 1),
        "done_over_time": _done_over_time([each.ended for each in made], min(each.began for each in made)),
        "nodes": dict(Counter(each.host for each in made).most_common()),
    }


def _done_over_time(ends: Sequence[float], began: float) -> list[float]:
    """Return the share of the done shards at 61 even times from the first begin to the last end."""
    in_order = sorted(ends)
    span = in_order[-1] - began
    shares = []
    for number in range(61):
        num_done = bisect.bisect_right(in_order, began + span * number / 60)
        shares.append(round(num_done / len(in_order), 4))
    return shares


def _recipe(folder: Path, plan: Plan, manifests: Sequence[Manifest]) -> Recipe:
    """Return the commands that make the same data set again, and the versions that made this one.

    The commands use the tokenizer and the chat template that are stored in the data set.
    """
    input_dir = os.path.abspath(plan.input_dir)  # noqa: PTH100 - Path's may raise
    plan_again = ["shardprep", "plan", "--input_dir", input_dir, "--output_dir", "NEW"]
    plan_again += ["--model_id", str(folder / TOKENIZER_DIR)]
    if not is_one_file_a_shard(plan):
        plan_again += ["--num_shards", str(plan.num_shards)]
    plan_again += flags_of(plan.options)
    if plan.max_bad_fraction != PrepConfig().max_bad_fraction:
        plan_again += ["--max_bad_fraction", str(plan.max_bad_fraction)]
    if plan.cuts[0].sha256:
        plan_again.append("--hash_inputs")
    commands = []
    # Several templates of a model lie in DATA/tokenizer, and a file can have but one.
    if plan.options.chat_template and not plan.options.chat_tool_template:
        commands.append(shlex.join(python_command("slurm.report:write_chat_template", str(folder))))
        plan_again += ["--chat_template_file", "NEW.jinja"]
    commands += [shlex.join(plan_again), "shardprep run NEW", "shardprep verify NEW"]
    versions: dict[str, Counter[str]] = defaultdict(Counter)
    for manifest in manifests:
        run = manifest.run
        used = {"shardprep": run.shardprep, "engine": run.engine, "python": run.python, **run.libraries}
        for name, version in used.items():
            versions[name[:80]][version[:80] or "?"] += 1
    return Recipe(
        commands=commands,
        transform_sha256=plan.options.transform_sha256,
        versions={name: dict(sorted(numbers.items())) for name, numbers in versions.items()},
    )
