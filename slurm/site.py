"""What a site allows one job of this user, by partition, QOS and association.

Where Slurm enforces no limits of accounts, these are not asked for. What cannot be read (job_submit plugins,
a QOS that is hidden) is tried by ``sbatch --test-only``, see ``slurm.refusals``.

Price: two calls of Slurm; one more for a request that names memory, or at a site with limits of accounts.
These cost one call themselves, one with the account's default QOS, and one for the flags of the QOS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from slurm.accounts import OfAccounts, read_limits_of_accounts
from slurm.commands import (
    SlurmAway,
    megabytes_of,
    read_config,
)
from slurm.limits import Limit, Limits, least
from slurm.partitions import open_partitions, read_nodes, read_partitions
from slurm.refusals import TASKS, memory_mb, options_of
from slurm.request import JobRequest


class Site:
    """The limits of each request, asked for once. A dry run without Slurm has none."""

    def __init__(self, config: Mapping[str, str], *, is_needed: bool) -> None:
        """``config``: of slurmctld, or {}."""
        self._config = config
        self._is_needed = is_needed
        self._known: dict[tuple[tuple[str, ...], bool], Limits] = {}

    def limits(self, request: JobRequest, *, for_memory: bool = False) -> Limits:
        """Return the limits for a request's partition, account and QOS. Raises as ``slurm_answer`` does.

        ``for_memory``: those of memory, too, even if the request names none.
        """
        key = tuple(options_of(TASKS, request.changed(**_NO_SIZES)))
        has_memory = for_memory or request.names_memory
        if (key, has_memory) not in self._known:
            try:
                limits = find_limits(request, self._config, has_memory=has_memory)
            except SlurmAway:
                if self._is_needed:
                    raise
                limits = Limits()
            self._known[key, has_memory] = limits
            self._known[key, False] = limits
        limits = self._known[key, has_memory]
        if limits.elsewhere and _is_above(request, limits):
            return limits.elsewhere
        return limits


def _is_above(request: JobRequest, limits: Limits) -> bool:
    """Return whether a request exceeds the time or memory of the default partition."""
    mem_mb = memory_mb(request)
    is_long = request.time_min and limits.time_min and request.time_min > limits.time_min.number
    is_large = mem_mb and limits.mem_mb and mem_mb > limits.mem_mb.number
    return bool(is_long or is_large)


_NO_SIZES: Mapping[str, int | None] = {
    "cpus_per_task": 1,
    "mem_gb": None,
    "mem_per_cpu_gb": None,
    "time_min": None,
}


def find_limits(request: JobRequest, config: Mapping[str, str], *, has_memory: bool) -> Limits:
    """Ask Slurm for the limits of jobs with the account, QOS and partition of a request.

    ``config``: of slurmctld, or {}. ``has_memory``: whether the jobs name memory, which a partition may
    limit. Raises as ``slurm_answer`` does.
    """
    if not config:
        config = read_config()
    asked = _options(request)
    has_accounts = bool(re.search("limits|safe|all", config.get("AccountingStorageEnforce", "")))
    nodes = read_nodes(asked.get("partition"))
    partitions = read_partitions() if has_accounts or has_memory else {}
    # Of several partitions a job gets any, so their own limits are left to Slurm.
    partition: Mapping[str, str] = {}
    if len(nodes.partitions) == 1:
        partition = partitions.get(nodes.partitions[0], {})

    of_accounts = OfAccounts()
    if has_accounts:
        of_accounts = read_limits_of_accounts(asked, partition.get("QoS", ""), has_limit=nodes.has_limit())
    of_partition: dict[str, list[Limit]] = {"time_min": [], "mem_mb": []}
    time_min = nodes.longest_min()
    if time_min is not None and "PartitionTimeLimit" not in of_accounts.flags:
        name = ", ".join(nodes.partitions)
        of_partition["time_min"].append(Limit(number=time_min, of=f"MaxTime of partition {name}"))
    of_partition["mem_mb"] += _max_mem(partition, f"partition {partition.get('PartitionName')}")
    of_all = {name: list(limits) for name, limits in of_accounts.limits.items()}
    of_all.setdefault("mem_mb", []).extend(_max_mem(config, "the cluster"))

    default_mb = megabytes_of(config.get("DefMemPerCPU") or config.get("DefMemPerNode") or "")
    limits = Limits(
        cluster=config.get("ClusterName", ""),
        max_array_size=int(config["MaxArraySize"]),
        nodes=nodes.nodes,
        larger_nodes=open_partitions(nodes.larger_elsewhere(), partitions, asked),
        is_exclusive=nodes.gives_whole_nodes() or partition.get("ExclusiveUser") == "YES",
        time_min=least([*of_partition["time_min"], *of_all.get("time_min", [])]),
        mem_mb=least([*of_partition["mem_mb"], *of_all["mem_mb"]]),
        num_cpus=least(of_all.get("num_cpus", [])),
        min_cpus=max(of_all.get("min_cpus", []), key=lambda each: each.number, default=None),
        min_nodes=nodes.nodes_limit("MinNodes"),
        max_nodes=nodes.nodes_limit("MaxNodes"),
        default_mem_mb=round(default_mb) if default_mb else None,
    )
    if "partition" in asked or not _may_choose_partitions(config):
        return limits
    without = replace(limits, time_min=least(of_all.get("time_min", [])), mem_mb=least(of_all["mem_mb"]))
    return replace(limits, elsewhere=without)


def _max_mem(facts: Mapping[str, str], owner: str) -> list[Limit]:
    """Return the MaxMemPerNode of the cluster or a partition, if it has one."""
    mem_mb = megabytes_of(facts.get("MaxMemPerNode", ""))
    return [Limit(number=math.floor(mem_mb), of=f"MaxMemPerNode of {owner}")] if mem_mb else []


_KEEP_PARTITIONS = {"", "(null)", "require_timelimit", "throttle", "logging"}  # plugins of Slurm's own


def _may_choose_partitions(config: Mapping[str, str]) -> bool:
    """Return whether a job_submit plugin may choose a partition for jobs that name none."""
    plugins = config.get("JobSubmitPlugins", "").split(",")
    return not _KEEP_PARTITIONS.issuperset(plugins)


_SHORT_OPTIONS = {"p": "partition", "A": "account", "q": "qos"}


def _options(request: JobRequest) -> dict[str, str]:
    """Return partition, account and QOS, also if they are given as options of sbatch."""
    asked = {}
    for word in request.sbatch_options():
        match = re.fullmatch(r"(?:--(partition|account|qos)=|-([pAq]))(.+)", word)
        if match:
            name = match[1] or _SHORT_OPTIONS[match[2]]
            asked[name] = match[3]
    return asked
