"""Whether ``preprocess`` is this project's package: a user's own preprocess.py beside a script hides it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def need_preprocess() -> None:
    """Raise ImportError where another module has the name; nothing of it is run.

    ``python -m`` of this package ends with a line on standard error and exit code 2 instead.
    """
    found = _hiding("preprocess", "plan.py")
    if found is None:
        return
    message = (
        f"{found} hides shardprep's package of the same name, which is needed here; rename it, or keep it "
        "away from the script that you start and from the folder that you start it in"
    )
    if sys.argv[:1] == ["-m"]:  # so it is while Python looks for the package that it shall run
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(2)
    raise ImportError(message, name="preprocess", path=found)


def _hiding(name: str, part: str) -> str | None:
    """File or folder that Python takes for the package ``name`` although it has no ``part``."""
    if module := sys.modules.get(name):
        origin, places = getattr(module, "__file__", None), list(getattr(module, "__path__", ()))
    elif spec := importlib.util.find_spec(name):
        origin, places = spec.origin, list(spec.submodule_search_locations or ())
    else:
        return None  # not there at all: Python says so itself
    if any((Path(place) / part).is_file() for place in places):
        return None
    return origin or (places[0] if places else name)
