"""``python -m tests.faults``: run the campaigns, print the table and each distinct failure.

SIGTERM or Ctrl-C stops them. Then the table has the runs until then.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from tests.faults import disturbed_files, disturbed_runs, hostile_sets, power_loss
from tests.faults.judging import KINDS, Outcome, failures
from tests.faults.os_calls import preload
from tests.faults.recorded import recorded
from tests.faults.small_data_sets import FORMS, SmallDataSet, make_small_data_sets


class Campaign(NamedTuple):
    """A campaign and the forms of data sets that it runs on."""

    outcomes: Callable[..., Iterator[Outcome]]
    forms: tuple[str, ...] = ("json", "best_fit")
    num_quick: int = 2  # faults per file or command with --quick


_ALL = ("json", "best_fit", "formats")
CAMPAIGNS = {
    "bit_flips": Campaign(disturbed_files.bit_flips, ("json", "npy", "concat", "best_fit"), num_quick=1),
    "edited_files": Campaign(disturbed_files.edited_files, num_quick=1),
    "replaced_files": Campaign(disturbed_files.replaced_files, ("npy", "best_fit")),
    "bad_json": Campaign(disturbed_files.bad_json, ("concat", "json"), num_quick=1),
    "injected_errors": Campaign(disturbed_runs.injected_errors, _ALL, num_quick=1),
    "short_transfers": Campaign(disturbed_runs.short_transfers, ("json", "npy", "best_fit"), num_quick=1),
    "full_disks": Campaign(disturbed_runs.full_disks),
    "kills": Campaign(disturbed_runs.kills, _ALL, num_quick=1),
    "deaths": Campaign(disturbed_runs.deaths, num_quick=1),
    "stop_signals": Campaign(disturbed_runs.stop_signals, _ALL, num_quick=2),
    "power_loss": Campaign(power_loss.outcomes, num_quick=1),
    "races": Campaign(disturbed_runs.races),
    "clocks": Campaign(disturbed_runs.clocks),
    "hostile_sets": Campaign(hostile_sets.outcomes, ("with_ids", "best_fit")),
}
_QUICK_FORMS = ("best_fit",)
# Per file or command. All campaigns take about 2 hours of one core, and --quick about 2 s per campaign.
_NUM_FAULTS = 200


def main() -> int:
    """Run the campaigns and return 1 if there was a failure, else 0."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # faults have surrogates
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="try only a few faults of each kind")
    parser.add_argument("--every_file", action="store_true", help="hostile_sets: all files, all commands")
    parser.add_argument("--num_faults", type=int, help="faults per file or command (default: 200)")
    parser.add_argument("--only", action="append", choices=CAMPAIGNS, help="run this campaign (repeatable)")
    parser.add_argument("--form", action="append", choices=FORMS, help="use this data set form (repeatable)")
    parser.add_argument("--json", type=Path, help="write each outcome to this file, a line of JSON each")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        preload(Path(folder), ["-m", "tests.faults", *sys.argv[1:]])
        return _run(args, Path(folder))


def _run(args: argparse.Namespace, folder: Path) -> int:
    forms_of = {
        name: args.form or (_QUICK_FORMS if args.quick else CAMPAIGNS[name].forms)
        for name in args.only or CAMPAIGNS
    }
    data_sets = make_small_data_sets(folder, sorted({form for forms in forms_of.values() for form in forms}))
    planned = _outcomes(forms_of, data_sets, args)
    outcomes, is_complete = recorded(planned, args.json)
    _print_table(outcomes)
    _print_failures(failures(outcomes))
    if not is_complete:
        print("\nstopped: the campaigns are not complete")
    return 1 if failures(outcomes) or not is_complete else 0


def _outcomes(
    forms_of: Mapping[str, Sequence[str]], data_sets: Sequence[SmallDataSet], args: argparse.Namespace
) -> Iterator[Outcome]:
    """Run the campaigns one after the other."""
    for name, forms in forms_of.items():
        of_campaign = [data_set for data_set in data_sets if data_set.form in forms]
        num_faults = args.num_faults or (CAMPAIGNS[name].num_quick if args.quick else _NUM_FAULTS)
        outcomes = CAMPAIGNS[name].outcomes
        if name == "hostile_sets":
            outcomes = partial(outcomes, every_file=args.every_file)
        campaign = outcomes(of_campaign, num_faults=num_faults)
        yield from tqdm(campaign, name, mininterval=30, unit=" faults")


def _print_table(outcomes: Sequence[Outcome]) -> None:
    """Print the number of runs by how they ended, a line per campaign and command."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for outcome in outcomes:
        for command in (outcome.command, "all"):
            rows.setdefault((outcome.campaign, command), Counter())[outcome.kind] += 1
    print(f"{'campaign':<16}{'command':<16}{'tried':>8}", *(f"{kind:>10}" for kind in KINDS))
    for (campaign, command), counts in sorted(rows.items()):
        cells = (f"{counts[kind]:>10}" for kind in KINDS)
        print(f"{campaign:<16}{command:<16}{counts.total():>8}", *cells)


def _print_failures(failed: Sequence[Outcome]) -> None:
    """Print each distinct failure with its number of occurrences and one fault that causes it."""
    # Failures that agree in these fields most likely have one cause.
    causes: dict[tuple[str, ...], list[Outcome]] = {}
    for each in failed:
        causes.setdefault((each.campaign, each.command, each.kind, each.what), []).append(each)
    print(f"\n{len(causes)} distinct failures")
    for (campaign, command, kind, what), alike in sorted(causes.items(), key=lambda cause: -len(cause[1])):
        print(f"{len(alike):>6} x {campaign}, {command}: {kind}: {what}")
        print(f"         such as {alike[0].form}: {alike[0].fault}")


if __name__ == "__main__":
    sys.exit(main())
