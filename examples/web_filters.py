"""Filters like Gopher's and FineWeb's, with a list of blocked hosts: plan --transform web_filters.py."""

from shardprep import LeaveOut

BLOCKED = {"spam.example", "casino.example"}
STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}


def transform(record: dict[str, str]) -> str:
    if record.get("host") in BLOCKED:
        raise LeaveOut("blocked host")
    words = record["text"].split()
    if not 50 <= len(words) <= 100_000:
        raise LeaveOut("number of words")
    if not 3 <= sum(map(len, words)) / len(words) <= 10:
        raise LeaveOut("length of words")
    if len(STOP_WORDS & set(map(str.lower, words))) < 2:
        raise LeaveOut("stop words")
    if len(set(words)) / len(words) < 0.1:
        raise LeaveOut("repeated words")
    return record["text"]
