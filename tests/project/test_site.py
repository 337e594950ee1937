"""The site of the documentation: built strictly, without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT

pytest.importorskip("material", reason="mkdocs-material is not installed: make install")


@pytest.mark.processes
def test_the_site_has_every_page_no_broken_link_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / ".site/mkdocs.yml")]
    built = subprocess.run([*command, "-d", str(tmp_path)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"results", "CHANGELOG", "README.ko"}
    assert pages <= {path.stem for path in tmp_path.rglob("*.html")}
    listed = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert all(f"{page}.html)" in listed for page in pages)
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text("utf-8")
        )
        assert loaded == [], page
