"""Short forms of the fault campaigns; ``python -m tests.faults`` runs them at length."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc compiles what injects the faults")


def campaign(name: str, folder: Path) -> list[dict[str, Any]]:
    """The outcomes of the short form of a campaign, in a process of its own: it forks for each of them."""
    path = folder / "outcomes.json"
    command = [sys.executable, "-m", "tests.faults", "--quick", "--only", name, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert path.exists(), done.stderr
    return list(json.loads(path.read_bytes()))


def shown(outcomes: list[dict[str, Any]]) -> str:
    return "\n".join(str(outcome) for outcome in outcomes[:20])


def failed(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [outcome for outcome in outcomes if outcome["kind"] not in ("refused", "equal")]


def test_a_flipped_bit_is_refused_or_without_effect(tmp_path: Path) -> None:
    outcomes = campaign("bit_flips", tmp_path)
    assert len(outcomes) > 150
    assert {outcome["kind"] for outcome in outcomes} >= {"refused", "equal"}
    assert not failed(outcomes), shown(failed(outcomes))


def test_bad_json_is_refused_in_words_or_without_effect(tmp_path: Path) -> None:
    outcomes = campaign("bad_json", tmp_path)
    assert len(outcomes) > 150
    assert {outcome["kind"] for outcome in outcomes} >= {"refused", "equal"}
    assert not failed(outcomes), shown(failed(outcomes))


def test_an_error_of_any_call_is_named_and_the_command_run_again_gives_equal_bytes(tmp_path: Path) -> None:
    outcomes = campaign("injected_errors", tmp_path)
    assert len(outcomes) > 150
    assert {outcome["kind"] for outcome in outcomes} >= {"refused", "equal"}
    assert not failed(outcomes), shown(failed(outcomes))


def test_a_kill_at_any_call_leaves_what_is_done_or_nothing_that_counts(tmp_path: Path) -> None:
    outcomes = campaign("kills", tmp_path)
    assert len(outcomes) > 70
    assert not failed(outcomes), shown(failed(outcomes))
