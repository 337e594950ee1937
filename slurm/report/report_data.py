"""Everything that the report says, as plain data: what ``--json`` prints, and page and text show.

docs/report_json.md describes it.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import shardprep
from preprocess.options import PrepConfig, flags_of
from preprocess.plan import Plan, is_one_file_a_shard
from shardprep.errors import ShardprepError
from shardprep.format.index import COLUMNS, DatasetIndex
from shardprep.format.names import id_ranges
from shardprep.format.osts import read_osts
from shardprep.format.source_counts import SourceCounts, sum_of_sources
from slurm.dataset_state import DatasetState
from slurm.report.attempts import attempts_of, no_attempts
from slurm.report.left_out import left_out
from slurm.report.shard_sums import ShardSums
from slurm.report.work_times import spread, work_times
from slurm.status_report import report as status_of

REPORT_VERSION = 1  # it grows where a field goes or changes its meaning, not where one is added
_NUM_NAMES = 10  # of names that are no input, for each reason
_NUM_SIZES = 24  # steps of the histogram of sizes
_USER_INFO = re.compile(r"(?<=://)[^/\s@]+@")
_SECRET_WORD = re.compile(
    r"(?i)([?&][\w-]*(?:token|key|secret|password|signature|credential)[\w-]*=)[^&\s#]+"
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was read of a data set before the report is put together."""

    folder: Path
    plan: Plan
    sums: ShardSums
    state: DatasetState | None  # None where nothing was ever submitted
    index: DatasetIndex | None  # index.json, where it is there, whole, and of this plan
    without_manifest: Sequence[int]  # shards whose tar and idx are there, and nothing else

    @property
    def has_index_alone(self) -> bool:
        """Whether nothing is missing but manifests, and index.json says what all shards hold."""
        return self.index is not None and 0 < len(self.without_manifest) == (
            self.plan.num_shards - len(self.sums.made)
        )

    num_examples: int


def report_data(found: Found) -> dict[str, Any]:
    """The report as plain data. Reads quarantine files, osts.json and logs of tasks; nothing else."""
    sums, plan = found.sums, found.plan
    status = None if found.state is None else status_of(found.state, sums.made)
    with_bad = [each.shard_id for each, bad in zip(sums.made, sums.num_left_out, strict=True) if bad]
    data = {
        "format": "shardprep-report",
        "version": REPORT_VERSION,
        "folder": str(found.folder),
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "shardprep": shardprep.__version__,
        "data": _data(found),
        "sources": _sources(found),
        "lengths": [
            {"from": 0 if b == 0 else 2 ** (b - 1), "to": 2**b, "num_documents": number}
            for b, number in enumerate(sums.histogram)
        ],
        "left_out": left_out(found.folder, plan, sums.quarantined, with_bad, found.num_examples),
        "shard_sizes": _shard_sizes(sums),
        "work": work_times(sums.made),
        "use": _use(sums, status),
        "osts": _osts(found),
        "attempts": {
            **(attempts_of(found.state, sums.made, status) if found.state and status else no_attempts()),
            "num_restarted_shards": sums.num_restarted,
        },
        "again": _again(plan, sums),
    }
    return _without_secrets(data)


def _data(found: Found) -> dict[str, Any]:
    """What the data set is, and its sums."""
    plan, sums = found.plan, found.sums
    numbers = {
        item: sums.numbers[item]
        for item in (
            "num_samples", "num_documents", "num_tokens", "num_lines", "num_empty_lines", "num_filtered",
            "num_pad_tokens", "num_documents_across_rows", "input_bytes",
        )
    }  # fmt: skip
    return {
        "plan_id": plan.plan_id,
        "num_shards": plan.num_shards,
        "num_done": len(sums.made),
        "done": id_ranges(each.shard_id for each in sums.made),
        "missing": id_ranges(set(range(plan.num_shards)) - {each.shard_id for each in sums.made}),
        "not_read": id_ranges(sums.not_read),
        "other_plan": id_ranges(sums.other_plan),
        "without_manifest": id_ranges(found.without_manifest),
        "verified": found.index is not None,
        "index": None if found.index is None else _sums_of_index(found.index),
        "has_index_alone": found.has_index_alone,
        "record": plan.options.record,
        "token_format": plan.options.token_format,
        "seq_len": plan.options.seq_len,
        "pack": plan.options.pack if plan.spec.has_rows else None,
        "tokenizer": dataclasses.asdict(plan.tokenizer),
        "num_inputs": len(plan.inputs),
        "inputs_left_out": {
            reason: {"num_names": len(names), "names": names[:_NUM_NAMES]}
            for reason, names in plan.left_out.items()
        },
        "planned_bytes": sum(item.num_bytes for item in plan.inputs),
        "tar_bytes": sum(sums.tar_bytes),
        "idx_bytes": sums.idx_bytes,
        "num_left_out": sums.quarantined.total(),
        **numbers,
        "tokens_per_byte": _ratio(numbers["num_tokens"], numbers["input_bytes"]),
    }


