"""Shards -> batches: ``from loader import get_llama3_dataloader``.

    shards/ which shards there are -> order.py which sample comes when -> reading/ their bytes ->
    samples/ their token ids, as a run.py -> dataset.py, which workers run -> token_loader.py batches, state

``staging/`` is ``python -m loader stage``. What a line names does not import what comes after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loader.batches import CausalLMCollator
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
        from loader.batches import CausalLMCollator

        return CausalLMCollator
    raise AttributeError(f"module 'loader' has no attribute {name!r}; it has {', '.join(__all__)}")
