"""Read the examples of the documentation, to run them as shown."""

from __future__ import annotations

import re
from typing import Any

from tests.checkout import ROOT


def examples_of(page: str, section: str = "") -> list[str]:
    """Return the Python examples of README.md or a page of docs/, or of one section of it."""
    path = ROOT / page if page == "README.md" else ROOT / "docs" / page
    text = path.read_text(encoding="utf-8")
    if section:
        text = text.partition(f"{section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def example(page: str, section: str, number: int) -> Any:
    """Compile an example of a section of docs/PAGE; ``number`` counts from 0."""
    return compile(examples_of(page, section)[number], page, "exec")
