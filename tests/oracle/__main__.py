"""``python -m tests.oracle``: compare all streams and members with the table; ``--make`` writes it anew.

Each form is compared on each number of ranks, without workers and with two.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.oracle import frozen
from tests.oracle.forms import DataSets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", action="store_true", help="write the table anew before comparing with it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CACHE_HOME": folder, "ORACLE": "all"}
        if args.make:
            frozen.write_table(DataSets(Path(folder) / "data"))
        return int(pytest.main(["-n0", str(Path(__file__).with_name("test_streams.py"))]))


if __name__ == "__main__":
    sys.exit(main())
