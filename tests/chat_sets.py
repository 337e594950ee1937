"""Conversations, chat templates with and without ``{% generation %}``, and what they should give."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

Message = dict[str, Any]

_TURN = "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
_PROMPT = "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
PLAIN = (
    "{{ bos_token }}{% for m in messages %}" + _TURN + "{{ m['content'] }}<|eot_id|>{% endfor %}" + _PROMPT
)
TAGGED = (
    "{{ bos_token }}{% for m in messages %}" + _TURN + "{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|eot_id|>{% endgeneration %}{% else %}{{ m['content'] }}<|eot_id|>{% endif %}"
    "{% endfor %}" + _PROMPT
)
_WORDS = [
    "가나다", "물은", "100도", "kettle", "sings,", "nobody's", "listening",
    "🙂", "é", "☕️", "12345", "도서관", "\n", "끝.",
]  # fmt: skip


def conversation(chooser: random.Random) -> list[Message]:
    """A few turns of Korean, English and emoji, each answer after its question."""

    def text() -> str:
        return " ".join(chooser.choices(_WORDS, k=chooser.randint(1, 12)))

    turns: list[Message] = [{"role": "system", "content": text()}] * chooser.randint(0, 1)
    for _ in range(chooser.randint(1, 3)):
        turns += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
    return turns


def conversations(num: int, seed: int = 0) -> list[list[Message]]:
    """So many of them, the same ones each time."""
    chooser = random.Random(seed)
    return [conversation(chooser) for _ in range(num)]


def chat_model(model_dir: Path, folder: Path, template: str) -> Path:
    """A copy of a tokenizer's folder with a chat template."""
    shutil.copytree(model_dir, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def write_chats(folder: Path, chats: list[list[Message]], field: str = "messages") -> Path:
    """``folder/chats.jsonl``, a conversation per line; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": number, field: chat}, ensure_ascii=False) for number, chat in enumerate(chats)]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
