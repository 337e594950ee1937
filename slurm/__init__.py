"""Slurm jobs: ``prep_array.sh`` makes shards as a job array. Nothing else of this project imports it."""
