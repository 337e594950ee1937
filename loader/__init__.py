"""Shards -> batches: ``from loader import get_llama3_dataloader``.

docs/architecture.md says which module does what.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loader.batches import LoaderMetrics
    from loader.boundaries import check_boundaries, mask_documents
    from loader.collator import CausalLMCollator
    from loader.dataloader import get_llama3_dataloader
    from loader.evaluation import LossMean, evaluation_loss
    from loader.origins import Origin, SourceLosses, source_ids
    from loader.prepare import ensure_prepared
    from loader.ranks import ProcessRank, find_process_rank
    from loader.run import Position
    from loader.state import OtherRun
    from loader.token_loader import TokenLoader
    from loader.training_setup import set_up_training
    from shardprep.errors import (
        BrokenShard,
        MissingShard,
        NotFound,
        OtherTokenizer,
        ReadWriteError,
        ShardprepError,
        UnknownVersion,
        UsageError,
    )

_MODULES = {
    "loader.batches": ("LoaderMetrics",),
    "loader.boundaries": ("check_boundaries", "mask_documents"),
    "loader.collator": ("CausalLMCollator",),
    "loader.dataloader": ("get_llama3_dataloader",),
    "loader.evaluation": ("LossMean", "evaluation_loss"),
    "loader.origins": ("Origin", "SourceLosses", "source_ids"),
    "loader.prepare": ("ensure_prepared",),
    "loader.ranks": ("ProcessRank", "find_process_rank"),
    "loader.run": ("Position",),
    "loader.state": ("OtherRun",),
    "loader.token_loader": ("TokenLoader",),
    "loader.training_setup": ("set_up_training",),
}
__all__ = [
    "BrokenShard",
    "CausalLMCollator",
    "LoaderMetrics",
    "LossMean",
    "MissingShard",
    "NotFound",
    "Origin",
    "OtherRun",
    "OtherTokenizer",
    "Position",
    "ProcessRank",
    "ReadWriteError",
    "ShardprepError",
    "SourceLosses",
    "TokenLoader",
    "UnknownVersion",
    "UsageError",
    "check_boundaries",
    "ensure_prepared",
    "evaluation_loss",
    "find_process_rank",
    "get_llama3_dataloader",
    "mask_documents",
    "set_up_training",
    "source_ids",
]


def __getattr__(name: str) -> Any:
    """Import torch (seconds) when something is first used, and transformers for CausalLMCollator alone."""
    if name in __all__:
        module = next((each for each, names in _MODULES.items() if name in names), "shardprep.errors")
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            from shardprep.command_line import missing_library

            if (found := missing_library(error, f"loader.{name}")) is None:
                raise
            raise ModuleNotFoundError(found, name=error.name) from None
    raise AttributeError(f"module 'loader' has no attribute {name!r}; it has {', '.join(__all__)}")
