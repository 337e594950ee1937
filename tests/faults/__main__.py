"""``python -m tests.faults``: run the campaigns, print the table and each distinct failure."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.faults import (
    altered_inputs,
    bad_json,
    bit_flips,
    clocks,
    full_disks,
    fuzzed_inputs,
    injected_errors,
    kills,
    races,
    replaced_files,
    short_transfers,
    stop_signals,
)
from tests.faults.os_calls import is_preloaded, start_preloaded
from tests.faults.outcomes import as_json, failures, findings, table
from tests.faults.small_data_sets import FORMS, make_small_data_sets

CAMPAIGNS = {
    "bit_flips": bit_flips,
    "bad_json": bad_json,
    "replaced_files": replaced_files,
    "injected_errors": injected_errors,
    "short_transfers": short_transfers,
    "full_disks": full_disks,
    "kills": kills,
    "stop_signals": stop_signals,
    "races": races,
    "clocks": clocks,
    "altered_inputs": altered_inputs,
    "fuzzed_inputs": fuzzed_inputs,
}
# Of each file or hit and command. Full takes some 2 hours of one core, quick some 4 s per campaign.
_FAULTS = 200
_QUICK_FAULTS = dict.fromkeys(CAMPAIGNS, 2) | {"bit_flips": 1, "injected_errors": 1}
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
    usual = "QUICK_FORMS" if args.quick else "FORMS"
    wanted = {name: args.form or getattr(CAMPAIGNS[name], usual) for name in chosen}
    forms = sorted({form for forms in wanted.values() for form in forms})
    data_sets = make_small_data_sets(folder, forms)
    outcomes, spoke = [], time.monotonic()
    for name in chosen:
        of_campaign = [data_set for data_set in data_sets if data_set.form in wanted[name]]
        num_faults = args.num_faults or (_QUICK_FAULTS[name] if args.quick else _FAULTS)
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
