"""Slurm jobs: ``prep_array.sh`` makes shards as a job array; ``python -m slurm`` submits and mends.

Nothing else of this project imports it.
"""

from slurm.own_packages import need_preprocess

need_preprocess()

from slurm.submitit_executor import submit_with_submitit  # noqa: E402 - it imports preprocess

__all__ = ["submit_with_submitit"]
