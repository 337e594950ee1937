"""``report DATA``: what a data set contains, how it was made, and how to make it again.

Reads every manifest and no shard: 10,000 take some 5 s of CPU.
"""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import itertools
import json
import math
import os
import re
import shlex
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import shardprep
from shardprep import console
from shardprep.console import print_lines, say
from shardprep.files import publish_bytes
from shardprep.folders import refuse_foreign_file
from shardprep.format.data_folder import DataFolder
from shardprep.format.manifest import Manifest, ShardCounts, TextCounts, longest_of
from shardprep.format.names import TOKENIZER_DIR, id_ranges
from shardprep.format.plan import Plan, is_one_file_a_shard, need_plan
from shardprep.format.plan_options import PrepConfig, flags_of
from shardprep.processes import python_command
from slurm.state import DatasetState, find_state
from slurm.status_data import status_data

_REPORT_BEGINS = re.compile(rb".{,200}shardprep-report", re.DOTALL)  # a page, or JSON
_SHARD_NUMBERS = (
    "num_done",
    "num_running",
    "num_pending",
    "num_failed",
    "num_not_submitted",
    "num_not_visible",
)
REPORT_VERSION = 4  # increased when a field is removed or changes its meaning
_MAPPINGS = {"quarantined", "length_histogram", "sources", "validation"}
_NUMBERS = [item.name for item in dataclasses.fields(ShardCounts) if item.name not in _MAPPINGS]
_OPTIONS = ("record", "token_format", "seq_len", "validation_fraction")
_URL_USER = re.compile(r"(?<=://)[^/\s@]+@")
_URL_SECRET = re.compile(r"(?i)([?&][\w-]*(?:token|key|secret|password|signature|credential)[\w-]*=)[^&\s#]+")


