"""The picture of the report in docs/: tests/data/report.json as today's page, seen by Chromium.

python benchmarks/report_picture.py  # makes it again; needs chromium
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import tempfile
import time
import zlib
from pathlib import Path

from slurm.report_page import page_lines

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests/data/report.json"  # of `shardprep report --json`
PICTURE = ROOT / "docs/pictures/report.png"
COLUMNS, ROWS = 1000, 2283  # the page down to the end of "How it was made"
_SIGNATURE_AND_HEADER = 8 + 25  # bytes of a PNG before its other parts


def page() -> str:
    """Return today's page of the recorded report. Its times are those of TZ."""
    return "\n".join(page_lines(json.loads(DATA.read_text(encoding="utf-8"))))


def page_of_picture() -> str:
    """Return the hash of the page that the picture shows."""
    png = PICTURE.read_bytes()
    begin = png.index(b"tEXtpage\0") + len(b"tEXtpage\0")
    return png[begin : begin + 64].decode()


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    os.environ["TZ"] = "UTC"
    time.tzset()
    text = page()
    with tempfile.TemporaryDirectory() as folder:
        source, shown = Path(folder, "page.html"), Path(folder, "page.png")
        source.write_text(text, encoding="utf-8")
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", f"--screenshot={shown}"]
        subprocess.run([*command, f"--window-size={COLUMNS},{ROWS}", source.as_uri()], check=True)
        png = shown.read_bytes()
    content = b"tEXtpage\0" + hash_of(text).encode()
    part = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    PICTURE.write_bytes(png[:_SIGNATURE_AND_HEADER] + part + png[_SIGNATURE_AND_HEADER:])


if __name__ == "__main__":
    main()
