"""Which conversations a chat template cannot render, or loses text of, as planning tries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from preprocess.read.chat import ChatTemplate, TooCostly, render_conversations, texts_in
from preprocess.read.text_fields import UnusableText
from shardprep.console import counted
from shardprep.errors import UsageError


def _turns(*texts: str) -> list[dict[str, Any]]:
    return [dict(zip(("role", "content"), text.split(": ", 1), strict=True)) for text in texts]


_QUESTION = _turns("user: What is it?", "assistant: A probe.")
_CALL = {
    "id": "call00001",  # nine letters and digits, as Mistral's templates want it
    "type": "function",
    "function": {"name": "probe_tool", "arguments": {"probe_key": "probe_value"}},
}
_SHAPES = {
    "several turns": [*_QUESTION, *_turns("user: And now?", "assistant: Again.")],
    "a system message": [*_turns("system: Be brief."), *_QUESTION],
    "two user messages in a row": [*_turns("user: Hear this."), *_QUESTION],
    "two answers in a row": [*_QUESTION, *_turns("assistant: And more.")],
    "reasoning in an earlier turn": [
        *_turns("user: Why?", "assistant: <think>\nSince probes ask.\n</think>\n\nSo.", "user: And then?"),
        *_turns("assistant: <think>\nThey end.\n</think>\n\nNothing."),
    ],
    "tool calls": [
        *_turns("user: Ask the tool."),
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "probe_tool", "tool_call_id": "call00001", "content": "The tool says so."},
        *_turns("assistant: It answered."),
    ],
}


def template_warnings(template: ChatTemplate) -> Iterator[str]:
    """Yield why conversations of some shapes cannot be rendered, and which lose text.

    Raises UsageError where one takes too much memory or time, and ReadWriteError.
    """
    shapes = {name: shape for name, shape in _SHAPES.items() if name != "tool calls"}
    if "tool_calls" in template.text:
        shapes["tool calls"] = _SHAPES["tool calls"]
    try:
        rendered = render_conversations(template, list(map(json.dumps, shapes.values())))
    except TooCostly as error:
        num_messages = len(list(shapes.values())[error.number])
        raise UsageError(
            f"{error}, for a conversation of {counted(num_messages, 'message')} that plan tries; pass a "
            "template without endless loops and huge texts as --chat_template_file"
        ) from None
    unusable: dict[str, list[str]] = {}  # why -> names of shapes
    losing = []
    for (name, shape), found in zip(shapes.items(), rendered, strict=True):
        if isinstance(found, UnusableText):
            unusable.setdefault(found.detail, []).append(name)
        elif lost := [words for words in _said_in(shape) if words not in found.text]:
            losing.append(f"{name} ({lost[0]!a})")
    for why, names in unusable.items():
        yield (
            f"the chat template cannot render conversations with {', or '.join(names)}: {why}; such "
            "conversations will be left out; change the data, or put {% generation %} and "
            "{% endgeneration %} around what the assistant writes in a copy of the template, and pass "
            "--chat_template_file"
        )
    if losing:
        yield (
            f"the chat template leaves out text of conversations with {', or '.join(losing)}; the assistant "
            "will not learn it: to keep it, pass a template that renders it as --chat_template_file"
        )


def _said_in(shape: list[dict[str, Any]]) -> list[str]:
    """Return what of a conversation's text the rendered one is expected to have."""
    found = []
    for message in shape:
        for text in texts_in([message.get("content"), message.get("tool_calls")]):
            found += re.split(r"\s*</?think>\s*", text)
    return [words for words in found if words and words not in ("call00001", "function")]