def report(folder: Path, output: Path | None, *, is_json: bool) -> int:
    """Write the report of a data set, finished or not: ``report DATA``."""
    folder = folder.absolute()
    plan, manifests = need_plan(DataFolder(folder)), dict[int, Manifest]()
    progress = console.Progress("reading manifests", plan.num_shards, unit="shards")

    def keep(manifest: Manifest) -> None:
        progress.add(manifest.shard_id not in manifests)  # find_state may read a manifest twice
        manifests[manifest.shard_id] = manifest

    state = find_state(folder, plan, needs_slurm=False, see=keep)
    progress.add(plan.num_shards - len(manifests))
    data = _without_secrets(report_data(state, [manifests[shard_id] for shard_id in state.made.done]))
    lines = [json.dumps(data)] if is_json else page_lines(data)
    if is_json and output is None:
        print_lines(*lines)
        return 0
    output = output or Path("report.html")
    refuse_foreign_file(output, _REPORT_BEGINS)
    publish_bytes(output, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
    say(f"wrote {output}")
    return 0


def report_data(state: DatasetState, manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return everything that the report contains as plain data, described in docs/json.md."""
    plan, folder = state.plan, state.folder
    status = status_data(state)
    counts = [each.counts for each in manifests]
    left_out: dict[str, list[str]] = defaultdict(list)
    for reason, name in plan.left_out:
        left_out[reason].append(name)
    quarantined = sum((Counter(each.quarantined) for each in counts), Counter[str]())
    return {
        "format": "shardprep-report",
        "version": REPORT_VERSION,
        "folder": str(folder),
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "shardprep": shardprep.__version__,
        "plan": {
            "plan_id": plan.plan_id,
            "num_shards": plan.num_shards,
            "input_dir": str(plan.input_dir),
            "num_inputs": len(plan.inputs),
            "input_bytes": sum(item.num_bytes for item in plan.inputs),
            "inputs_left_out": left_out,
            **{name: getattr(plan.options, name) for name in _OPTIONS},
            "pack": plan.options.pack if plan.spec.has_rows else None,
            "tokenizer": dataclasses.asdict(plan.tokenizer),
        },
        "shards": {
            "verified": state.is_verified,
            **{name: status[name] for name in ("done", "running", "pending", "not_submitted", "not_visible")},
            **{name: status[name] for name in ("wrong", "broken", "other_plan")},
            **{name: status[name] for name in _SHARD_NUMBERS},
            "failed": status["causes"],
            "remedies": status["remedies"],
            "missing": id_ranges(set(range(plan.num_shards)) - state.made.done.keys()),
        },
        "counts": {name: sum(getattr(each, name) for each in counts) for name in _NUMBERS},
        "validation": _sums([each.validation for each in counts if each.validation]),
        "tar_bytes": sum(each.tar.num_bytes for each in manifests),
        "idx_bytes": sum(each.idx.num_bytes for each in manifests),
        "sources": _sources(manifests),
        "left_out": dict(quarantined.most_common()),
        "per_shard": _per_shard(state, manifests),
        "work": _work(state),
        "slurm_away": status["slurm_away"] if status["has_jobs"] else "",
        "again": _how_to_repeat(folder, plan, manifests),
    }


def _sums(counts: Iterable[Any]) -> dict[str, int]:
    """Add up several counts, field by field."""
    found: Counter[str] = Counter()
    for each in counts:
        values = ((item.name, getattr(each, item.name)) for item in dataclasses.fields(each))
        found.update({name: value for name, value in values if isinstance(value, int)})
    return dict(found)


def _sources(manifests: Sequence[Manifest]) -> list[dict[str, Any]]:
    """Return the counts of each source, most tokens first. If there are several, their sum comes first."""
    counts, texts = defaultdict[str, list[Any]](list), defaultdict[str, list[TextCounts]](list)
    for manifest in manifests:
        of_shard = manifest.run.texts or {}
        for name, each in manifest.counts.sources.items():
            for key in ("all", f" {name}"):  # no source's name begins with a blank
                counts[key].append(each)
                texts[key] += [of_shard[name]] if name in of_shard else []
    sources = []
    listed = ["all"] if len(counts) == 2 else list(counts)  # the sum over one source is the source itself
    for name in listed:
        sums = _sums(counts[name])
        text = _text_statistics(texts[name], sums["num_tokens"])
        sources.append({"name": name.strip(), "is_all": name == "all", **sums, **text})
    return sorted(sources, key=lambda each: (not each["is_all"], -each["num_tokens"], each["name"]))


def _text_statistics(texts: Sequence[TextCounts], num_tokens: int) -> dict[str, Any]:
    """Return the size of texts in UTF-8, and percentiles of document lengths, up to 12 % too high."""
    num_bytes = sum(each.num_bytes for each in texts)
    of_length: Counter[int] = Counter()
    for each in texts:
        of_length.update({int(low): documents for low, (documents, _) in each.lengths.items()})
    bytes_per_token = round(num_bytes / num_tokens, 3) if num_tokens else None
    numbers: dict[str, Any] = {"text_bytes": num_bytes, "bytes_per_token": bytes_per_token}
    lows = sorted(of_length)
    num_up_to = list(itertools.accumulate(of_length[low] for low in lows))
    for share in (50, 90, 99):
        place = bisect.bisect_left(num_up_to, share / 100 * sum(of_length.values()))
        numbers[f"length_p{share}"] = longest_of(lows[place]) if lows else None
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


def write_chat_template() -> None:
    """Write the chat template of the data set that the first argument names to NEW.jinja."""
    Path("NEW.jinja").write_text(need_plan(DataFolder(Path(sys.argv[1]))).options.chat_template, "utf-8")


def _how_to_repeat(folder: Path, plan: Plan, manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return the commands that make the same data set again, and the versions that made this one.

    The commands use the tokenizer and the chat template that are stored in the data set.
    """
    command = ["shardprep", "plan", "--input_dir", os.path.abspath(plan.input_dir), "--output_dir", "NEW"]  # noqa: PTH100
    command += ["--model_id", str(folder / TOKENIZER_DIR)]
    if not is_one_file_a_shard(plan):
        command += ["--num_shards", str(plan.num_shards)]
    command += flags_of(plan.options)
    if plan.max_bad_fraction != PrepConfig().max_bad_fraction:
        command += ["--max_bad_fraction", str(plan.max_bad_fraction)]
    command += ["--hash_inputs"] if plan.cuts[0].sha256 else []
    commands = []
    if plan.options.chat_template:
        commands.append(shlex.join(python_command("slurm.report:write_chat_template", str(folder))))
        command += ["--chat_template_file", "NEW.jinja"]
    commands += [shlex.join(command), "shardprep run NEW", "shardprep verify NEW"]
    versions: dict[str, Counter[str]] = {}
    for manifest in manifests:
        for name in ("shardprep", "engine", "python"):
            versions.setdefault(name, Counter())[getattr(manifest.run, name)[:80] or "?"] += 1
        for name, version in manifest.run.libraries.items():  # of --transform
            versions.setdefault(name[:80], Counter())[version[:80] or "?"] += 1
    return {
        "commands": commands,
        "transform_sha256": plan.options.transform_sha256,
        "versions": {name: dict(sorted(found.items())) for name, found in versions.items()},
    }


def _without_secrets(value: Any) -> Any:
    """Replace user names, passwords and keys in all URLs by ``***``."""
    if isinstance(value, dict):
        return {_without_secrets(key): _without_secrets(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    if isinstance(value, str):
        return _URL_SECRET.sub(r"\1***", _URL_USER.sub("***@", value))
    return value


def page_lines(data: Mapping[str, Any]) -> list[str]:
    """Render report.html.j2 into lines."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not needed for --json

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            console.printable(value) if type(value) is str else "-" if value is None else value
        ),
    )
    templates.filters.update(
        num="{:,}".format,
        short=console.short_number,
        bytes=console.short_bytes,
        time=console.short_time,
        clock=lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)),
        percent="{:.2%}".format,
        quoted=shlex.quote,
        ids=_short_ids,
        log_share=_log_share,
    )
    return templates.get_template("report.html.j2").render(data).strip().split("\n")


def _short_ids(ids: str) -> str:
    """Format ids such as ``0-2,5`` for the page: ``0-2, 5``, with long lists cut."""
    shown = ids if len(ids) <= 150 else ids[: ids.rindex(",", 0, 150)] + ",..."
    return shown.replace(",", ", ")


def _log_share(value: float, longest: float) -> str:
    """Return where a length stands on a logarithmic scale from 1 to ``longest``, in percent."""
    return f"{100 * math.log(max(value, 1)) / math.log(max(longest, 2)):.2f}"
