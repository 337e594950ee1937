"""Paths that a user types: on this machine, not empty, and no URL."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from shardprep.errors import UsageError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HUB_URL = re.compile(r"(?:hf|https?)://(?:huggingface\.co/|hf\.co/)?datasets/([\w-][\w.-]*/[\w-][\w.-]*)")
# How a folder is copied from a store, by the scheme of its URL.
_COPY_COMMANDS = {
    "s3": "aws s3 sync {source} {target}",
    "gs": "gcloud storage rsync --recursive {source} {target}",
    "az": "azcopy copy {source} {target} --recursive",
    "hdfs": "hdfs dfs -copyToLocal {source} {target}",
}


def check_local_path(text: str, name: str) -> None:
    """Raise UsageError for an empty path and for a URL. ``name``: of the flag or argument.

    ``pathlib`` makes the current folder of "", such as an unset variable, and a folder "s3:" of a URL. So
    each path that a user types or passes goes through here, before it becomes a Path.
    """
    if not text.strip():
        expected = "a path"
        advice = "is the variable set that the command uses?"
        raise UsageError(found=f"{name} {text!r}", expected=expected, advice=advice)
    match = _URL.match(text)
    if match is None:
        return
    scheme = match[1].lower()
    rest = match[2]
    expected = "a path on this machine"
    remedy = None
    if scheme == "file":
        remedy = "/" + rest.partition("/")[2]
        expected += f", such as {remedy}"
    elif "output" in name or name == "--to":
        command = _COPY_COMMANDS.get(scheme, "").format(source="FOLDER", target=shlex.quote(text))
        expected += "; write into a folder here, and copy it afterwards" + f": {command}" * bool(command)
    else:
        command = _COPY_COMMANDS.get(scheme, "").format(source=shlex.quote(text), target="FOLDER")
        hub = _HUB_URL.match(text)
        if hub is not None:
            command = f"hf download {hub[1]} --repo-type dataset --local-dir FOLDER"
        expected += "; copy it here first" + f": {command}" * bool(command)
        remedy = command or None
    raise UsageError(found=f"{name} {text}", expected=expected, remedy=remedy)


def real_path(text: str) -> Path:
    """Return the path without links. ``Path.resolve`` raises for a loop of links."""
    return Path(os.path.realpath(text))
