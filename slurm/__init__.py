"""Slurm jobs: ``prep_array.sh`` makes shards as a job array; ``python -m slurm`` submits and mends.

Nothing else of this project imports it.
"""

from slurm.submitit_executor import submit_with_submitit

__all__ = ["submit_with_submitit"]
