"""Raw text to token shards to batches. ``shardprep --help`` is the way in.

This package is what the others share; it imports none of them before a command of theirs is called:

    errors         one tree, each class with the exit code that it ends a command with; public
    format/        the contract on disk
    atomic_files   files and folders that appear whole or not at all
    regular_files  reading, with errors that name the path
    retries        which failed reads are tried again
    console        progress, readers that go away, stop signals
    command_line   flags, sizes and the frame of every command; id_ranges: ``0-2,5``
    own_packages   a user's own preprocess.py that hides ours
"""

from shardprep.errors import (
    BadInput,
    BrokenShard,
    CannotWrite,
    LustreError,
    LustreUsageError,
    MissingShard,
    NotFound,
    OtherPlan,
    OtherTokenizer,
    ReadWriteError,
    Refused,
    ShardprepError,
    Stopped,
    UnknownMember,
    UnknownVersion,
    UsageError,
)

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "BrokenShard",
    "CannotWrite",
    "LustreError",
    "LustreUsageError",
    "MissingShard",
    "NotFound",
    "OtherPlan",
    "OtherTokenizer",
    "ReadWriteError",
    "Refused",
    "ShardprepError",
    "Stopped",
    "UnknownMember",
    "UnknownVersion",
    "UsageError",
]
