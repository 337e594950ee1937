"""The names of a data set's jobs, which tell them after a kill left no record."""

from __future__ import annotations

import re
from pathlib import Path

from shardprep.format import attempts
from shardprep.format.data_folder import DataFolder

JOB_NAME = "shardprep"
# Suffixes of the names of such jobs.
VERIFY = "-verify"
CONTROL = "-control"
OUR_NAME = re.compile(rf"{JOB_NAME}-[0-9a-f]{{12}}-[0-9a-f.]+-\d+({VERIFY}|{CONTROL})?")  # of our jobs


def job_name_prefix(folder: Path, plan_id: str) -> str:
    """Return the prefix of the names of a data set's jobs, which the number of the submission follows."""
    return f"{JOB_NAME}-{plan_id[:12]}-{attempts.folder_identity(DataFolder(folder))}-"
