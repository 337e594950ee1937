"""The examples of our pages, to be run as they are shown."""

from __future__ import annotations

import re
from typing import Any

from tests.checkout import ROOT


def example(page: str, section: str, number: int) -> Any:
    """The code of the n-th example of a section of docs/PAGE, from 0."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    examples = re.findall(
        r"```python\n(.*?)```", text.partition(f"{section}\n")[2].partition("\n## ")[0], re.DOTALL
    )
    return compile(examples[number], page, "exec")
