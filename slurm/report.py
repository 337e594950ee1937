"""``report``: what a data set holds, how it was made and how to make it again: a page, or JSON.

Every manifest is read, and no shard: 10,000 take some 5 s of CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import shardprep
from shardprep.console import (
    Progress,
    print_lines,
    printable,
    say,
    short_bytes,
    short_number,
    short_time,
)
from shardprep.files import publish_bytes
from shardprep.format.manifest import (
    Manifest,
    ShardCounts,
    ShardMaking,
    TextCounts,
    longest_of,
)
from shardprep.format.names import TOKENIZER_DIR, id_ranges, manifest_path
from shardprep.format.options import PrepConfig, flags_of
from shardprep.format.plan import Plan, is_one_file_a_shard, need_plan
from slurm.state import DatasetState, find_state
from slurm.status import status_data

REPORT_VERSION = 4  # it grows where a field goes or changes its meaning
_MAPPINGS = {"quarantined", "length_histogram", "sources", "validation"}
_NUMBERS = [item.name for item in dataclasses.fields(ShardCounts) if item.name not in _MAPPINGS]
_URL_USER = re.compile(r"(?<=://)[^/\s@]+@")
_URL_SECRET = re.compile(r"(?i)([?&][\w-]*(?:token|key|secret|password|signature|credential)[\w-]*=)[^&\s#]+")


def report(args: argparse.Namespace) -> int:
    """Write the report of a data set, finished or not: ``report DATA``."""
    folder = args.output_dir.absolute()
    plan, manifests = need_plan(folder), dict[int, Manifest]()
    progress = Progress("reading manifests", plan.num_shards, unit="shards")

    def keep(manifest: Manifest) -> None:
        progress.add(manifest.shard_id not in manifests)  # find_state may look a second time
        manifests[manifest.shard_id] = manifest

    state = find_state(folder, plan, needs_slurm=False, see=keep)
    progress.add(plan.num_shards - len(manifests))
    data = _without_secrets(report_data(state, [manifests[shard_id] for shard_id in state.made.done]))
    lines = [json.dumps(data)] if args.json else page_lines(data)
    if args.json and args.output is None:
        print_lines(*lines)
        return 0
    output = args.output or Path("report.html")
    publish_bytes(output, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
    say(f"wrote {output}")
    return 0


def report_data(state: DatasetState, manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return everything that the report says, as plain data: docs/report_json.md."""
    plan, folder = state.plan, state.folder
    status = status_data(state)
    made = list(state.made.done.values())
    counts = [each.counts for each in manifests]
    quarantined: Counter[str] = Counter()
    for each in counts:
        quarantined.update(each.quarantined)
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
            "inputs_left_out": plan.left_out,
            "record": plan.options.record,
            "token_format": plan.options.token_format,
            "seq_len": plan.options.seq_len,
            "pack": plan.options.pack if plan.spec.has_rows else None,
            "validation_fraction": plan.options.validation_fraction,
            "tokenizer": dataclasses.asdict(plan.tokenizer),
        },
        "shards": {
            "verified": state.is_verified,
            **{name: status[name] for name in ("done", "running", "pending", "not_submitted", "not_visible")},
            **{name: status[name] for name in ("wrong", "broken", "other_plan")},
            "num_done": len(made),
            "failed": status["causes"],
            "remedies": status["remedies"],
            "missing": id_ranges(set(range(plan.num_shards)) - state.made.done.keys()),
        },
        "counts": {name: sum(getattr(each, name) for each in counts) for name in _NUMBERS},
        "validation": _sums([each.validation for each in counts if each.validation]),
        "tar_bytes": sum(each.tar.num_bytes for each in manifests),
        "idx_bytes": sum(each.idx.num_bytes for each in manifests),
        "sources": _sources(manifests, folder),
        "left_out": dict(quarantined.most_common()),
        "per_shard": _per_shard(manifests, made),
        "work": _work(made),
        "slurm_away": status["slurm_away"] if status["has_jobs"] else "",
        "again": _again(folder, plan, manifests),
    }


def _sums(counts: Iterable[Any]) -> dict[str, int]:
    """Add up the numbers of several counts, by their names."""
    found: Counter[str] = Counter()
    for each in counts:
        found.update({name: value for name, value in vars(each).items() if isinstance(value, int)})
    return dict(found)


def _sources(manifests: Sequence[Manifest], folder: Path) -> list[dict[str, Any]]:
    """Return what each source gave, most tokens first. Several sources have their sum in front."""
    counts: dict[str, list[Any]] = {"all": []}
    texts: dict[str, list[TextCounts]] = {"all": []}
    for manifest in manifests:
        of_shard = manifest.facts_of_run(manifest_path(folder, manifest.shard_id)).texts or {}
        for name, each in manifest.counts.sources.items():
            for key in ("all", f" {name}"):  # no source's name begins so
                counts.setdefault(key, []).append(each)
                texts.setdefault(key, []).extend([of_shard[name]] if name in of_shard else [])
    sources = []
    for name in counts if len(counts) != 2 else ["all"]:
        sums = _sums(counts[name])
        if not sums:
            continue
        text = _text_numbers(texts[name], sums["num_tokens"])
        sources.append({"name": name.strip(), "is_all": name == "all", **sums, **text})
    return sorted(sources, key=lambda each: (not each["is_all"], -each["num_tokens"], each["name"]))


