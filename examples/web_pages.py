"""The main text of the pages of WARC files: plan --transform web_pages.py.

It needs resiliparse: pip install '.[warc]' resiliparse
"""

from typing import Any

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import detect_encoding
from resiliparse.parse.html import HTMLTree


def transform(record: dict[str, Any]) -> str:
    html = record["html"]
    tree = HTMLTree.parse_from_bytes(html, detect_encoding(html))
    return str(extract_plain_text(tree, main_content=True))
