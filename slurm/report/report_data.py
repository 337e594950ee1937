"""``report``: everything that it says, as plain data: what ``--json`` prints, and the page shows.

docs/report_json.md describes it. Each manifest is read once, and no shard: 10,000 take about 5 s of CPU. Only
``_attempts`` reads records of submissions, logs, or Slurm.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import re
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import shardprep
from preprocess.look.left_out import EXCERPT_CHARS, excerpt_of, quarantined
from preprocess.look.peek import Decoder, Excerpt, excerpts
from preprocess.plan.document_ends import document_ends
from shardprep.console import Progress, print_lines, say
from shardprep.errors import ShardprepError, UsageError
from shardprep.files import names_in, publish_bytes, size_of_file
from shardprep.format.done import Finding, MadeShards, read_findings
from shardprep.format.index import COLUMNS, DatasetIndex, read_index
from shardprep.format.manifest import (
    ShardCounts,
    ShardMaking,
    check_sizes,
    longest_of,
    manifest_ids,
    read_manifest,
)
from shardprep.format.names import (
    INDEX_NAME,
    TOKENIZER_DIR,
    id_ranges,
    ids_of_ranges,
    manifest_path,
    shard_name,
)
from shardprep.format.options import PrepConfig, flags_of
from shardprep.format.plan import Plan, is_one_file_a_shard, need_plan
from slurm.state import DatasetState, cause_of, find_state
from slurm.status import report as status_of
from slurm.submissions import Submission

REPORT_VERSION = 3  # it grows where a field goes or changes its meaning, not where one is added
MAX_NODES = 40  # that are shown over time
MAX_QUARANTINE_FILES = 64  # that are read, evenly over the shards
_NUM_TIME_STEPS = 120
_NUM_SIZE_STEPS = 24
_MIN_GAP_S = 60.0
_MIN_GAP_SHARE = 0.05  # of the time in which shards were made: a longer pause is no part of the time axis
_MAX_EXAMPLES = 100
_MAX_RECORDS = 200
_MAPPINGS = ("quarantined", "sources", "texts", "validation", "versions")
_NO_TEXT: Mapping[str, Any] = {"num_bytes": 0, "num_chars": 0, "lengths": {}}
_NUM_THREADS = 8  # opening a file on Lustre is a wait for its server
_MAX_TIME_S = 253_402_300_799  # the end of the year 9999: a date can be written
_URL_USER = re.compile(r"(?<=://)[^/\s@]+@")
_URL_SECRET = re.compile(r"(?i)([?&][\w-]*(?:token|key|secret|password|signature|credential)[\w-]*=)[^&\s#]+")


def report(args: argparse.Namespace) -> int:
    """``report DATA``; an unfinished data set has one, too."""
    if not 0 <= args.num_examples <= _MAX_EXAMPLES:
        raise UsageError(f"--num_examples is {args.num_examples}, expected 0 to {_MAX_EXAMPLES}")
    folder = args.output_dir.absolute()
    plan = need_plan(folder)
    wrong = read_findings(folder, plan.plan_id)
    made = [each for each in manifest_ids(folder) if each < plan.num_shards and each not in wrong]
    with Progress("reading manifests", len(made), unit="manifests") as progress:
        sums = sum_manifests(folder, plan.plan_id, made, progress.add)
    data = report_data(folder, plan, sums, wrong, num_examples=args.num_examples)
    if args.json:
        lines = [json.dumps(data)]
    else:
        from slurm.report.rendering import page_lines  # jinja2: JSON needs none

        lines = page_lines(data)
    output = args.output
    if output is None and args.json:
        print_lines(*lines)
        return 0
    output = output or Path("report.html")
    publish_bytes(output, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
    say(f"wrote {output}")
    return 0


@dataclass(kw_only=True)
class ManifestSums:
    """The manifests of one plan, added up."""

    made: list[ShardMaking] = field(default_factory=list)
    tar_bytes: list[int] = field(default_factory=list)  # of each shard in ``made``
    with_left_out: list[int] = field(default_factory=list)  # shards that left documents out
    # The fields of ShardCounts, idx_bytes, texts, versions, num_restarted.
    totals: dict[str, Any] = field(
        default_factory=lambda: defaultdict[str, Any](
            int, {name: {} for name in _MAPPINGS}, length_histogram=[]
        )
    )
    other_plan: list[int] = field(default_factory=list)
    not_read: list[int] = field(default_factory=list)  # gone meanwhile, or broken: ``verify`` says more


def sum_manifests(
    folder: Path, plan_id: str, shard_ids: Sequence[int], progress: Callable[[int], object]
) -> ManifestSums:
    """Read the manifests of these shards, eight at a time, and add them up.

    A manifest that is broken, gone or of another plan is named in the sums and counted in no number.
    """
    sums = ManifestSums()
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        manifests = pool.map(functools.partial(_read_manifest, folder), shard_ids)
        for shard_id, manifest in zip(shard_ids, manifests, strict=True):
            progress(1)
            if manifest is None:
                sums.not_read.append(shard_id)
                continue
            making, tar_bytes, numbers = manifest
            if making.plan_id != plan_id:
                sums.other_plan.append(shard_id)
                continue
            sums.made.append(making)
            sums.tar_bytes.append(tar_bytes)
            sums.with_left_out += [shard_id] if numbers["quarantined"] else []
            _add(sums.totals, numbers)
    return sums


def _read_manifest(folder: Path, shard_id: int) -> tuple[ShardMaking, int, dict[str, Any]] | None:
    """How a shard was made, the bytes of its tar, and what ``totals`` adds up; None where it is not done."""
    try:
        path = manifest_path(folder, shard_id)
        manifest = read_manifest(folder, shard_id)
        check_sizes(folder, manifest, ("tar", "idx"))
        making, texts = ShardMaking.of(manifest, path), manifest.facts_of_run(path).texts
    except (OSError, ShardprepError):
        return None
    run, counts = manifest.run, manifest.counts
    numbers = {
        **vars(counts),
        "validation": {} if counts.validation is None else vars(counts.validation),
        "sources": {name: vars(source) for name, source in counts.sources.items()},
        "texts": {name: vars(text) for name, text in (texts or {}).items()},
        "num_without_texts": int(texts is None),
        "idx_bytes": manifest.idx.num_bytes,
        "versions": {name: {str(run.get(name, "?"))[:80]: 1} for name in ("shardprep", "engine", "python")},
        "num_restarted": int(run["slurm"].get("SLURM_RESTART_COUNT", "") not in ("", "0")),
    }
    return (making, making.tar_bytes, numbers) if making.ended <= _MAX_TIME_S else None


def _add(totals: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    """Add numbers, lists of them and mappings of them to those of the same names."""
    for name, value in numbers.items():
        if isinstance(value, dict):
            _add(totals.setdefault(name, {}), value)
        elif isinstance(value, list):
            pairs = itertools.zip_longest(totals.get(name, ()), value, fillvalue=0)
            totals[name] = [one + other for one, other in pairs]
        else:
            totals[name] = totals.get(name, 0) + value


def report_data(
    folder: Path, plan: Plan, sums: ManifestSums, wrong: Mapping[int, Finding], *, num_examples: int
) -> dict[str, Any]:
    """The whole report. Reads index.json, quarantine files, and what ``_attempts`` reads."""
    totals, made = sums.totals, sums.made
    index: DatasetIndex | None = None
    with contextlib.suppress(ShardprepError):
        found = read_index(folder) if size_of_file(folder / INDEX_NAME) is not None else None
        index = found if found and found.spec.plan_id == plan.plan_id else None
    data = _data(folder, plan, sums, index) | {"verified": index is not None and not wrong}
    has_all = made and not totals["num_without_texts"] and not data["has_index_alone"]
    texts = totals["texts"] if has_all else None
    all_texts: dict[str, Any] = {}
    for each in (texts or {}).values():
        _add(all_texts, each)
    data |= _text_numbers(None if texts is None else all_texts or _NO_TEXT, data["num_tokens"])
    done = {each.shard_id: each for each in made}
    shards = MadeShards(done=done, wrong=wrong, other_plan=[], broken={})
    state = find_state(folder, plan, if_away=lambda _: None, made=shards)
    status = status_of(state)
    sources = totals["sources"]
    if data["has_index_alone"] and index is not None:
        sources = {name: vars(counts) for name, counts in index.sources.items()}
    report = {
        "format": "shardprep-report",
        "version": REPORT_VERSION,
        "folder": str(folder),
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "shardprep": shardprep.__version__,
        "data": data,
        "sources": _sources(sources, texts, _kept(folder, plan, made, num_examples)),
        "lengths": _histogram(totals["length_histogram"], texts),
        "left_out": _left_out(folder, plan, sums, num_examples),
        "shard_sizes": _shard_sizes(sums) if made else {},
        "work": work_over_time(made, status["slow_shards"]) if made else {},
        "use": _use(made) if made else {},
        "attempts": {**_attempts(state, status), "num_restarted_shards": totals["num_restarted"]},
        "again": _again(plan, sums),
    }
    return _without_secrets(report)


def _attempts(state: DatasetState, status: Mapping[str, Any]) -> dict[str, Any]:
    """What was submitted, and what was sent again and why."""
    shards: dict[str, set[int]] = defaultdict(set)
    nodes: dict[str, Counter[str]] = defaultdict(Counter)
    for event in status["history"]:
        for cause, found in event.get("causes", {}).items():
            shards[cause].update(ids_of_ranges(found["shards"]))
            nodes[cause].update(found["nodes"])
    retried = sorted(shards.items(), key=lambda item: (-len(item[1]), item[0]))
    ended = [each for each in state.records.own if each.ended is not None and each.node]
    return {
        "submissions": [_submission(state, submission) for submission in state.submissions],
        "retried": [
            {"cause": cause, "num_shards": len(ids), "shards": id_ranges(ids), "nodes": nodes[cause]}
            for cause, ids in retried
        ],
        "records": _records(state),
        "restarts": status["restarts"],
        "failed": status["causes"],
        "failed_tasks_of_nodes": Counter(each.node for each in ended),
        "slurm_away": status["slurm_away"] if status["has_jobs"] else "",
    }


def _records(state: DatasetState) -> list[dict[str, Any]]:
    """The newest attempts that run, or that left a shard unmade, on Slurm and on this machine."""
    tried = [attempt for shard in state.shards for attempt in shard.attempts]
    running = {id(each.record) for each in tried if each.state in ("running", "not visible")}
    found = []
    for each in [each for each in state.records.own if each.shards][-_MAX_RECORDS:]:
        left = [shard_id for shard_id in each.shards if shard_id not in state.made.done]
        shard_id = next(iter([*each.failures, *left, *each.shards]))
        failure = each.failures.get(shard_id)
        found.append(
            {
                "by": each.started_by,
                "node": each.node,
                "job": f"{each.job_id}_{each.index}" if each.job_id else "",
                "began": each.began,
                "ended": each.ended,
                "shards": id_ranges(each.shards),
                "num_shards": len(each.shards),
                "num_made_by_now": len(each.shards) - len(left),
                "cause": "" if id(each) in running else cause_of(each, state.queue.job_of(each), shard_id),
                "message": failure.reason if failure else "",
            }
        )
    return found


def _submission(state: DatasetState, submission: Submission) -> dict[str, Any]:
    """What it asked for; of its free text (setup, arguments) nothing.

    A retry may ask for other memory and time in each of its arrays: the most of them is told.
    """
    arrays = submission.arrays
    tasks = [shards for array in arrays for shards in array.shards_of_tasks()]
    job_ids = [array.job_id for array in arrays]
    failed = [each for each in state.records.own if each.job_id in job_ids]

    def most(name: str) -> int | None:  # None, which is no limit, where one of them is None
        values = [getattr(array, name) for array in arrays]
        return None if None in values else max(values)

    return {
        "number": submission.number,
        "submitted": submission.submitted,
        "num_tasks": len(tasks),
        "num_shards": sum(map(len, tasks)),
        "job_ids": job_ids,
        "partition": arrays[0].request.partition,
        "cpus_per_task": arrays[0].request.cpus_per_task,
        "mem_mb": most("mem_mb"),
        "time_min": most("time_min"),
        "num_failed_tasks": sum(each.ended is not None for each in failed),
    }


def _data(folder: Path, plan: Plan, sums: ManifestSums, index: DatasetIndex | None) -> dict[str, Any]:
    totals = sums.totals
    made = {each.shard_id for each in sums.made}
    missing = set(range(plan.num_shards)) - made
    names = set(names_in(folder))
    unmade = {n for n in missing if f"{shard_name(n)}.json" not in names}
    without_manifest = [n for n in unmade if {f"{shard_name(n)}.tar", f"{shard_name(n)}.idx"} <= names]
    counts = {item.name: totals[item.name] for item in dataclasses.fields(ShardCounts)}
    fraction, ends = plan.options.validation_fraction, None
    with contextlib.suppress(ShardprepError):
        ends = document_ends(plan, folder / TOKENIZER_DIR)
    return {
        "plan_id": plan.plan_id,
        "num_shards": plan.num_shards,
        "num_done": len(made),
        "done": id_ranges(made),
        "missing": id_ranges(missing),
        "not_read": id_ranges(sums.not_read),
        "other_plan": id_ranges(sums.other_plan),
        "without_manifest": id_ranges(without_manifest),
        "index": None if index is None else {name: int(index.column(name).sum()) for name in COLUMNS},
        "has_index_alone": index is not None and 0 < len(without_manifest) == len(missing),
        "record": plan.options.record,
        "token_format": plan.options.token_format,
        "seq_len": plan.options.seq_len,
        "pack": plan.options.pack if plan.spec.has_rows else None,
        "tokenizer": dataclasses.asdict(plan.tokenizer),
        "document_ends": None if ends is None else {"begin": ends[0], "end": ends[1]},
        "num_inputs": len(plan.inputs),
        "inputs_left_out": {
            reason: {"num_names": len(names), "names": names} for reason, names in plan.left_out.items()
        },
        "planned_bytes": sum(item.num_bytes for item in plan.inputs),
        "tar_bytes": sum(sums.tar_bytes),
        "idx_bytes": totals["idx_bytes"],
        "num_left_out": sum(totals["quarantined"].values()),
        "validation": {"fraction": fraction, **totals["validation"]} if fraction else None,
        **{name: number for name, number in counts.items() if isinstance(number, int)},
    }


def _ratio(number: float, of: float) -> float | None:
    return round(number / of, 5) if of else None


def _sources(
    sources: Mapping[str, Mapping[str, int]],
    texts: Mapping[str, Mapping[str, Any]] | None,
    examples: Mapping[str, Sequence[Excerpt]],
) -> list[dict[str, Any]]:
    ordered = sorted(sources.items(), key=lambda item: (-item[1]["num_tokens"], item[0]))
    num_tokens = sum(counts["num_tokens"] for counts in sources.values())
    return [
        {
            "name": name,
            **counts,
            "token_share": _ratio(counts["num_tokens"], num_tokens),
            **_text_numbers(None if texts is None else texts.get(name, _NO_TEXT), counts["num_tokens"]),
            "examples": [each._asdict() for each in examples.get(name, ())],
        }
        for name, counts in ordered
    ]


def _kept(
    folder: Path, plan: Plan, made: Sequence[ShardMaking], num_examples: int
) -> dict[str, list[Excerpt]]:
    """The beginnings of some documents of each source, decoded, of the first shard that has any.

    A shard does not keep the label of a document: one of --source_field is known where it is the only one.
    """
    of_source: dict[str, int] = {}
    for each in made if num_examples else ():
        for name, counts in each.sources.items():
            if counts.num_documents and (not plan.options.source_field or len(each.sources) == 1):
                of_source.setdefault(name, each.shard_id)
    found: dict[str, list[Excerpt]] = {}
    if not of_source:
        return found
    with contextlib.suppress(ShardprepError):
        decoder = Decoder(folder)
        for name, shard_id in sorted(of_source.items())[:_MAX_EXAMPLES]:
            numbers = plan.shard(shard_id).input_numbers
            if not plan.options.source_field:
                numbers = [number for number in numbers if plan.source_of(number) == name]
            with contextlib.suppress(ShardprepError):
                found[name] = excerpts(
                    folder, plan, shard_id, numbers, decoder, num=num_examples, chars=EXCERPT_CHARS
                )
    return found


def _text_numbers(text: Mapping[str, Any] | None, num_tokens: int) -> dict[str, Any]:
    """What the report says of texts; None for each where a shard did not count them."""
    known = text or _NO_TEXT
    lengths = _lengths([known])
    num_documents = sum(documents for documents, _ in lengths.values())
    numbers: dict[str, Any] = {
        "num_text_bytes": known["num_bytes"],
        "num_chars": known["num_chars"],
        "bytes_per_token": _ratio(known["num_bytes"], num_tokens),
        "chars_per_token": _ratio(known["num_chars"], num_tokens),
        "tokens_per_document": _ratio(num_tokens, num_documents),
        **{f"length_p{share}": _percentile(lengths, share / 100 * num_documents) for share in (50, 90, 99)},
    }
    return dict.fromkeys(numbers) if text is None else numbers


def _histogram(
    num_documents: Sequence[int], texts: Mapping[str, Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Documents, and the tokens in them, by the binary digits of their lengths."""
    num_tokens = Counter[int]()
    for low, (_, tokens) in _lengths((texts or {}).values()).items():
        num_tokens[low.bit_length()] += tokens
    return [
        {
            "from": 2**b // 2,
            "to": 2**b,
            "num_documents": number,
            "num_tokens": None if texts is None else num_tokens[b],
        }
        for b, number in enumerate(num_documents)
    ]


