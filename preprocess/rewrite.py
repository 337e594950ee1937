"""``rewrite``: a data set without the documents that are withdrawn, as if its input had never had them.

Its plan is that of the old one, and says by the hash of the last list what is left out; the lists stand in
left_out/. So each shard can be made by any task. Shards that hold nothing withdrawn are taken over: the files
are given a second name, but for the idx and the manifest, which name the plan.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from shardprep.console import Progress
from shardprep.errors import Refused, UsageError
from shardprep.files import (
    PublishedFolder,
    make_folder,
    publish_bytes,
    publish_link,
    read_regular,
    stamp_file,
    sync_folder,
)
from shardprep.format.done import check_done, done_manifest, read_findings
from shardprep.format.idx import HEADER_BYTES, idx_header
from shardprep.format.manifest import Manifest, shard_files
from shardprep.format.names import LEFT_OUT_DIR, TOKENIZER_DIR, idx_path, manifest_path
from shardprep.format.plan import Plan, need_plan, plan_id, publish_plan, read_plan
from shardprep.format.tokenizer_files import check_tokenizer_files
from shardprep.format.withdrawals import read_withdrawals, withdrawal_path


def take_over(folder: Path, new: Path) -> tuple[Plan, int]:
    """Plan the new data set, and take over the shards that hold nothing withdrawn: its plan, and how many.

    What an earlier attempt left done stays. Raises UsageError where nothing is withdrawn, Refused where the
    new folder has another plan, and what reading and writing raise.
    """
    plan = need_plan(folder)
    check_tokenizer_files(folder, plan.tokenizer_files)  # which are copied
    lists = read_withdrawals(folder, plan.plan_id)
    if not lists.lists:
        raise UsageError(f"nothing is withdrawn of {folder}; name documents first: shardprep withdraw")
    if plan.options.rewritten:
        raise UsageError(
            f"{folder} was made by rewrite itself; withdraw these documents of the data set that it was made "
            "of, too, and rewrite that one into a new folder"
        )
    planned = dataclasses.replace(plan, options=dataclasses.replace(plan.options, rewritten=lists.sha256))
    planned = dataclasses.replace(planned, plan_id=plan_id(planned))
    found = read_plan(new)
    if found is not None and found.plan_id != planned.plan_id:
        raise Refused(
            f"{new} has another plan ({found.plan_id[:12]}, expected {planned.plan_id[:12]}); choose a new "
            "folder. A rewrite goes on only with the lists that it began with; those of "
            f"{folder} end with {lists.sha256[:12]}"
        )
    if found is None:
        _publish_beginnings(folder, new, planned, len(lists.lists))
    untouched = sorted({*range(plan.num_shards)} - {*lists.shard_ids})
    found_wrong, found_new = read_findings(folder, plan.plan_id), read_findings(new, planned.plan_id)
    with Progress("taking over", len(untouched), unit="shards") as progress:
        for shard_id in untouched:
            manifest = check_done(folder, shard_id, plan.plan_id, found_wrong)
            if done_manifest(new, shard_id, planned.plan_id, found_new) is None:
                _take_over_shard(folder, new, planned, manifest)
            progress.add(1)
    return planned, len(untouched)


def _publish_beginnings(folder: Path, new: Path, planned: Plan, num_lists: int) -> None:
    """The lists, the tokenizer and last the plan."""
    make_folder(new / LEFT_OUT_DIR, parents=True)
    for number in range(1, num_lists + 1):
        publish_link(withdrawal_path(new, number, subfolder=LEFT_OUT_DIR), withdrawal_path(folder, number))
    sync_folder(new / LEFT_OUT_DIR)
    with PublishedFolder(new / TOKENIZER_DIR) as tokenizer:
        for name, stamp in planned.tokenizer_files.items():
            path = tokenizer.temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(read_regular(folder / TOKENIZER_DIR / name, max_bytes=stamp.num_bytes))
        tokenizer.publish_first()
    publish_plan(planned, new)


def _take_over_shard(folder: Path, new: Path, planned: Plan, manifest: Manifest) -> None:
    """Give the files of a shard a second name, the idx and the manifest the new plan; the manifest last."""
    shard_id = manifest.shard_id
    idx, new_idx = idx_path(folder, shard_id), idx_path(new, shard_id)
    for path, stamp in shard_files(folder, manifest):
        target = new / path.relative_to(folder)
        if path != idx:
            target.parent.mkdir(exist_ok=True)
            publish_link(target, path)
            if target.parent != new:  # new itself is synced with the idx, and with the manifest
                sync_folder(target.parent)
            continue
        records = read_regular(path, max_bytes=stamp.num_bytes)[HEADER_BYTES:]
        publish_bytes(target, idx_header(planned.spec, shard_id) + records)
    taken = dataclasses.replace(manifest, spec=planned.spec, idx=stamp_file(new_idx))
    publish_bytes(manifest_path(new, shard_id), taken.to_json())
