"""``python -m preprocess.overlap``: commands about documents that must not be trained on."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardprep.command_line import Command, Program, given_words

PROGRAM = Program(
    name="python -m preprocess.overlap",
    description="Documents that must not be trained on.",
    commands={
        "overlap": Command(
            "find the documents that hold text of an evaluation",
            "preprocess.overlap.overlap:add_flags",
            "preprocess.overlap.overlap:overlap",
        ),
        "duplicates": Command(
            "find equal documents, and list those that go",
            "preprocess.overlap.duplicates:add_flags",
            "preprocess.overlap.duplicates:duplicates",
        ),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    return PROGRAM.run(given_words(argv))


if __name__ == "__main__":
    sys.exit(main())
