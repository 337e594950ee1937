"""Defaults of a site, a user and a data set: ``shardprep.toml``, so that nobody types the account every day.

    [slurm]                          # for every submission
    partition = "cpu"
    account = "p123"

    [slurm.profiles.leonardo]        # --profile leonardo: these win over those above
    partition = "dcgp"
    container = "apptainer exec image.sif"

The keys are the fields of JobRequest, which are the flags of ``submit``; ``profile = "leonardo"`` in [slurm]
chooses a profile. Of three files the nearer one wins, key by key: /etc/shardprep.toml, the user's
(~/.config/shardprep.toml), and the data set's own. Flags and sbatch's variables (SBATCH_PARTITION) win over
all of them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardprep.errors import CannotWrite, UsageError
from shardprep.files import NOT_THERE, publish_bytes, read_regular
from slurm.job_script import JobRequest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "shardprep.toml"
_SITE = Path("/etc")
_MAX_BYTES = 1 << 20
_FIELDS = [item.name for item in dataclasses.fields(JobRequest)]


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Fields of a JobRequest, and where each was found."""

    values: dict[str, Any]
    sources: dict[str, str]


def user_file(environ: Mapping[str, str]) -> Path:
    """The user's own file, whether it is there or not."""
    return Path(environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME', '')}/.config", FILE_NAME)


def find_defaults(
    folder: Path, profile: str | None, environ: Mapping[str, str], site: Path | None = None
) -> Defaults:
    """What the three files say, and the profile that was chosen.

    Raises UsageError for what cannot be used, naming file and key, and what reading the files raises.
    """
    places = ((site or _SITE) / FILE_NAME, user_file(environ), folder / FILE_NAME)
    tables = [(path, _read(path)) for path in places]
    for _, table in tables:
        chosen = table.pop("profile", None)
        profile = profile or chosen
    profiles = [(path, table.pop("profiles", {})) for path, table in tables]
    if profile is not None and not any(profile in each for _, each in profiles):
        known = sorted({name for _, each in profiles for name in each})
        raise UsageError(
            f"there is no profile {profile!r}; known: {', '.join(known) or 'none'} "
            f"(looked into {', '.join(map(str, places))})"
        )
    found = [(str(path), table) for path, table in tables]
    found += [(f"profile {profile} of {path}", each[profile]) for path, each in profiles if profile in each]
    defaults = Defaults(values={}, sources={})
    for source, table in found:
        defaults.values.update(table)
        defaults.sources.update(dict.fromkeys(table, source))
    return defaults


def save_profile(
    name: str, values: Mapping[str, Any], environ: Mapping[str, str], *, dry_run: bool = False
) -> Path:
    """Write a profile into the user's file, in place of one of this name; the rest of the file stays.

    A dry run checks the same and writes nothing. Raises UsageError for a name that is none, CannotWrite or
    ReadWriteError.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise UsageError(f"--save_profile is {name!r}, expected letters, digits, - and _")
    path = user_file(environ)
    _read(path)  # a file that cannot be read must not be written over
    if dry_run:
        return path
    try:
        text = read_regular(path, max_bytes=_MAX_BYTES).decode("utf-8")
    except NOT_THERE:
        text = ""
    header = f"[slurm.profiles.{name}]"
    kept = re.sub(rf"^{re.escape(header)}.*?(?=^\[|\Z)", "", text, flags=re.MULTILINE | re.DOTALL).rstrip()
    lines = [header, *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"{path.parent} cannot be made: {error.strerror}") from None
    publish_bytes(path, ("\n\n".join(filter(None, (kept, "\n".join(lines)))) + "\n").encode("utf-8"))
    return path


def _read(path: Path) -> dict[str, Any]:
    """The table [slurm] of a file, checked; {} where there is none. Other tables may be others'."""
    try:
        table = tomllib.loads(read_regular(path, max_bytes=_MAX_BYTES).decode("utf-8")).get("slurm", {})
    except NOT_THERE:
        return {}
    except ValueError as error:
        raise UsageError(f"{path} is no TOML: {error}; mend it or move it away") from None
    if not isinstance(table, dict):
        raise UsageError(f"{path}: slurm is {table!r:.60}, expected a table: [slurm]")
    table = dict(table)
    profiles, profile = table.pop("profiles", {}), table.pop("profile", None)
    if not isinstance(profiles, dict) or not all(isinstance(each, dict) for each in profiles.values()):
        raise UsageError(f"{path}: profiles must be tables such as [slurm.profiles.leonardo]")
    if profile is not None and not isinstance(profile, str):
        raise UsageError(f"{path}: profile is {profile!r:.60}, expected the name of a profile")
    return {
        **_fields(path, "[slurm]", table),
        "profiles": {
            name: _fields(path, f"[slurm.profiles.{name}]", each) for name, each in profiles.items()
        },
        **({} if profile is None else {"profile": profile}),
    }


def _fields(path: Path, where: str, table: dict[str, Any]) -> dict[str, Any]:
    if unknown := sorted(table.keys() - set(_FIELDS)):
        raise UsageError(f"{path}: {where} has {unknown[0]!r}, expected: {', '.join(_FIELDS)}")
    for name, value in table.items():
        try:
            JobRequest(**{name: value})
        except UsageError as error:
            raise UsageError(f"{path}: {where}: {error}") from None
    setup = table.get("setup")
    return {**table, "setup": str(path.parent / setup)} if setup else dict(table)
