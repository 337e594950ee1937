"""The pictures of the README and the table of bounds show the figures that the benchmarks printed."""

from __future__ import annotations

import importlib
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from tests.checkout import ROOT

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.mark.parametrize("name", ["preprocess_speed", "loader_speed"])
def test_the_pictures_of_the_readme_are_those_of_the_tables_in_the_docs_and_as_long_as_their_ratios(
    benchmarks: Any, name: str
) -> None:
    tables = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    drawn = (ROOT / f"docs/pictures/{name}.svg").read_text(encoding="utf-8")
    expected = benchmarks("ratio_picture").pictures(tables)[name]
    assert drawn == expected, "draw them anew: python benchmarks/ratio_picture.py docs/speed.md docs/pictures"
    for path in (ROOT / "README.md", ROOT / "README.ko.md"):
        assert f"docs/pictures/{name}.svg" in path.read_text(encoding="utf-8")
    svg = ET.fromstring(drawn)
    bars = [each.attrib for each in svg.iter(f"{SVG}rect") if each.attrib["class"].startswith("bar")]
    texts = [each.text or "" for each in svg.iter(f"{SVG}text")]
    numbers = [float(text[:-1].replace(",", "")) for text in texts if text.endswith("x")]
    assert len(numbers) == len(bars) > 2
    widths: dict[str, list[tuple[float, float]]] = {}  # of the bars of a column, with their numbers
    for bar, number in zip(bars, numbers, strict=True):
        widths.setdefault(bar["x"], []).append((number, float(bar["width"])))
    for column in widths.values():
        longest, width = max(column)
        assert all(each == pytest.approx(width * number / longest, abs=2) for number, each in column)


def test_the_bounds_add_up_and_stand_beside_what_is_reached(benchmarks: Any) -> None:
    """tmpfs stands beside the disk, so it is in no sum; a stage that one form lacks is a dash."""
    of = benchmarks("stage_bounds")
    runs = [{of.ENCODE: 3.0, of.DISK: 1.0, of.TMPFS: 9.0}, {of.ENCODE: 5.0, of.DISK: 1.0, of.TMPFS: 9.0}]
    packed, documents = of.medians(runs), {of.ENCODE: 1.0, of.JSON_IDS: 0.5}
    lines = of.bounds_table("s", ["a", "b"], [packed, documents], [10.0, 2.0], digits=1).splitlines()
    cells = {row[1]: row[2:4] for row in ([cell.strip() for cell in line.split("|")] for line in lines)}
    assert cells[of.ENCODE] == ["4.0", "1.0"]
    assert cells[of.JSON_IDS] == ["-", "0.5"]
    assert cells["sum of these bounds"] == ["5.0", "1.5"]
    assert cells["reached"] == ["10.0", "2.0"]
    assert cells["the bounds' share of it"] == ["50 %", "75 %"]
