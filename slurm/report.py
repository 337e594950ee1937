"""``report DATA``: write what a data set contains, how it was made, and how to make it again.

Reads every manifest and no shard: 10,000 take some 5 s of CPU.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from shardprep import console
from shardprep.console import print_exactly, say
from shardprep.format.data_folder import DataFolder
from shardprep.format.manifest import Manifest
from shardprep.format.plan import need_plan
from shardprep.output_folder import claim_file
from shardprep.publishing import publish_bytes
from slurm.report_data import report_of
from slurm.report_page import page_lines
from slurm.state import find_state

_REPORT_BEGINS = re.compile(rb".{,200}shardprep-report", re.DOTALL)  # a page, or JSON
_URL_USER = re.compile(r"(?<=://)[^/\s@]+@")
_URL_SECRET = re.compile(r"(?i)([?&][\w-]*(?:token|key|secret|password|signature|credential)[\w-]*=)[^&\s#]+")


def report(folder: Path, output: Path | None, *, is_json: bool) -> int:
    """Write the report of a data set, finished or not: ``report DATA``."""
    folder = folder.absolute()
    plan = need_plan(DataFolder(folder))
    manifests: dict[int, Manifest] = {}
    progress = console.Progress("reading manifests", plan.num_shards, unit="shards")

    def keep(manifest: Manifest) -> None:
        progress.add(manifest.shard_id not in manifests)  # find_state may read a manifest twice
        manifests[manifest.shard_id] = manifest

    state = find_state(folder, plan, needs_slurm=False, see=keep)
    progress.add(plan.num_shards - len(manifests))
    made = report_of(state, [manifests[shard_id] for shard_id in state.made.done])
    data = _without_secrets(msgspec.to_builtins(made))
    lines = [json.dumps(data)] if is_json else page_lines(data)
    if is_json and output is None:
        print_exactly(*lines)
        return 0
    output = output or Path("report.html")
    claim_file(output, _REPORT_BEGINS)
    publish_bytes(output, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
    say(f"wrote {output}")
    return 0


def write_chat_template() -> None:
    """Write the chat template of the data set that the first argument names to NEW.jinja."""
    Path("NEW.jinja").write_text(need_plan(DataFolder(Path(sys.argv[1]))).options.chat_template, "utf-8")


def _without_secrets(value: Any) -> Any:
    """Replace user names, passwords and keys in all URLs by ``***``."""
    if isinstance(value, dict):
        return {_without_secrets(key): _without_secrets(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    if isinstance(value, str):
        return _URL_SECRET.sub(r"\1***", _URL_USER.sub("***@", value))
    return value
