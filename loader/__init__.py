"""Shards -> batches: ``from loader import get_llama3_dataloader``.

docs/architecture.md says which module does what.
"""

from __future__ import annotations

# First: under ``python -m`` it takes the current folder off the path of modules.
import shardprep as _shardprep  # noqa: F401  # isort: skip

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loader.batch.batches import LoaderMetrics as LoaderMetrics
    from loader.batch.collator import CausalLMCollator as CausalLMCollator
    from loader.dataloader import get_llama3_dataloader as get_llama3_dataloader
    from loader.order.mixture import Position as Position
    from loader.order.state import OtherRun as OtherRun
    from loader.preparing import ensure_prepared as ensure_prepared
    from loader.ranks import ProcessRank as ProcessRank
    from loader.ranks import find_process_rank as find_process_rank
    from loader.read.shards import Origin as Origin
    from loader.token_loader import TokenLoader as TokenLoader
    from loader.train.boundary_check import check_boundaries as check_boundaries
    from loader.train.context_parallel import split_for_context_parallel as split_for_context_parallel
    from loader.train.document_masks import mask_documents as mask_documents
    from loader.train.even_rows import deal_rows_evenly as deal_rows_evenly
    from loader.train.losses import LossMean as LossMean
    from loader.train.losses import SourceLosses as SourceLosses
    from loader.train.losses import evaluation_loss as evaluation_loss
    from loader.train.losses import source_ids as source_ids
    from loader.train.set_up import set_up_training as set_up_training
    from shardprep.errors import BrokenShard as BrokenShard
    from shardprep.errors import MissingShard as MissingShard
    from shardprep.errors import NotFound as NotFound
    from shardprep.errors import OtherTokenizer as OtherTokenizer
    from shardprep.errors import ReadWriteError as ReadWriteError
    from shardprep.errors import ShardprepError as ShardprepError
    from shardprep.errors import UnknownVersion as UnknownVersion
    from shardprep.errors import UsageError as UsageError

_NAMES_OF_MODULE = {
    "shardprep.errors": "BrokenShard MissingShard NotFound OtherTokenizer ReadWriteError ShardprepError "
    "UnknownVersion UsageError",
    "loader.batch.batches": "LoaderMetrics",
    "loader.boundaries": "check_boundaries mask_documents",  # a module whose names users import, too
    "loader.batch.collator": "CausalLMCollator",
    "loader.dataloader": "get_llama3_dataloader",
    "loader.token_loader": "TokenLoader",
    "loader.preparing": "ensure_prepared",
    "loader.ranks": "ProcessRank find_process_rank",
    "loader.order.mixture": "Position",
    "loader.order.state": "OtherRun",
    "loader.read.shards": "Origin",
    "loader.train.context_parallel": "split_for_context_parallel",
    "loader.train.even_rows": "deal_rows_evenly",
    "loader.train.losses": "LossMean SourceLosses evaluation_loss source_ids",
    "loader.train.set_up": "set_up_training",
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names.split()}
__all__ = sorted(_MODULE_OF_NAME)


def __getattr__(name: str) -> Any:
    """Import a name at its first use, as torch takes seconds. Only CausalLMCollator needs transformers."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'loader' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        return getattr(import_module(_MODULE_OF_NAME[name]), name)
    except ModuleNotFoundError as error:
        from shardprep.command_line import missing_library

        message = missing_library(error, f"loader.{name}")
        if message is None:
            raise
        raise ModuleNotFoundError(message, name=error.name) from None