def _lengths(texts: Iterable[Mapping[str, Any]]) -> dict[int, list[int]]:
    """Documents and tokens by length, ascending, as TextCounts rounds it."""
    sums: dict[str, list[int]] = {}
    for text in texts:
        _add(sums, text["lengths"])
    return {low: sums[str(low)] for low in sorted(map(int, sums))}


def _percentile(lengths: Mapping[int, Sequence[int]], number: float) -> int | None:
    """The length that so many documents do not exceed: of those that are counted together, the longest."""
    for low, below in zip(lengths, itertools.accumulate(of[0] for of in lengths.values()), strict=True):
        if below >= number:
            return longest_of(low)
    return None


def _left_out(folder: Path, plan: Plan, sums: ManifestSums, num_examples: int) -> list[dict[str, Any]]:
    """Documents left out by reason, the most frequent first, and some examples.

    The manifests count them; their bytes stand in the quarantine files. Where not all of these are read, the
    bytes of the others are estimated by theirs.
    """
    step = max(1, -(-len(sums.with_left_out) // MAX_QUARANTINE_FILES))
    numbers: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    examples: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for shard_id in sums.with_left_out[::step]:
        for reason, entry in quarantined(folder, shard_id):
            numbers[reason] += 1
            sizes[reason] += entry["num_bytes"] or 0
            if len(examples[reason]) < num_examples:
                examples[reason].append(entry)
    return [
        {
            "reason": reason,
            "num_documents": number,
            "num_bytes": round(sizes[reason] * number / numbers[reason]) if sizes[reason] else None,
            "num_bytes_is_estimate": numbers[reason] != number,
            "examples": [{**entry, "text": excerpt_of(plan, entry)} for entry in examples[reason]],
        }
        for reason, number in sorted(sums.totals["quarantined"].items(), key=lambda item: (-item[1], item[0]))
    ]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def _shard_sizes(sums: ManifestSums) -> dict[str, Any]:
    num_steps = min(_NUM_SIZE_STEPS, len(set(sums.tar_bytes)))
    numbers, edges = np.histogram(sums.tar_bytes, bins=num_steps)
    steps = zip(edges[:-1].tolist(), edges[1:].tolist(), numbers.tolist(), strict=True)
    return {
        "tar_bytes": spread(sums.tar_bytes),
        "num_tokens": spread([each.num_tokens for each in sums.made]),
        "histogram": [
            {"from": round(low), "to": round(high), "num_shards": number} for low, high, number in steps
        ],
    }


def work_over_time(made: Sequence[ShardMaking], slow_shards: list[dict[str, Any]]) -> dict[str, Any]:
    """When and where shards were made, in 120 steps of time and on at most 40 nodes.

    The time axis has no room for long pauses in which no shard was made, as between a job and its retry.
    """
    began = np.array([each.began for each in made], np.float64)
    ended = np.array([each.ended for each in made], np.float64)
    wall_s = np.array([each.wall_s for each in made], np.float64)
    num_tokens = np.array([each.num_tokens for each in made], np.float64)
    num_bytes = np.array([each.input_bytes for each in made], np.float64)

    order = np.argsort(began, kind="stable")
    first, last = began[order], np.maximum.accumulate(ended[order])
    pauses = first[1:] - last[:-1]
    worked_s = float(last[-1] - first[0] - pauses[pauses > 0].sum())
    is_gap = pauses > max(_MIN_GAP_S, _MIN_GAP_SHARE * worked_s)
    first, last = np.append(first[:1], first[1:][is_gap]), np.append(last[:-1][is_gap], last[-1:])
    edges = np.append(0.0, np.cumsum(last - first))  # seconds of work before each stretch of it
    axis_s = max(float(edges[-1]), 1e-3)
    step_s = axis_s / _NUM_TIME_STEPS
    at = np.stack([first, last], axis=1).ravel(), np.stack([edges[:-1], edges[1:]], axis=1).ravel()
    starts, ends = np.interp(began, *at), np.interp(ended, *at)

    def time_at(share: float) -> int:
        stretch = int(np.searchsorted(edges[1:-1], share * axis_s, side="right"))
        return round(float(first[stretch] + share * axis_s - edges[stretch]))

    names, node_of = np.unique([each.node for each in made], return_inverse=True)
    tokens_per_s = num_tokens / np.maximum(wall_s, 1e-3)
    begins_in = np.minimum((starts / step_s).astype(np.int64), _NUM_TIME_STEPS - 1)
    steps, busy = [], []
    for number in range(_NUM_TIME_STEPS):
        low, high = number * step_s, (number + 1) * step_s
        shares = np.maximum(np.minimum(ends, high) - np.maximum(starts, low), 0) / step_s
        own = wall_s[begins_in == number].tolist()
        steps.append(
            {
                "time": time_at(number / _NUM_TIME_STEPS),
                "tokens_per_s": round(float(shares @ tokens_per_s)),
                "num_shards": round(float(shares.sum()), 2),
                "shard_s": spread(own) if own else None,
            }
        )
        busy.append(np.bincount(node_of, shares, len(names)))
    return {
        "began": round(float(began.min()), 3),
        "ended": round(float(ended.max()), 3),
        "worked_s": round(axis_s, 3),
        "tokens_per_s": round(float(num_tokens.sum()) / axis_s),
        "bytes_per_s": round(float(num_bytes.sum()) / axis_s),
        "shard_s": spread(wall_s.tolist()),
        "gaps": [
            {"at": round(float(edge) / axis_s, 5), "left_out_s": round(float(left_out_s), 1)}
            for edge, left_out_s in zip(edges[1:-1], pauses[is_gap], strict=True)
        ],
        "ticks": [{"at": share, "time": time_at(share)} for share in (0, 0.25, 0.5, 0.75, 1)],
        "step_s": round(step_s, 6),
        "steps": steps,
        "num_nodes": len(names),
        "nodes": _nodes(names.tolist(), made, np.stack(busy, axis=1).round(2).tolist()),
        "slow_shards": slow_shards,
    }


def _nodes(names: list[str], made: Sequence[ShardMaking], busy: list[list[float]]) -> list[dict[str, Any]]:
    """What each node made, by name; where there are too many nodes the slowest ones, slowest first."""
    of_node: dict[str, list[ShardMaking]] = {name: [] for name in names}
    for each in made:
        of_node[each.node].append(each)
    nodes = [
        {
            "node": name,
            "num_shards": len(own),
            "num_tokens": sum(each.num_tokens for each in own),
            "bytes_per_s": round(statistics.median(each.bytes_per_s for each in own)),
            "busy": steps,
        }
        for (name, own), steps in zip(of_node.items(), busy, strict=True)
    ]
    if len(nodes) <= MAX_NODES:
        return nodes
    return sorted(nodes, key=lambda node: (node["bytes_per_s"], node["node"]))[:MAX_NODES]


def _use(made: Sequence[ShardMaking]) -> dict[str, Any]:
    return {
        "cpu_s": round(sum(each.cpu_s for each in made), 1),
        "had_cpu_s": round(sum(each.wall_s * each.num_cpus for each in made), 1),
        "max_rss_bytes": max(each.max_rss_bytes for each in made),
        "num_cpus": spread([each.num_cpus for each in made]),
    }


def _again(plan: Plan, sums: ManifestSums) -> dict[str, Any]:
    """The commands that make the same data set, and the versions that made this one."""
    command = ["shardprep", "plan", "--input_dir", str(plan.input_dir), "--output_dir", "NEW"]
    command += ["--model_id", plan.tokenizer.model_id]
    if not is_one_file_a_shard(plan):
        command += ["--num_shards", str(plan.num_shards)]
    command += flags_of(plan.options)
    if plan.max_bad_fraction != PrepConfig().max_bad_fraction:
        command += ["--max_bad_fraction", str(plan.max_bad_fraction)]
    if plan.has_input_hashes:
        command.append("--hash_inputs")
    return {
        "commands": [shlex.join(command), "shardprep run NEW", "shardprep verify NEW"],
        "plan_id": plan.plan_id,
        "input_dir": str(plan.input_dir),
        "tokenizer_sha256": plan.tokenizer.fingerprint,
        "text_versions": plan.options.text_versions,
        "versions": {name: dict(sorted(found.items())) for name, found in sums.totals["versions"].items()},
    }


def _without_secrets(value: Any) -> Any:
    """The same without user names, passwords and keys in URLs, wherever they stand."""
    if isinstance(value, dict):
        return {_without_secrets(key): _without_secrets(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    if isinstance(value, str):
        return _URL_SECRET.sub(r"\1***", _URL_USER.sub("***@", value))
    return value
