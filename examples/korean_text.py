"""Only Korean text, in composed letters (NFC): plan --transform korean_text.py."""

import re
import unicodedata

from shardprep import LeaveOut

HANGUL = re.compile("[\uac00-\ud7a3]")


def transform(record: dict[str, str]) -> str:
    text = unicodedata.normalize("NFC", record["text"])
    num_letters = sum(map(str.isalpha, text))
    if len(HANGUL.findall(text)) <= num_letters / 2:
        raise LeaveOut("not Korean")
    return text
