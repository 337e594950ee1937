"""Slurm jobs: ``prep_array.sh`` makes shards as a job array, ``python -m slurm`` submits and mends.

Nothing else of this project imports it.
"""

from typing import TYPE_CHECKING, Any

from shardprep import check_not_hidden

if TYPE_CHECKING:
    from slurm.send import submit_with_submitit

check_not_hidden("preprocess")

__all__ = ["submit_with_submitit"]


def __getattr__(name: str) -> Any:
    """Import what submits by submitit when it is used: ``--help`` does not need it."""
    if name == "submit_with_submitit":
        from slurm.send import submit_with_submitit

        return submit_with_submitit
    raise AttributeError(f"module 'slurm' has no attribute {name!r}; it has {', '.join(__all__)}")
