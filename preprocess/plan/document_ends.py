"""What a document begins and ends with: the tokenizer's own tokens, and EOS where it is appended."""

from __future__ import annotations

from pathlib import Path

from preprocess.make.engines import ids_around, split_tokenizer
from shardprep.files import read_regular
from shardprep.format.plan import Plan
from shardprep.format.tokenizer_files import MAX_TOKENIZER_BYTES, TOKENIZER_FILE


def document_ends(plan: Plan, tokenizer_folder: Path) -> tuple[str, str] | None:
    """The tokens that each document of a plan begins and ends with: names and ids, "" for none.

    None for conversations, whose template decides, where the tokenizer's post-processor is of an unknown
    kind, and where the file is damaged. Raises what reading raises.
    """
    raw = read_regular(tokenizer_folder / TOKENIZER_FILE, max_bytes=MAX_TOKENIZER_BYTES)
    try:
        head, _ = split_tokenizer(raw)
        names = {
            token["id"]: f"{token['content']} ({token['id']})" for token in head.get("added_tokens") or []
        }
        before, after = ids_around(head.get("post_processor"))
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if plan.options.is_chat:
        return None
    if not plan.options.add_special_tokens:
        before, after = [], []
    if plan.end_id is not None:
        after = [*after, plan.end_id]

    def named(ids: list[int]) -> str:
        return " ".join(names.get(i, str(i)) for i in ids)

    return named(before), named(after)


def document_ends_lines(plan: Plan, tokenizer_folder: Path) -> list[str]:
    """The same in a sentence, if it is known."""
    found = document_ends(plan, tokenizer_folder)
    if found is None:
        return []
    if not any(found):
        return ["documents begin and end without a control token"]
    begin, end = (f"with {text}" if text else "without a control token" for text in found)
    return [f"documents begin {begin} and end {end}"]
