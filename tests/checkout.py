"""Where this checkout is, and what lies beside it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("shardprep", "preprocess", "loader", "slurm", "lustre")
SLURM_STARTER = ROOT / "tests" / "slurm_cluster.sh"
# The Llama 3 tokenizer and the corpora, which are no part of the project; tests without them are skipped.
SHARED = Path(os.environ.get("SHARDPREP_TEST_SHARED") or ROOT.parent / "shared")