def _ratio(number: float, of: float) -> float | None:
    return round(number / of, 5) if of else None


def _sums_of_index(index: DatasetIndex) -> dict[str, int]:
    """What index.json says of all shards together."""
    return {name: int(index.column(name).sum()) for name in COLUMNS}


def _sources(found: Found) -> list[dict[str, Any]]:
    """Those with the most tokens first; by index.json, where only manifests are missing."""
    if found.has_index_alone and found.index is not None:
        sources: Mapping[str, SourceCounts] = found.index.sources
    else:
        sources = sum_of_sources(each.sources for each in found.sums.made)
    ordered = sorted(sources.items(), key=lambda item: (-item[1].num_tokens, item[0]))
    return [
        {
            "name": name,
            **dataclasses.asdict(counts),
            "tokens_per_byte": _ratio(counts.num_tokens, counts.num_bytes),
        }
        for name, counts in ordered
    ]


def _shard_sizes(sums: ShardSums) -> dict[str, Any]:
    """How large tars are, in even steps, and how many tokens a shard has; empty where none is done."""
    if not sums.made:
        return {}
    numbers, edges = np.histogram(sums.tar_bytes, bins=min(_NUM_SIZES, max(1, len(set(sums.tar_bytes)))))
    return {
        "tar_bytes": spread(sums.tar_bytes),
        "num_tokens": spread([each.num_tokens for each in sums.made]),
        "histogram": [
            {"from": round(low), "to": round(high), "num_shards": number}
            for low, high, number in zip(
                edges[:-1].tolist(), edges[1:].tolist(), numbers.tolist(), strict=True
            )
        ],
    }


def _use(sums: ShardSums, status: Mapping[str, Any] | None) -> dict[str, Any]:
    """What making took; where it was submitted, against what the newest submission asked for."""
    made = sums.made
    if not made:
        return {}
    had_s = sum(each.wall_s * each.num_cpus for each in made)
    alone = {"efficiency": {}, "core_hours": {"used": round(had_s / 3600, 4), "failed": None}}
    of_slurm = status or alone
    return {
        "cpu_s": round(sum(each.cpu_s for each in made), 1),
        "had_cpu_s": round(had_s, 1),
        "max_rss_bytes": max(each.max_rss_bytes for each in made),
        "num_cpus": spread([each.num_cpus for each in made]),
        "core_hours": of_slurm["core_hours"],
        "newest_submission": of_slurm["efficiency"],
    }


def _osts(found: Found) -> list[dict[str, Any]] | None:
    """Shards and bytes by the OST on which each tar begins; None where osts.json says nothing."""
    try:
        osts = read_osts(found.folder, found.plan.num_shards)
    except ShardprepError:
        return None
    if osts is None or (osts < 0).all():
        return None
    sums: dict[int, list[int]] = {}
    for each, num_bytes in zip(found.sums.made, found.sums.tar_bytes, strict=True):
        own = sums.setdefault(int(osts[each.shard_id]), [0, 0])
        own[0] += 1
        own[1] += num_bytes
    return [
        {"ost": ost if ost >= 0 else None, "num_shards": number, "num_bytes": num_bytes}
        for ost, (number, num_bytes) in sorted(sums.items())
    ]


def _again(plan: Plan, sums: ShardSums) -> dict[str, Any]:
    """The commands that make the same data set, and the versions that made this one."""
    return {
        "commands": [
            shlex.join(["python", "-m", "preprocess", "plan", *plan_flags(plan)]),
            "python -m preprocess run NEW",
            "python -m preprocess verify NEW",
        ],
        "plan_id": plan.plan_id,
        "input_dir": str(plan.input_dir),
        "tokenizer_sha256": plan.tokenizer.fingerprint,
        "text_versions": plan.options.text_versions,
        "versions": {name: dict(sorted(found.items())) for name, found in sums.versions.items()},
    }


def plan_flags(plan: Plan) -> list[str]:
    """The flags by which ``plan`` makes this plan again, into the folder NEW."""
    options = plan.options
    flags = ["--input_dir", str(plan.input_dir), "--output_dir", "NEW", "--model_id", plan.tokenizer.model_id]
    if not is_one_file_a_shard(plan):
        flags += ["--num_shards", str(plan.num_shards)]
    usual = {**vars(PrepConfig(record=options.record)), "record": PrepConfig().record, "seq_len": None}
    for name, value in {**flags_of(options), "max_bad_fraction": plan.max_bad_fraction}.items():
        if value is None or value == usual[name]:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", str(value)]
    return [*flags, "--hash_inputs"] if plan.shard_sha256 is not None else flags


def _without_secrets(value: Any) -> Any:
    """The same without user names, passwords and keys in URLs, wherever they stand."""
    if isinstance(value, dict):
        return {_without_secrets(key): _without_secrets(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    if isinstance(value, str):
        return _SECRET_WORD.sub(r"\1***", _USER_INFO.sub("***@", value))
    return value
