"""The sums of a search, as lines and as a page: self-contained HTML without scripts."""

from __future__ import annotations

import heapq
from collections import Counter
from html import escape
from typing import Any

from shardprep.console import counted

_MOST_SHOWN = 50
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.3em .6em;"
    "border-bottom:1px solid #ccc}td.n{text-align:right}"
)


class Summary:
    """Counts hits as they are merged."""

    def __init__(self, num_evals: int) -> None:
        self.num_evals = num_evals
        self.num_documents = self.num_tokens = self.num_hits = self.num_unnamed = 0
        self._documents: set[str] = set()
        self._of_eval: Counter[str] = Counter()
        self._largest: list[tuple[float, int, int, dict[str, Any]]] = []

    def add(self, entry: dict[str, Any]) -> None:
        """Count a hit."""
        self.num_hits += 1
        self._documents.add(entry["document"])
        self._of_eval[entry["eval"]["name"]] += 1
        item = (entry["share"], entry["longest"], -self.num_hits, entry)
        (heapq.heappush if len(self._largest) < _MOST_SHOWN else heapq.heappushpop)(self._largest, item)

    def lines(self) -> list[str]:
        """Return what a terminal shows."""
        return [
            f"{len(self._documents):,} of {counted(self.num_documents, 'document')} overlap with "
            f"{len(self._of_eval):,} of {counted(self.num_evals, 'evaluation document')}: "
            f"{counted(self.num_hits, 'hit')}"
        ]

    def page(self, settings: dict[str, Any]) -> str:
        """Return the page."""
        facts = "".join(f"<tr><th>{escape(name)}<td>{escape(str(value))}" for name, value in settings.items())
        common = "".join(
            f"<tr><td>{escape(name)}<td class=n>{count:,}"
            for name, count in self._of_eval.most_common(_MOST_SHOWN)
        )
        largest = "".join(
            f"<tr><td>{escape(entry['document'])}<td>{escape(entry['eval']['name'])}<td class=n>{share:.0%}"
            f"<td class=n>{longest:,}<td>{escape(entry['text'][:300])}"
            for share, longest, _, entry in sorted(self._largest, key=lambda item: item[:3], reverse=True)
        )
        return (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>Overlap</title><style>{_STYLE}</style>"
            f"<h1>Overlap with an evaluation</h1><p>{escape(self.lines()[0])}.<h2>Settings</h2><table>{facts}"
            f"</table><h2>Largest overlaps</h2><table><tr><th>document, for peek<th>evaluation document<th>share"
            f"<th>longest<th>text{largest}</table><h2>Evaluation documents that are found most often</h2><p>"
            "What many documents hold may be a phrase that everybody uses: look at its text, and give a larger "
            f"--min_share.<table><tr><th>evaluation document<th>hits{common}</table></html>\n"
        )
