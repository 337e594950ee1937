"""Print pip constraints that hold each requirement of pyproject.toml at its lower bound."""

from __future__ import annotations

import re
import sys
from itertools import chain
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import pip._vendor.tomli as tomllib

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def lower_bounds(requirements: list[str]) -> list[str]:
    """``name>=version`` with whatever stands behind it -> ``name==version``."""
    found = [re.match(r"([\w.-]+)>=([\w.]+)", text) for text in requirements]
    return [f"{match[1]}=={match[2]}" for match in found if match]


if __name__ == "__main__":
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    print("\n".join(lower_bounds(requirements)))
