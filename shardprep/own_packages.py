"""Whether a name such as ``preprocess`` leads to this project: a user's own preprocess.py can hide ours.

A script of that name beside the script that is started, or in the folder of ``python -m``, is found first.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import importlib.metadata

HOME = Path(__file__).parents[1]  # our packages stand beside one another, installed or not


def check_not_hidden(package: str) -> None:
    """Raise ImportError where another module has the name of one of our packages.

    In a ``python -m`` of our packages it is a line on standard error and exit code 2 instead.
    """
    found = _hiding(package)
    if found is None:
        return
    message = (
        f"{found} hides shardprep's package of the same name, which is needed here; rename it, or keep it "
        "away from the script that you start and from the folder that you start it in"
    )
    if sys.argv[:1] == ["-m"]:  # so it is while Python looks for the package that it shall run
        from shardprep.console import say

        say(f"error: {message}")
        raise SystemExit(2)
    raise ImportError(message, name=package, path=found)


def _hiding(package: str) -> str | None:
    """The file or folder that Python takes for the package, if it is not ours."""
    if module := sys.modules.get(package):
        origin, places = getattr(module, "__file__", None), list(getattr(module, "__path__", ()))
    elif spec := importlib.util.find_spec(package):
        origin, places = spec.origin, list(spec.submodule_search_locations or ())
    else:
        return None  # not there at all: Python says so itself
    if any(Path(place).parent.samefile(HOME) for place in places):
        return None
    return origin or (places[0] if places else package)


def mixed_packages() -> list[str]:
    """Return what another installed distribution did to our packages: pip overwrites files without a word."""
    import importlib.metadata  # 30 ms, which only an error is worth

    beside = [each for each in importlib.metadata.distributions(path=[str(HOME)]) if each.files]
    own = [file for each in beside if each.metadata["Name"] == "shardprep" for file in each.files or []]
    names = {file.parts[0] for file in own if file.suffix == ".py" and len(file.parts) > 1}
    lines = [f"{file.locate()} is not shardprep's own, or is missing" for file in own if _is_changed(file)]
    del lines[1:]
    for each in beside:
        theirs = [file for file in each.files or [] if file.parts[0] in names and file.suffix == ".py"]
        if theirs and each.metadata["Name"] != "shardprep":
            more = f" and {len(theirs) - 1} more files" if len(theirs) > 1 else ""
            lines.append(f"{each.metadata['Name']} has installed {theirs[0].locate()}{more} into it")
    return lines


REMEDY = "install shardprep anew, in a virtual environment of its own"


def _is_changed(file: importlib.metadata.PackagePath) -> bool:
    path = Path(str(file.locate()))
    is_listed = file.suffix == ".py" and file.size is not None
    return is_listed and not (path.is_file() and path.stat().st_size == file.size)
