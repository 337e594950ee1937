"""``python -m tests.slurm.until_done``: on a real Slurm, ``submit --until_done`` heals a disturbed data set.

Shards run out of memory and of time, one loses its node, one is cancelled, one is killed, the set-up of one
exits, and one input is half undecodable, which is accepted. Nobody types anything. At the end the bytes are
those of a set that nothing disturbed, and no record of an attempt is left.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.children import run_child
from tests.slurm.started_cluster import FAULTY_PYTHON, kill_node, started_cluster
from tests.waiting import wait_until

_HEALED_S = 1500
_MARKERS = {  # fault -> what FAULTY_PYTHON and the set-up file look for
    "node": ["survive"],
    "killed": ["kill"],
    "set-up": ["setup"],
    "memory": ["memory", "first"],
    "time limit": ["sleep"],
    "cancelled": ["sleep"],
}
_FIRST = (0, 1, 2, 4, 5, 6)  # the shards of these: 0-3 are on one node, which goes, and 4-7 on another one
_SETUP = "[[ -z ${{shards:-}} ]] || ! rm {place}/setup-$shards 2>/dev/null || exit 3\n"


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """A place for the files, and what finds the cluster and our commands."""

    place: Path
    environ: dict[str, str]

    def run(self, *command: object) -> str:
        """Run a command from a folder that is not the checkout; returns its output."""
        return run_child([str(word) for word in command], env=self.environ, cwd="/").stdout

    def status(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.run("shardprep", "status", self.place / "O", "--json"))
        return state

    def plan(self, num_shards: int) -> None:
        """Two plans of the same inputs, one file a shard; the second one is made undisturbed."""
        raw = self.place / "raw"
        raw.mkdir()
        for number in range(num_shards):
            lines = [f"{number}번째 파일의 {line}번째 줄. Line {line}.".encode() for line in range(300)]
            (raw / f"{number:03d}.txt").write_bytes(b"\n".join(lines))
        model = self.place / "model"
        train = ["--input_dir", raw, "--vocab_size", 600, "--output_dir", model]
        self.run("shardprep", "train_tokenizer", *train)
        (raw / f"{num_shards - 1:03d}.txt").write_bytes(b"\xff\xfe bad\ngood\n" * 150)
        for name in ("O", "undisturbed"):
            flags = ["--input_dir", raw, "--output_dir", self.place / name, "--model_id", model]
            self.run("shardprep", "plan", *flags)
        self.run("shardprep", "run", self.place / "undisturbed", "--max_bad_fraction", 0.6)

    def arm(self, num_shards: int) -> dict[str, int]:
        """Have the first shards fail, and every fifth of the others; returns fault -> its first shard."""
        faults = dict(zip(_FIRST, _MARKERS, strict=True)) | {
            shard: ("memory", "time limit", "killed")[shard // 5 % 3]
            for shard in range(10, num_shards - 1, 5)
        }
        for shard, fault in faults.items():
            for marker in _MARKERS[fault]:
                (self.place / f"{marker}-{shard}").touch()
        quoted = f"'{self.place}'"
        (self.place / "set up.sh").write_text(_SETUP.format(place=quoted))
        python = self.place / "python"
        python.write_text(FAULTY_PYTHON.format(real=sys.executable, place=quoted))
        python.chmod(0o755)
        self.environ["SHARDPREP_PYTHON"] = str(python)
        return {fault: shard for shard, fault in reversed(faults.items())}

    def submit(self) -> str:
        """Send it with too little of everything; returns the array's job."""
        flags = ["--cpus_per_task", 1, "--mem_gb", 0.2, "--time_min", 1, "--setup", self.place / "set up.sh"]
        flags += ["--sbatch_args", "--no-requeue", "--worker_args", "--max_bad_fraction 0.6"]
        print(self.run("shardprep", "submit", self.place / "O", *flags, "--until_done"))
        submission = json.loads((self.place / "O" / "jobs" / "0000.json").read_text())
        job: str = submission["arrays"][0]["job_id"]
        return job

    def watch(self) -> list[str]:
        """Wait for the controller's last word; prints each change, returns the history's events."""
        seen: list[str] = []
        events: list[str] = []

        def has_ended() -> bool:
            state = self.status()
            if (words := f"{state['num_done']} done; {state['causes']}") not in seen:
                seen.append(words)
                print(words, flush=True)
            events[:] = [event["event"] for event in state["history"]]
            return "finished" in events or "stopped" in events

        wait_until(has_ended, _HEALED_S, 2)
        return events


def heal(campaign: Campaign, num_shards: int) -> None:
    """Disturb a data set of so many shards, and look at what is made of it."""
    place = campaign.place
    campaign.plan(num_shards)
    shard_of = campaign.arm(num_shards)
    job = campaign.submit()
    cancelled = shard_of["cancelled"]
    wait_until(lambda: not (place / f"sleep-{cancelled}").exists())
    campaign.run("scancel", f"{job}_{cancelled}")
    wait_until((place / "surviving").exists)
    node = campaign.run("squeue", "-h", f"--jobs={job}_{shard_of['node']}", "--format=%N").strip()
    kill_node(campaign.environ, node)
    events = campaign.watch()
    (place / "release").touch()
    print(campaign.run("shardprep", "status", place / "O"))
    assert "stopped" not in events
    assert campaign.status()["verified"]
    left = list((place / "O" / "jobs" / "attempts").iterdir())
    assert not left, f"records of what is done: {left}"
    made = [path for path in (place / "undisturbed").glob("shard-*") if path.suffix != ".json"]
    differing = [path.name for path in made if not filecmp.cmp(path, place / "O" / path.name, shallow=False)]
    assert len(made) == 2 * num_shards
    assert not differing, differing
    assert (place / "O" / "report.html").stat().st_size > 1000
    print(f"{num_shards} shards were healed, their bytes are equal")


def main() -> int:
    """Start a cluster, run the campaign, end the cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_shards", type=int, default=8)
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd")
    parser.add_argument(
        "--min_job_age", type=int, default=10, help="seconds for which Slurm knows what ended"
    )
    args = parser.parse_args()
    kept = {n: v for n, v in os.environ.items() if not re.match("SLURM|SBATCH|SHARDPREP|DATASET_", n)}
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
    options = {"NUM_NODES": "3", "NODE_CPUS": "4", "NODE_MEM_MB": "4000", "HF_HUB_OFFLINE": "1"}
    options |= {"CGROUP": str(int(os.access("/sys/fs/cgroup/memory", os.W_OK)))}
    options |= {"ACCOUNTING": str(int(args.accounting)), "EXTRA_CONF": f"MinJobAge={args.min_job_age}"}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="until done ") as folder,
            started_cluster({**kept, **options}, "NO SLURM CLUSTER, untested: --until_done") as environ,
        ):
            heal(Campaign(place=Path(folder), environ=environ), args.num_shards)
    except pytest.skip.Exception as why:
        print(why)
    return 0


if __name__ == "__main__":
    sys.exit(main())
