"""Keep Korean reviews with a minimum length, without URLs and without a letter ten times in a row."""

import re

HANGUL = re.compile("[\uac00-\ud7a3]")
BAD = re.compile(r"https?://|www\.|(\S)\1{9}")


def transform(record: dict[str, str]) -> str | None:
    text = record["text"]
    if len(text) < 20 or BAD.search(text) or len(HANGUL.findall(text)) < 0.5 * len(text):
        return None
    return text
