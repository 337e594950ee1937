"""The commands about documents that must not be trained on, which ``shardprep`` names."""

from __future__ import annotations

from shardprep.command_line import Command, Program

PROGRAM = Program(
    name="shardprep",
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
