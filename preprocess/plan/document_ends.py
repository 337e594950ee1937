"""What a document begins and ends with: the tokenizer's own tokens, and EOS where it is appended."""

from __future__ import annotations

from pathlib import Path

from preprocess.make.engines import Engine, split_tokenizer
from preprocess.plan.plan_file import Plan
from preprocess.plan.tokenizer_files import MAX_TOKENIZER_BYTES, TOKENIZER_FILE
from shardprep.files import read_regular


def document_ends(plan: Plan, engine: Engine, tokenizer_folder: Path) -> str:
    """What each document of a plan begins and ends with, in words."""
    head, _ = split_tokenizer(read_regular(tokenizer_folder / TOKENIZER_FILE, max_bytes=MAX_TOKENIZER_BYTES))
    names = {token["id"]: f"{token['content']} ({token['id']})" for token in head.get("added_tokens") or []}
    before, after = engine.added_ids()
    ends = [*after, *(() if plan.end_id is None else (plan.end_id,))]
    begin_text, end_text = (" ".join(names.get(i, str(i)) for i in ids) for ids in (before, ends))
    if not (before or ends):
        return "documents begin and end without a control token"
    begin_text, end_text = (
        f"with {text}" if text else "without a control token" for text in (begin_text, end_text)
    )
    return f"documents begin {begin_text} and end {end_text}"