def _text_numbers(texts: Sequence[TextCounts], num_tokens: int) -> dict[str, Any]:
    """Return the size of texts as UTF-8, and how long documents are: up to 12 % too high."""
    num_bytes = sum(each.num_bytes for each in texts)
    of_length: Counter[int] = Counter()
    for each in texts:
        of_length.update({int(low): documents for low, (documents, _) in each.lengths.items()})
    numbers: dict[str, Any] = {
        "text_bytes": num_bytes,
        "bytes_per_token": round(num_bytes / num_tokens, 3) if num_tokens else None,
    }
    for share in (50, 90, 99):
        number, below = share / 100 * sum(of_length.values()), 0
        numbers[f"length_p{share}"] = None
        for low in sorted(of_length):
            below += of_length[low]
            if below >= number:
                numbers[f"length_p{share}"] = longest_of(low)
                break
    return numbers


def _per_shard(manifests: Sequence[Manifest], made: Sequence[ShardMaking]) -> dict[str, dict[str, float]]:
    """Return the least, the median and the most of sizes, times and memory."""
    values: dict[str, list[float]] = {
        "tar_bytes": [each.tar.num_bytes for each in manifests],
        "num_tokens": [each.counts.num_tokens for each in manifests],
        "wall_s": [each.wall_s for each in made],
        "max_rss_bytes": [each.max_rss_bytes for each in made],
    }
    numbers = {}
    for name, of in values.items():
        if of:
            numbers[name] = {"least": min(of), "median": statistics.median(of), "most": max(of)}
    return numbers


def _work(made: Sequence[ShardMaking]) -> dict[str, Any]:
    if not made:
        return {}
    return {
        "began": min(each.began for each in made),
        "ended": max(each.ended for each in made),
        "cpu_s": round(sum(each.cpu_s for each in made), 1),
        "had_cpu_s": round(sum(each.wall_s * each.num_cpus for each in made), 1),
        "transform_cpu_s": round(sum(each.transform_cpu_s for each in made), 1),
        "nodes": dict(Counter(each.host for each in made).most_common()),
    }


def _again(folder: Path, plan: Plan, manifests: Sequence[Manifest]) -> dict[str, Any]:
    """Return the commands that make the same data set, and the versions that made this one.

    Tokenizer and chat template are those that the data set keeps.
    """
    command = ["shardprep", "plan", "--input_dir", os.path.abspath(plan.input_dir), "--output_dir", "NEW"]  # noqa: PTH100
    command += ["--model_id", str(folder / TOKENIZER_DIR)]
    if not is_one_file_a_shard(plan):
        command += ["--num_shards", str(plan.num_shards)]
    command += flags_of(plan.options)
    if plan.max_bad_fraction != PrepConfig().max_bad_fraction:
        command += ["--max_bad_fraction", str(plan.max_bad_fraction)]
    if plan.has_input_hashes:
        command.append("--hash_inputs")
    commands = []
    if plan.options.chat_template:
        code = (
            "import sys, pathlib; from shardprep.format.plan import need_plan; "
            "open('NEW.jinja', 'w', encoding='utf-8', newline='')"
            ".write(need_plan(pathlib.Path(sys.argv[1])).options.chat_template)"
        )
        commands.append(shlex.join([sys.executable, "-c", code, str(folder)]))
        command += ["--chat_template_file", "NEW.jinja"]
    commands += [shlex.join(command), "shardprep run NEW", "shardprep verify NEW"]
    versions: dict[str, Counter[str]] = {}
    for manifest in manifests:
        for name in ("shardprep", "engine", "python"):
            versions.setdefault(name, Counter())[str(manifest.run.get(name, "?"))[:80]] += 1
    return {
        "commands": commands,
        "transform_sha256": plan.options.transform_sha256,
        "versions": {name: dict(sorted(found.items())) for name, found in versions.items()},
    }


def _without_secrets(value: Any) -> Any:
    """Return the same without user names, passwords and keys in URLs, wherever they stand."""
    if isinstance(value, dict):
        return {_without_secrets(key): _without_secrets(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    if isinstance(value, str):
        return _URL_SECRET.sub(r"\1***", _URL_USER.sub("***@", value))
    return value


def page_lines(data: Mapping[str, Any]) -> list[str]:
    """Return the lines of report.html.j2, filled in."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # JSON needs none

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else "-" if value is None else value,
    )
    templates.filters.update(
        num="{:,}".format,
        short=short_number,
        bytes=short_bytes,
        time=short_time,
        clock=lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)),
        percent="{:.2%}".format,
        quoted=shlex.quote,
        ids=_short_ids,
    )
    return templates.get_template("report.html.j2").render(data).strip().split("\n")


def _short_ids(ids: str) -> str:
    """Return a list of ids such as ``0-2, 5``, cut where it is long."""
    shown = ids if len(ids) <= 150 else ids[: ids.rindex(",", 0, 150)] + ",..."
    return shown.replace(",", ", ")
