"""``read_check``: whether the loader compares the crc32 of what it reads of each sample, and can."""

from __future__ import annotations

from typing import Literal, get_args

from loader.shards.shard_set import DatasetShards, ExternalTar, ShardSet
from shardprep.errors import MissingShard, UsageError
from shardprep.format.names import CRCS_DIR, crcs_command, crcs_path
from shardprep.regular_files import names_in, with_retries

ReadCheck = Literal["none", "crc"]


def check_read_check(read_check: ReadCheck, shards: ShardSet, *, looks: bool) -> bool:
    """Whether crc32s are to be compared.

    ``looks``: list the folders of crc32s, so that missing ones are known at the start; one rank is enough.
    Raises UsageError for another value, and for external tars, of which there are none; MissingShard;
    ReadWriteError.
    """
    if read_check not in get_args(ReadCheck):
        raise UsageError(f"read_check is {read_check!r}, expected {' or '.join(get_args(ReadCheck))}")
    if read_check == "none":
        return False
    for source in shards.sources:
        if isinstance(source, ExternalTar):
            raise UsageError(
                f'{source.path} is a tar of others, of which there are no crc32s; read_check="crc" is for '
                "data sets that shardprep wrote"
            )
        if looks:
            _look(source)
    return True


def _look(source: DatasetShards) -> None:
    folder = source.folder / CRCS_DIR
    found = set(with_retries(f"{folder} cannot be listed", lambda: names_in(folder)))
    missing = [
        shard_id
        for shard_id in source.shard_ids.tolist()
        if crcs_path(source.folder, shard_id).name not in found
    ]
    if missing:
        raise MissingShard(
            f'read_check is "crc", and {len(missing)} of {len(source.shard_ids)} shards have no crc32s in '
            f"{folder}, such as {crcs_path(source.folder, missing[0]).name}; run: "
            f"{crcs_command(source.folder)}, where the data set lies on disk"
        )
