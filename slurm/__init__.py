"""Slurm jobs: ``prep_array.sh`` makes shards as a job array, ``python -m slurm`` submits and mends.

Nothing else of this project imports it.
"""

from typing import TYPE_CHECKING, Any

from shardprep import check_not_hidden

if TYPE_CHECKING:
    from slurm.submitit_executor import submit_with_submitit

check_not_hidden("preprocess")

__all__ = ["submit_with_submitit"]


def __getattr__(name: str) -> Any:
    """Import the door to submitit, and with it numpy, when it is used: ``--help`` needs neither."""
    if name == "submit_with_submitit":
        from slurm.submitit_executor import submit_with_submitit

        return submit_with_submitit
    raise AttributeError(f"module 'slurm' has no attribute {name!r}; it has {', '.join(__all__)}")
