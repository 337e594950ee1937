"""Where in a JSON text each value stands, so that one can be replaced and all else stays as it is."""

from __future__ import annotations

from json.decoder import JSONDecoder


def spans(text: str) -> list[tuple[str, int, int]]:
    """(path, start, end) of each value in a JSON text; of an array the first two and the last."""
    found: list[tuple[str, int, int]] = []
    _spans(text, 0, "", found)
    return found


def _spans(text: str, start: int, path: str, found: list[tuple[str, int, int]]) -> None:
    decoder = JSONDecoder()
    _, end = decoder.raw_decode(text, start)
    if path:
        found.append((path, start, end))
    if text[start] not in "{[":
        return
    items: list[tuple[str, int]] = []
    at = _next(text, start + 1)
    while text[at] not in "}]":
        name = str(len(items))
        if text[start] == "{":
            name, at = decoder.raw_decode(text, at)
            at = _next(text, at)
        items.append((f"{path}.{name}" if path else name, at))
        _, at = decoder.raw_decode(text, at)
        at = _next(text, at)
    for name, at in items if text[start] == "{" else [*items[:2], *items[2:][-1:]]:
        _spans(text, at, name, found)


def _next(text: str, at: int) -> int:
    while text[at] in " \t\r\n,:":
        at += 1
    return at
