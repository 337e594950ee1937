"""Slurm jobs: ``prep_array.sh`` makes shards as a job array; ``python -m slurm`` submits and retries them.

No other package of this project imports this one.
"""

# First: under ``python -m`` it takes the current folder off the path of modules.
import shardprep as _shardprep  # noqa: F401  # isort: skip

from typing import TYPE_CHECKING, Any

from shardprep import check_not_hidden

if TYPE_CHECKING:
    from slurm.submitit import submit_with_submitit

check_not_hidden("preprocess")

__all__ = ["submit_with_submitit"]


def __getattr__(name: str) -> Any:
    """Import ``submit_with_submitit`` at its first use, because ``--help`` does not need it."""
    if name == "submit_with_submitit":
        from slurm.submitit import submit_with_submitit

        return submit_with_submitit
    raise AttributeError(f"module 'slurm' has no attribute {name!r}; it has {', '.join(__all__)}")
