"""Raw text to token shards to batches. ``shardprep --help`` is the way in.

This package is what the others share. It imports none of them before one of their names is asked for.
"""

from typing import TYPE_CHECKING, Any

from shardprep.errors import (
    BadInput,
    BrokenShard,
    CannotWrite,
    LustreError,
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

if TYPE_CHECKING:
    from loader import get_llama3_dataloader

__version__ = "0.1.0"

__all__ = [
    "BadInput",
    "BrokenShard",
    "CannotWrite",
    "LustreError",
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
    "get_llama3_dataloader",
]


def __getattr__(name: str) -> Any:
    """``get_llama3_dataloader``, with torch: seconds that no other command pays."""
    if name == "get_llama3_dataloader":
        import loader

        if name not in getattr(loader, "__all__", ()):
            from shardprep.own_packages import REMEDY, mixed_packages

            found = mixed_packages() or [f"{loader.__file__} is not shardprep's package loader"]
            raise ImportError("; ".join([*found, REMEDY]), name=loader.__name__)
        return loader.get_llama3_dataloader
    raise AttributeError(f"module 'shardprep' has no attribute {name!r}")
