"""Whether a name such as ``preprocess`` leads to this project: a user's own preprocess.py can hide ours.

A script of that name beside the script that is started, or in the folder of ``python -m``, is found first.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HOME = Path(__file__).parents[1]  # our packages stand beside one another, installed or not


def check_not_hidden(package: str) -> None:
    """Raise ImportError where another module has the name of one of our packages.

    In a ``python -m`` of our packages it is a line on standard error and exit code 2 instead.
    """
    spec = importlib.util.find_spec(package)
    if spec is None:
        return  # not there at all: Python says so itself
    places = list(spec.submodule_search_locations or ())
    if any(Path(place).parent.samefile(HOME) for place in places):
        return
    found = spec.origin or (places[0] if places else package)
    message = (
        f"{found} hides shardprep's package of the same name, which is needed here; rename it, or keep it "
        "away from the script that you start and from the folder that you start it in"
    )
    if sys.argv[:1] == ["-m"]:  # so it is while Python looks for the package that it shall run
        from shardprep.console import say

        say(f"error: {message}")
        raise SystemExit(2)
    raise ImportError(message, name=package, path=found)
