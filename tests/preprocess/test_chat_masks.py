"""Loss masks of conversations are those of transformers, for every kind of tokenizer and template.

By itself a few of each; ``CHAT_MASKS=all`` (``make torture``) takes 40 tokenizers x 12 templates x 200
conversations, and Llama 3's tokenizer where it is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from loader import get_llama3_dataloader
from tests.chat_sets import write_chats
from tests.chat_tokenizers import TEMPLATES, TOKENIZERS, conversations, save_tokenizer

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes  # what renders conversations is one

TAKES_ALL = os.environ.get("CHAT_MASKS") == "all"
NUM_CHATS = 200 if TAKES_ALL else 25
SEQ_LEN = 512
# Most of these had other masks than transformers once.
SAMPLE = [
    ("bytes, alphabet alone", "content"),
    ("bytes, NFC", "content"),
    ("words, NFC", "begins with blanks"),
    ("Metaspace", "inside words"),
    ("bytes, alphabet alone", "without tags"),
    ("bytes, stripped", "whole turn"),
    ("Llama 2, NFC", "several blocks"),
    ("Bert", "empty blocks"),
    ("Unigram", "trimmed"),
    ("bytes, trimmed, space in front", "reasoning"),
    ("WordPiece, no accents", "in a variable"),
    ("bytes, trimmed, space in front", "without tags"),
    ("words, no pre-tokenizer", "without tags, ChatML"),
]
PAIRS = [(tokenizer, template) for tokenizer in TOKENIZERS for template in TEMPLATES] if TAKES_ALL else SAMPLE


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    def model(name: str) -> Path:
        return folder / name if (folder / name).exists() else save_tokenizer(name, folder / name)

    return model


def spans_by_beginnings(tokenizer: Any, chat: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Where the answers stand, by transformers' own rendering of what comes before and with each."""
    found = []
    for number, message in enumerate(chat):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(chat[:number], tokenize=False, add_generation_prompt=True)
            found.append(
                (len(before), len(tokenizer.apply_chat_template(chat[: number + 1], tokenize=False)))
            )
    return found


def expected_of(tokenizer: Any, chat: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Ids and mask by transformers; without the tags, by the characters that a token stands for."""
    if "endgeneration" in tokenizer.chat_template:
        found = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        return found["input_ids"], found["assistant_masks"]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    written = {place for span in spans_by_beginnings(tokenizer, chat) for place in range(*span)}
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = []
    for begin, end in found["offset_mapping"]:
        if begin < end:
            mask.append(int(not written.isdisjoint(range(begin, end))))
        else:  # a blank whose offsets were trimmed stands between two characters
            mask.append(int(begin - 1 in written and begin in written))
    return found["input_ids"], mask


def check_masks(prep: Prep, model: Path, template: str, folder: Path, *, seed: int) -> tuple[int, int]:
    """Compare what the loader gives with transformers. Returns the numbers of labels, and of left out."""
    chats = conversations(NUM_CHATS, seed)
    raw = write_chats(folder / "raw", chats)
    (folder / "template.jinja").write_text(template, encoding="utf-8")
    out = folder / "data"
    options: dict[str, Any] = {"record": "chat", "seq_len": SEQ_LEN, "allow_special_tokens": True}
    options |= {"model_id": str(model), "max_bad_fraction": 1.0}
    prep.plan(raw, out, num_shards=1, chat_template_file=folder / "template.jinja", **options)
    prep.make(out)
    quarantine = out / "quarantine" / "shard-00000.jsonl"
    lines = quarantine.read_text(encoding="utf-8").splitlines() if quarantine.exists() else []
    left_out = {json.loads(line)["line"] for line in lines}
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    ids: list[int] = []
    labels: list[int] = []
    for number, chat in enumerate(chats):
        of_chat, mask = expected_of(tokenizer, chat)
        if number in left_out:
            answers = [message["content"].strip() for message in chat if message["role"] == "assistant"]
            assert not any(answers), (number, chat)
            continue
        ids += of_chat
        labels += [token if is_written else -100 for token, is_written in zip(of_chat, mask, strict=True)]
    found_ids: list[int] = []
    found_labels: list[int] = []
    with get_llama3_dataloader(out, 1, shuffle=False, num_workers=0) as loader:
        for batch in loader:
            is_real = batch["attention_mask"][0].bool()
            found_ids += batch["input_ids"][0][is_real].tolist()
            found_labels += batch["labels"][0][is_real].tolist()
    assert found_ids == ids
    assert found_labels == labels
    return sum(label != -100 for label in labels), len(left_out)


@pytest.mark.parametrize(("tokenizer", "template"), PAIRS)
def test_masks_are_those_of_transformers(
    prep: Prep, models: Callable[[str], Path], tmp_path: Path, tokenizer: str, template: str
) -> None:
    seed = PAIRS.index((tokenizer, template))
    num_labels, num_left_out = check_masks(prep, models(tokenizer), TEMPLATES[template], tmp_path, seed=seed)
    assert num_labels > NUM_CHATS
    assert num_left_out < NUM_CHATS / 2
    shutil.rmtree(tmp_path)


@pytest.mark.skipif(not TAKES_ALL, reason="CHAT_MASKS=all takes Llama 3's tokenizer, for a minute")
def test_masks_of_llama_3_are_those_of_transformers(prep: Prep, shared_dir: Path, tmp_path: Path) -> None:
    model = shared_dir / "tokenizers" / "llama3"
    for seed, (name, template) in enumerate(TEMPLATES.items()):
        folder = tmp_path / name
        folder.mkdir()
        num_labels, _ = check_masks(prep, model, template, folder, seed=seed)
        assert num_labels > NUM_CHATS, name
