"""The hits of a search in sums: a line for a terminal, and a page of HTML without scripts."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from html import escape
from typing import Any

from shardprep.console import counted

_MOST_SHOWN = 50
_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Overlap with an evaluation</title>
<style>body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse}td,th{text-align:left;vertical-align:top;padding:.3em .6em;
border-bottom:1px solid #ccc}</style><h1>Overlap with an evaluation</h1>
"""


class Summary:
    """Counts hits as they are merged."""

    def __init__(self) -> None:
        self.num_documents = self.num_hits = self.num_unnamed = 0
        self._hit_documents: set[str] = set()
        self._of_eval: Counter[str] = Counter()
        self._largest: list[tuple[float, int, int, dict[str, Any]]] = []  # a heap

    def add(self, hit: dict[str, Any]) -> None:
        """Count a hit, as overlap.jsonl has it."""
        self.num_hits += 1
        self._hit_documents.add(hit["document"])
        self._of_eval[hit["eval"]["name"]] += 1
        heapq.heappush(self._largest, (hit["share"], hit["longest"], -self.num_hits, hit))
        if len(self._largest) > _MOST_SHOWN:
            heapq.heappop(self._largest)

    def line(self) -> str:
        """Return the sums."""
        return (
            f"{len(self._hit_documents):,} of {counted(self.num_documents, 'document')} hold text of "
            f"{counted(len(self._of_eval), 'evaluation document')}: {counted(self.num_hits, 'hit')}"
        )

    def page(self, settings: dict[str, Any]) -> str:
        """Return the page."""
        hits = [hit for *_, hit in sorted(self._largest, key=lambda item: item[:3], reverse=True)]
        largest = (
            (hit["document"], hit["eval"]["name"], f"{hit['share']:.0%}", hit["longest"], hit["text"][:300])
            for hit in hits
        )
        return (
            f"{_HEAD}<p>{self.line()}.<h2>Largest overlaps</h2>"
            + _table(("document, for peek", "evaluation document", "share", "longest", "text"), largest)
            + "<h2>Evaluation documents that are found most often</h2><p>What many documents hold may be a "
            "phrase that everybody uses: look at the texts, and give a larger --min_share."
            + _table(("evaluation document", "hits"), self._of_eval.most_common(_MOST_SHOWN))
            + f"<h2>Settings</h2>{_table(('name', 'value'), settings.items())}</html>\n"
        )


def _table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    heads = "".join(f"<th>{title}" for title in titles)
    lines = ("<tr>" + "".join(f"<td>{escape(str(cell))}" for cell in row) + "\n" for row in rows)
    return f"<table><tr>{heads}\n{''.join(lines)}</table>\n"
