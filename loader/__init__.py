"""Shards -> batches: ``from loader import get_llama3_dataloader``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loader.collate import CausalLMCollator
    from loader.dataloader import get_llama3_dataloader
    from loader.token_loader import TokenLoader

__all__ = ["CausalLMCollator", "TokenLoader", "get_llama3_dataloader"]


def __getattr__(name: str) -> Any:
    """Import torch and transformers (seconds) when something is first used, not before."""
    if name == "get_llama3_dataloader":
        from loader.dataloader import get_llama3_dataloader

        return get_llama3_dataloader
    if name == "TokenLoader":
        from loader.token_loader import TokenLoader

        return TokenLoader
    if name == "CausalLMCollator":
        from loader.collate import CausalLMCollator

        return CausalLMCollator
    raise AttributeError(f"module 'loader' has no attribute {name!r}; it has {', '.join(__all__)}")
