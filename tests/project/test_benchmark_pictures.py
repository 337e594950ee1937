"""What the benchmarks make of their figures: the picture of ratios, the table of bounds."""

from __future__ import annotations

import importlib
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from tests.checkout import ROOT

_SVG = "{http://www.w3.org/2000/svg}"
PRINTED = """
| CPU s per MB, one core | Korean | English | start, s |
|---|---|---|---|
| baseline | 1.90 (1.64-1.99) 1.0x | 0.53 (0.40-0.61) 1.0x | 3.5 |
| **ours** documents | 0.08 (0.07-0.09) 23.0x | 0.02 (0.01-0.02) 33.1x | 1.6 |

| loader | Mtok per CPU second | times the baseline |
|---|---|---|
| **ours** | 155 (153-193) | 165 |
"""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def rectangles(svg: ET.Element, kind: str) -> list[dict[str, float]]:
    found = [each.attrib for each in svg.iter(f"{_SVG}rect") if each.get("class") == kind]
    return [{name: float(each[name]) for name in ("x", "y", "width", "height")} for each in found]


def test_bars_are_as_long_as_their_ratios_and_nothing_leaves_the_picture(benchmarks: Any) -> None:
    of = benchmarks("ratio_picture")
    rows = [
        of.Bars(label="first <script> & co", values=[1.0, 2.0]),
        of.Bars(label="a peer " + "m" * 90, values=[4.0, None]),  # without a second figure
        of.Bars(label="ours", values=[8.04, 92.4], is_ours=True),
    ]
    svg = ET.fromstring(of.picture("Times", ["Korean", "English"], rows, foot="one core"))
    (first, peer, second), ours = rectangles(svg, "bar"), rectangles(svg, "bar ours")
    assert ours[0]["width"] / first["width"] == pytest.approx(8.04, rel=0.01)
    assert ours[0]["width"] / peer["width"] == pytest.approx(2.01, rel=0.01)
    assert ours[1]["width"] / second["width"] == pytest.approx(46.2, rel=0.05)
    texts = {text.text for text in svg.iter(f"{_SVG}text")}
    assert {"first <script> & co", "1.0x", "2.0x", "4.0x", "-", "8.0x", "92x", "one core"} <= texts
    assert max(len(text or "") for text in texts) <= 48, "a long name is cut"
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    for each in [first, second, peer, *ours]:
        assert 0 < each["x"] < each["x"] + each["width"] < width - 50  # the number has its room
        assert 0 < each["y"] < each["y"] + each["height"] < height
    assert not list(svg.iter(f"{_SVG}script"))
    # In light and in dark a picture has a background and text of its own.
    light, dark = (next(svg.iter(f"{_SVG}style")).text or "").split("@media (prefers-color-scheme: dark)")
    for part in (".back", "text", ".bar", ".ours"):
        colors = [half.split(f"{part} {{ fill: ")[1][:7] for half in (light, dark)]
        assert colors[0] != colors[1]


def test_a_printed_table_gives_its_ratios_and_nothing_else(benchmarks: Any) -> None:
    of = benchmarks("ratio_picture")
    columns, rows = of.ratios_of_table(PRINTED, "CPU s per MB")
    assert columns == ["Korean", "English"]
    assert [(row.label, row.values, row.is_ours) for row in rows] == [
        ("baseline", [1.0, 1.0], False),
        ("ours documents", [23.0, 33.1], True),
    ]
    assert of.ratios_of_table(PRINTED, "Mtok")[1][0].values == [165.0]
    assert set(of.pictures(PRINTED)) == {"preprocess_speed", "loader_speed"}
    with pytest.raises(ValueError):  # noqa: PT011
        of.ratios_of_table(PRINTED, "another")
    with pytest.raises(ValueError):  # noqa: PT011
        of.picture("Times", ["a", "b"], [of.Bars(label="ours", values=[1.0])], foot="")


@pytest.mark.parametrize("name", ["preprocess_speed", "loader_speed"])
def test_the_pictures_of_the_readme_are_those_of_the_tables_in_the_docs(benchmarks: Any, name: str) -> None:
    pages = [path for path in (ROOT / "docs/speed.md", ROOT / "benchmarks/results.md") if path.exists()]
    tables = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    drawn = (ROOT / f"docs/pictures/{name}.svg").read_text(encoding="utf-8")
    expected = benchmarks("ratio_picture").pictures(tables)[name]
    assert drawn == expected, "draw them anew: python benchmarks/ratio_picture.py docs/speed.md docs/pictures"
    for path in (ROOT / "README.md", ROOT / "README.ko.md"):
        assert f"docs/pictures/{name}.svg" in path.read_text(encoding="utf-8")


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
