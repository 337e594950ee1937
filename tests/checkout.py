"""Paths of this checkout and of what is beside it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("shardprep", "preprocess", "loader", "slurm", "lustre")
SLURM_STARTER = ROOT / "tests" / "slurm_cluster.sh"
# The Llama 3 tokenizer and the corpora, which are not part of the project. Tests that need them may skip.
SHARED = Path(os.environ.get("SHARDPREP_TEST_SHARED") or ROOT.parent / "shared")
