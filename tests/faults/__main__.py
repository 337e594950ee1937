"""``python -m tests.faults``: run the campaigns, print the table and each distinct failure."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults import (
    at_calls,
    bad_json,
    clocks,
    disturbed_files,
    full_disks,
    power_loss,
    races,
)  # fmt: skip
from tests.faults.os_calls import is_preloaded, start_preloaded
from tests.faults.outcomes import Outcome, as_json, failures, findings, table
from tests.faults.small_data_sets import FORMS, make_small_data_sets


@dataclass(frozen=True)
class Campaign:
    """What is tried on which forms of data sets; ``num_quick``: faults of each file or command, in short."""

    outcomes: Callable[..., Iterator[Outcome]]
    forms: tuple[str, ...]
    quick_forms: tuple[str, ...] = ("best_fit",)
    num_quick: int = 2


_TWO, _ALL = ("json", "best_fit"), ("json", "best_fit", "formats")
CAMPAIGNS = {
    "bit_flips": Campaign(disturbed_files.bit_flips, ("json", "npy", "concat", "best_fit"), num_quick=1),
    "edited_files": Campaign(disturbed_files.edited_files, _TWO, num_quick=1),
    "replaced_files": Campaign(disturbed_files.replaced_files, ("npy", "best_fit")),
    "bad_json": Campaign(bad_json.outcomes, ("concat", "json"), num_quick=1),
    "injected_errors": Campaign(at_calls.injected_errors, _ALL, num_quick=1),
    "short_transfers": Campaign(at_calls.short_transfers, ("json", "npy", "best_fit")),
    "full_disks": Campaign(full_disks.outcomes, _TWO),
    "kills": Campaign(at_calls.kills, _ALL),
    "stop_signals": Campaign(at_calls.stop_signals, _ALL),
    "power_loss": Campaign(power_loss.outcomes, _TWO, num_quick=1),
    "races": Campaign(races.outcomes, _TWO),
    "clocks": Campaign(clocks.outcomes, _TWO),
}
# Of each file or hit and command. Full takes some 2 hours of one core, quick some 4 s per campaign.
_FAULTS = 200
_SPEAK_EVERY_S = 30


def main() -> int:
    """0 where nothing failed, 1 where something did."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # faults have surrogates
    args = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        if not is_preloaded():
            return start_preloaded(Path(folder), ["-m", "tests.faults", *sys.argv[1:]])
        return _run(args, Path(folder))


def _run(args: argparse.Namespace, folder: Path) -> int:
    chosen = args.only or list(CAMPAIGNS)
    wanted = {}
    for name in chosen:
        campaign = CAMPAIGNS[name]
        wanted[name] = args.form or (campaign.quick_forms if args.quick else campaign.forms)
    forms = sorted({form for forms in wanted.values() for form in forms})
    data_sets = make_small_data_sets(folder, forms)
    outcomes, spoke = [], time.monotonic()
    for name in chosen:
        of_campaign = [data_set for data_set in data_sets if data_set.form in wanted[name]]
        num_faults = args.num_faults or (CAMPAIGNS[name].num_quick if args.quick else _FAULTS)
        for outcome in CAMPAIGNS[name].outcomes(of_campaign, num_faults=num_faults):
            outcomes.append(outcome)
            if time.monotonic() - spoke > _SPEAK_EVERY_S:
                spoke = time.monotonic()
                print(f"{name}: {len(outcomes)} tried, {len(failures(outcomes))} failed", file=sys.stderr)
                if args.json:
                    args.json.write_text(json.dumps(as_json(outcomes)), encoding="utf-8")
        if args.json:
            args.json.write_text(json.dumps(as_json(outcomes)), encoding="utf-8")
        print(f"{name}: ended", flush=True)
    print(table(outcomes))
    print()
    print(findings(outcomes))
    return 1 if failures(outcomes) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="some faults of each kind")
    parser.add_argument("--num_faults", type=int, help="of each file or command (default 200, quick 2)")
    parser.add_argument("--only", action="append", choices=CAMPAIGNS, help="this campaign; may be repeated")
    parser.add_argument("--form", action="append", choices=FORMS, help="of data set; may be repeated")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
