"""The pictures of the README show the figures that the benchmarks printed."""

from __future__ import annotations

import importlib
import xml.etree.ElementTree as ET

import pytest

from tests.checkout import ROOT

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", ["preprocess_speed", "loader_speed"])
def test_the_pictures_of_the_readme_are_those_of_the_tables_in_the_docs_and_as_long_as_their_ratios(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    drawn = (ROOT / f"docs/pictures/{name}.svg").read_text(encoding="utf-8")
    expected = importlib.import_module("ratio_picture").pictures(tables)[name]
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
