"""FineWeb's rules (Penedo et al. 2024, section 3.6): ends of lines, short lines, repeated lines."""

from shardprep import LeaveOut

LINE_ENDS = (".", "!", "?", "…", "。", "！", "？", ";", '"', "'", "”", "’")


def transform(record: dict[str, str]) -> str:
    text = record["text"]
    lines = [line for line in text.split("\n") if line.strip()]
    if sum(line.endswith(LINE_ENDS) for line in lines) < 0.12 * len(lines):
        raise LeaveOut("ends of lines")
    if sum(len(line) <= 30 for line in lines) > 0.67 * len(lines):
        raise LeaveOut("short lines")
    repeated = sum(map(len, lines)) - sum(map(len, set(lines)))
    if repeated > 0.01 * len(text.replace("\n", "")):
        raise LeaveOut("repeated lines")
    if text.count("\n") > 0.3 * len(text.split()):
        raise LeaveOut("lists")
    return text
