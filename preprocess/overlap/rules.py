"""What counts as an overlap: the rules that published work uses."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Unit = Literal["words", "tokens"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A document overlaps if it shares ``ngram`` units in a row with an evaluation document."""

    unit: Unit
    ngram: int
    num_gaps: int = 0  # units of a longer match that may differ, behind its first n-gram
    min_share: float = 0.0  # of the evaluation document's units, that the document must hold

    def to_json(self) -> dict[str, Any]:
        """Return the rule as settings say it."""
        return asdict(self)


RULES = {
    # Brown et al. 2020, arXiv 2005.14165, appendix C: 13 words, lower case, no punctuation.
    "gpt3": Rule(unit="words", ngram=13),
    # Chowdhery et al. 2022, arXiv 2204.02311, section 8: 70 % of the 8-grams of an example.
    "palm": Rule(unit="tokens", ngram=8, min_share=0.7),
    # Touvron et al. 2023, arXiv 2307.09288, appendix A.6: 10 tokens; 4 may differ behind them.
    "llama": Rule(unit="tokens", ngram=10, num_gaps=4),
}
