"""What a job may ask for by its QOS, its association and its accounts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardprep.format.jobs import user_name
from slurm.commands import SlurmAway, SlurmRefused, slurm_answer
from slurm.limits import Limit


@dataclass(frozen=True, kw_only=True)
class OfAccounts:
    """What QOS, association and accounts allow."""

    limits: dict[str, list[Limit]] = field(default_factory=dict)  # field of Limits -> its limits
    flags: set[str] = field(default_factory=set)  # of the job's QOS


def read_limits_of_accounts(asked: Mapping[str, str], partition_qos: str, *, has_limit: bool) -> OfAccounts:
    """Return the limits of the QOS and the association. Of several limits of a kind the first applies.

    Slurm's order: the QOS of the partition, the QOS of the job, the association, its parents. A flag of the
    job's QOS puts it before that of the partition. ``has_limit``: the partition limits the time.
    """
    me = user_name()

    def parse(text: str) -> list[dict[str, str]]:
        return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines()]

    command = ("scontrol", "--oneliner", "show", "assoc_mgr", f"users={me}", "flags=assoc,qos")
    try:
        lines = slurm_answer(parse, *command)
    except (SlurmAway, SlurmRefused):
        return OfAccounts()  # hidden from users; --test-only says what it can
    of_qos = {facts["QOS"].partition("(")[0]: facts for facts in lines if "QOS" in facts}
    associations = {}
    accounts = {}
    partitions = ("", *asked.get("partition", "").split(","))
    for facts in lines:
        place = facts.get("Partition", "")
        if facts.get("UserName", "").partition("(")[0] == me:
            # One that holds for this partition alone comes before one for all.
            if place in partitions and (place or facts["Account"] not in associations):
                associations[facts.get("Account", "")] = facts
        elif "Account" in facts and not facts.get("UserName"):
            accounts[facts["Account"]] = facts
    default = [name for name, facts in associations.items() if facts.get("DefAssoc") == "Yes"]
    account = asked.get("account") or (default[0] if default else "")
    qos = asked.get("qos") or _default_qos(me, account)
    flags = _flags_of_qos(qos) if qos in of_qos and (has_limit or partition_qos in of_qos) else set()
    names = [partition_qos, qos]
    if "OverPartQOS" in flags:
        names.reverse()
    ordered = [(f"QOS {name}", of_qos[name]) for name in names if name in of_qos]
    if account in associations:
        ordered.append((f"your association with account {account}", associations[account]))
    for _ in range(len(accounts)):  # parents, of which a damaged answer could make a circle
        facts = accounts.get(account, {})
        ordered.append((f"account {account}", facts))
        account = facts.get("ParentAccount", "").partition("(")[0]
    first: dict[tuple[str, str], Limit] = {}
    for of, facts in ordered:
        for (name, word), number in _limits_of(facts).items():
            first.setdefault((name, word), Limit(number=number, of=f"{word} of {of}"))
    limits: dict[str, list[Limit]] = {}
    for (name, _), limit in first.items():
        limits.setdefault(name, []).append(limit)
    return OfAccounts(limits=limits, flags=flags)


def _limits_of(facts: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Return (field of Limits, Slurm's word) -> number, by one line of ``scontrol show assoc_mgr``."""
    limits = {}
    if facts.get("MaxWallPJ", "").isdecimal():
        limits["time_min", "MaxWall"] = int(facts["MaxWallPJ"])
    # Jobs of a group or a user together: more than this one job alone never gets, either.
    for key, word in (("MaxTRESPJ", "MaxTRES"), ("MaxTRESPN", "MaxTRESPerNode"), ("GrpTRES", "GrpTRES")):
        most = dict(re.findall(r"(\w+)=(\d+)", facts.get(key, "")))  # N is no limit
        for name, unit in (("mem_mb", "mem"), ("num_cpus", "cpu")):
            if unit in most:
                limits[name, f"{word} {unit}"] = int(most[unit])
    least = dict(re.findall(r"(\w+)=(\d+)", facts.get("MinTRESPJ", "")))
    if "cpu" in least:
        limits["min_cpus", "MinTRES cpu"] = int(least["cpu"])
    return limits


def _flags_of_qos(name: str) -> set[str]:
    """Return the flags of a QOS, or none if the accounts do not answer."""
    command = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "where", f"name={name}")
    try:
        return slurm_answer(lambda text: set(text.strip().split(",")), *command, "format=Flags")
    except (SlurmAway, SlurmRefused):
        return set()


def _default_qos(user: str, account: str) -> str:
    """Return the QOS of jobs that name none, or "" if the accounts do not answer."""
    command = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", "where", f"user={user}")

    def parse(text: str) -> str:
        for line in text.splitlines():
            name, default, allowed = line.split("|")
            if name == account:
                return default or ("" if "," in allowed else allowed)
        return ""

    try:
        return slurm_answer(parse, *command, "format=Account,DefaultQOS,QOS")
    except (SlurmAway, SlurmRefused):
        return ""
