"""Why jobs wait, by Slurm's reason, and what a person must do."""

from __future__ import annotations

import os
import re

# Pattern of Slurm's reason, its meaning, and what a person must do: release the job, cancel it (and submit
# again, because it can never run) or ask an administrator. The first match counts.
_LESS = "cancel, and ask for less"
_REASONS = (
    ("Resources", "it gets the next free nodes", ""),
    ("Priority", "other jobs have a higher priority", ""),
    ("JobArrayTaskLimit", "as many tasks run as --max_parallel allows", ""),
    ("JobHeldAdmin", "held by an administrator; ask them", "ask"),
    ("launch.failed.requeued.held", "held; its node could not start it (a prolog failed?)", "release"),
    ("JobHeld|job.requeued.in.held|JobHoldMax|ReservationDel", "held until it is released", "release"),
    ("suspended", "suspended by an administrator, or by Slurm for other jobs; ask if it lasts", "ask"),
    ("BeginTime", "its start time has not come; a requeued job waits a little first", ""),
    ("DependencyNever", "the job that it waits for failed: cancel, and submit again", "cancel"),
    ("Dependency", "it waits for another job", ""),
    ("ReqNodeNotAvail|Nodes required", "the nodes that it needs are down, drained or reserved; sinfo -R", ""),
    ("PartitionDown|PartitionInactive", "the partition is down or inactive; ask an administrator", ""),
    ("PartitionTimeLimit", f"its time limit is above the partition's: {_LESS} --time_min", "cancel"),
    ("PartitionNodeLimit|PartitionConfig", f"no node of the partition is large enough: {_LESS}", "cancel"),
    ("BadConstraints", "no node meets its constraints: cancel, and change SBATCH_CONSTRAINT", "cancel"),
    ("Reservation", "its reservation has not begun", ""),
    ("Invalid(Account|QOS)|(Account|QOS)NotAllowed", "change --account or SBATCH_QOS", "cancel"),
    (r"(Assoc|QOS)\w*(PerJob|PerNode|MaxWall)", f"above a limit of the account or QOS: {_LESS}", "cancel"),
    (r"QOSMin[A-Z]", "it is below the least that the QOS gives: cancel, and ask for more", "cancel"),
    ("MaxMemPerLimit", f"above the memory that the partition gives: {_LESS} --mem_gb", "cancel"),
    (r"(Assoc|QOS)Grp\w*RunMin", "the account or QOS runs as much as it allows", ""),
    (r"(Assoc|QOS)Grp\w*Minutes", "no hours are left: cancel, and change --account or SBATCH_QOS", "cancel"),
    ("Assoc|QOS|MaxMem", "a limit of the account, the QOS or of memory is reached", ""),
)


def meaning_of(reason: str) -> tuple[str, str]:
    """Return the meaning of a reason, and ``release``, ``cancel`` or ``ask`` if a person must act.

    squeue joins the reasons of an array's waiting tasks by commas, such as ``JobArrayTaskLimit,JobHeldUser``.
    """
    meanings: list[str] = []
    actions: list[str] = []
    for each in reasons_of(reason):
        for pattern, meaning, action in _REASONS:
            if re.match(pattern, each):
                meanings.append(meaning)
                actions.append(action)
                break
    shown = meanings[:1] + [f"some are {meaning}" for meaning in meanings[1:] if meaning.startswith("held")]
    action = next((action for action in actions if action), "")
    if len(actions) > 1 and action == "ask" and os.geteuid() == 0:
        action = "release"  # this user is an administrator
    return "; ".join(shown), action


def reasons_of(reason: str) -> list[str]:
    """Return the reasons that squeue joined. A comma before a blank is a part of one reason."""
    return re.split(r",(?=[A-Z][A-Za-z]+(?:,|$|\()|launch.failed|job.requeued)", reason)
