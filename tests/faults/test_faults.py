"""Short forms of the fault campaigns; ``python -m tests.faults`` runs the full ones."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.children import run_child
from tests.faults.os_calls import preloading_environ
from tests.faults.recorded import recorded

pytestmark = [
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to compile os_calls.c"),
    pytest.mark.timeout(1800),  # they need much CPU time, and the machine may be busy
]

# Campaign -> minimum number of outcomes, and kinds that must occur, so that no campaign passes vacuously.
CAMPAIGNS: dict[str, tuple[int, set[str]]] = {
    "bit_flips": (15, {"refused", "equal"}),
    "edited_files": (10, {"refused"}),
    "bad_json": (35, {"refused", "equal"}),
    "replaced_files": (18, {"refused", "equal"}),
    "injected_errors": (25, {"refused", "equal"}),
    "short_transfers": (15, {"equal"}),
    "full_disks": (3, {"refused", "equal"}),
    "kills": (10, {"equal"}),
    "deaths": (2, {"refused", "equal"}),
    "stop_signals": (15, {"refused"}),
    "power_loss": (28, {"equal"}),
    "races": (3, {"equal"}),
    "changes": (3, {"refused"}),
    "clocks": (8, {"equal"}),
    "hostile_sets": (18, {"refused", "equal"}),
}
Outcomes = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def of_campaign(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The outcomes by campaign. One process runs all, because making the data sets takes 8 s of CPU time."""
    folder = tmp_path_factory.mktemp("faults")
    path = folder / "outcomes.jsonl"
    # With this environment it need not start itself anew, which would take all imports a second time.
    environ = preloading_environ(folder)
    run_child([sys.executable, "-m", "tests.faults", "--quick", "--json", str(path)], code=None, env=environ)
    found: Outcomes = {}
    for line in path.read_bytes().splitlines():
        outcome = json.loads(line)
        found.setdefault(outcome["campaign"], []).append(outcome)
    return found


@pytest.mark.parametrize("campaign", CAMPAIGNS)
def test_a_disturbed_file_is_refused_or_has_no_effect(of_campaign: Outcomes, campaign: str) -> None:
    least, kinds = CAMPAIGNS[campaign]
    outcomes = of_campaign.get(campaign, [])
    if campaign == "full_disks" and not outcomes:
        pytest.skip("no tmpfs can be mounted here")
    failed = [outcome for outcome in outcomes if outcome["kind"] not in ("refused", "equal")]
    assert not failed, "\n".join(map(str, failed[:20]))
    assert len(outcomes) >= least
    assert {outcome["kind"] for outcome in outcomes} >= kinds


def test_the_power_loss_campaign_notices_a_missing_fsync(of_campaign: Outcomes) -> None:
    """Without fsync of files, of folders and of both. An outcome is "equal" if it was noticed."""
    tried = [each for each in of_campaign["power_loss"] if each["fault"].endswith("without fsync")]
    noticed = sorted(each["command"] for each in tried if each["kind"] == "equal")
    assert noticed == ["plan"] * 3 + ["shard"] * 3 + ["verify"] * 3


@dataclass(frozen=True)
class Result:
    """An outcome of a campaign that takes no time."""

    kind: str


def test_a_campaign_that_is_stopped_has_its_outcomes_until_then(tmp_path: Path) -> None:
    first = Result(kind="equal")

    def stopped() -> Iterator[Result]:
        yield first
        raise KeyboardInterrupt

    assert recorded(stopped(), tmp_path / "outcomes") == ([first], False)
    assert json.loads((tmp_path / "outcomes").read_bytes()) == asdict(first)


ENDINGS = {
    "0, None": "ended",
    "exec('raise ShardprepError()')": "ended",
    "sys.exit(78)": "ended",
    "1 // 0": "traceback",
    "0, threading.Thread(target=lambda: 1 // 0).start()": "traceback",
    "os.abort()": "traceback",
    "0, bytearray(8 << 30)": "memory",
    "exec('while True: pass')": "hang",
    "os.kill(os.getpid(), 9)": "killed",
}


def test_a_forked_run_reports_how_it_ended() -> None:
    script = [
        "import os, sys, threading",
        "from tests.faults.forked_case import ForkedRun",
        "class ShardprepError(Exception): exit_code = 74",
        *(f"print(ForkedRun(lambda: ({work}), cpu_limit_s=1).end().how)" for work in ENDINGS),
    ]
    assert run_child([sys.executable, "-c", "\n".join(script)]).stdout.split() == list(ENDINGS.values())
