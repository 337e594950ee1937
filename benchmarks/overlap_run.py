"""A run that blanks what ``shardprep overlap`` finds at step 500 goes on exactly, for 500 steps.

    PYTHONPATH=. python benchmarks/overlap_run.py [STEPS]

Compared are all batches, and all gradients of a small model, with those of the run on the data as it was, in
which what was found is padding; and the steps that ``where --blanked`` names with the batches.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from measured_run import machine_line

from tests.loader.test_blanked_steps import go_on_without_hits


def main() -> None:
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    for form in ({}, {"record": "packed", "seq_len": 32}):
        with tempfile.TemporaryDirectory(prefix="shardprep-overlap-") as name:
            print(form or "documents", go_on_without_hits(Path(name), num_steps, **form), flush=True)
    print(machine_line())


if __name__ == "__main__":  # blank starts processes that import this file
    main()
