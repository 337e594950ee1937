"""What the user gives of a JobRequest: by flags, or by variables of sbatch and of prep_array.sh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shardprep.errors import UsageError
from shardprep.format.submissions import MEMORY_FIELDS, with_changes
from slurm.commands import REQUEST_VARIABLES, megabytes_of, minutes_of


def with_variables(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the user gave by flags, or else by sbatch's and prep_array.sh's own variables.

    A set-up file's path becomes absolute. Raises UsageError for a time or memory that cannot be read.
    """
    found: dict[str, Any] = {}
    for name, variable in REQUEST_VARIABLES.items():
        text = os.environ.get(variable)
        if not text or name in flags:
            continue
        value: Any = text
        if name in ("time_min", *MEMORY_FIELDS):
            value = minutes_of(text) if name == "time_min" else (megabytes_of(text) or 0) / 1024
            if not value:
                expected = "60 or 2:00:00" if name == "time_min" else "4000 or 4G"
                raise UsageError(
                    f"{variable} is {text!r:.60}, expected a value such as {expected}; "
                    f"unset it, or give the flag --{name} too"
                )
        found[name] = value
    given = with_changes(found, flags)
    if given.get("setup"):
        given["setup"] = os.path.abspath(os.path.expanduser(given["setup"]))  # noqa: PTH100, PTH111 - text
    return given
