"""Gopher's rules for text quality (Rae et al. 2021, table A1), with words separated by white space."""

import string
import unicodedata

from shardprep import LeaveOut

STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}


def is_symbol(char: str) -> bool:
    return char in string.punctuation or unicodedata.category(char)[0] in "PSC"


def transform(record: dict[str, str]) -> str:
    text = record["text"]
    words = text.split()
    spoken = [word for word in words if not all(map(is_symbol, word))]
    if not 50 <= len(spoken) <= 100_000:
        raise LeaveOut("number of words")
    if not 3 <= sum(map(len, spoken)) / len(spoken) <= 10:
        raise LeaveOut("length of words")
    if max(text.count("#"), text.count("...") + text.count("…")) > 0.1 * len(words):
        raise LeaveOut("symbols")
    lines = text.splitlines()
    if sum(line.lstrip().startswith(("•", "-")) for line in lines) > 0.9 * len(lines):
        raise LeaveOut("bullets")
    if sum(line.rstrip().endswith(("...", "…")) for line in lines) > 0.3 * len(lines):
        raise LeaveOut("lines that end with an ellipsis")
    if sum(any(map(str.isalpha, word)) for word in words) < 0.8 * len(words):
        raise LeaveOut("words without letters")
    if len(STOP_WORDS.intersection(words)) < 2:
        raise LeaveOut("stop words")
    return text
