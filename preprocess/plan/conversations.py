"""Try a chat template on sample conversations, and tell what it does with them.

A template may be unable to use a form of contents or of tool calls' arguments, drop text, or change earlier
turns. ``plan`` finds out by probes, and shows on a conversation of the sample which text is learnt.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from preprocess.make.token_ids import NO_LOSS, TokenBatch
from preprocess.read import chat
from preprocess.read.answers import REASONING_KEYS, len_of_common_beginning, strings_in
from preprocess.read.documents import DocumentBatch
from preprocess.read.messages import FORMS, MessageFields, parsed_conversation
from preprocess.read.rendering import ChatTemplate, Rendered, check_variables
from preprocess.read.text_fields import UnusableText, value_at
from shardprep import errors
from shardprep.console import counted, printable
from shardprep.format.plan_options import PlanOptions

_COSTLY = "pass a template without endless loops and huge texts as --chat_template_file"
_MOST_SHOWN_CHARS = 3000  # of a sampled conversation
_MOST_EXAMPLE_CHARS = 60


def _turns(*texts: str) -> list[dict[str, Any]]:
    return [dict(zip(("role", "content"), text.split(": ", 1), strict=True)) for text in texts]


_QUESTION = _turns("user: What is it?", "assistant: A probe.")
_PARTS = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in _QUESTION]
_CALL = {
    "id": "call00001",  # nine letters and digits, as Mistral's templates want it
    "type": "function",
    "function": {"name": "probe_tool", "arguments": {"probe_key": "probe_value"}},
}
_CALL_OF_STRING = {**_CALL, "function": {"name": "probe_tool", "arguments": '{"probe_key": "probe_value"}'}}
_PARAMETERS = {"type": "object", "properties": {"probe_key": {"type": "string", "description": "A value."}}}
_TOOL = {
    "type": "function",
    "function": {"name": "probe_tool", "description": "Probes.", "parameters": _PARAMETERS},
}


def _with_call(call: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        *_turns("user: Ask the tool."),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "probe_tool", "tool_call_id": "call00001", "content": "The tool says so."},
        *_turns("assistant: It answered."),
    ]


_SHAPES = {
    "several turns": [*_QUESTION, *_turns("user: And now?", "assistant: Again.")],
    "a system message": [*_turns("system: Be brief."), *_QUESTION],
    "two user messages in a row": [*_turns("user: Hear this."), *_QUESTION],
    "two answers in a row": [*_QUESTION, *_turns("assistant: And more.")],
    "reasoning in an earlier turn": [
        *_turns("user: Why?", "assistant: <think>\nSince probes ask.\n</think>\n\nSo.", "user: And then?"),
        *_turns("assistant: <think>\nThey end.\n</think>\n\nNothing."),
    ],
    "tool calls": _with_call(_CALL),
}
_NO_TEXT = ("call00001", "function")  # in tool calls


def _conversation(messages: list[dict[str, Any]]) -> str:
    has_calls = any("tool_calls" in message for message in messages)
    return json.dumps({"messages": messages, "tools": [_TOOL]} if has_calls else messages)


def fitted_template(template: ChatTemplate, options: PlanOptions) -> ChatTemplate:
    """Return the template with the options, and with the forms that it needs.

    Raises UsageError if it cannot render a question and its answer.
    """
    if options.chat_template_kwargs and (wrong := check_variables(options.chat_template_kwargs)):
        found = f"--chat_template_kwargs {options.chat_template_kwargs} ({wrong})"
        expected = """an object of variables that the template uses, such as '{"enable_thinking": false}'"""
        raise errors.UsageError(found=found, expected=expected)
    template = template._replace(variables=options.chat_template_kwargs)
    probes = [_QUESTION, _PARTS, _with_call(_CALL), _with_call(_CALL_OF_STRING)]
    try:
        text, parts, objects, strings = chat.render_conversations(template, list(map(_conversation, probes)))
    except chat.TooCostly as error:
        raise errors.UsageError(f"{error}, for a question and its answer; {_COSTLY}") from None
    if isinstance(text, UnusableText) and not _shows_text(parts):
        what = f"the chat template cannot be used: for a question and its answer, {text.detail}"
        remedy = "correct a copy of it, perhaps with {% generation %} and {% endgeneration %} around answers"
        raise errors.UsageError(f"{what}; {remedy}, and pass --chat_template_file")
    content: Literal["", "text", "parts"] = "text"
    if _text_of(text) == _text_of(parts):
        content = ""
    elif _shows_text(parts) and not _shows_text(text):
        content = "parts"
    arguments: Literal["", "objects", "strings"] = ""
    if _shows_call(objects) != _shows_call(strings):
        arguments = "objects" if _shows_call(objects) else "strings"
    return template._replace(
        content=content,
        arguments=arguments,
        learn=options.learn,
        learns_reasoning=options.learn_reasoning == "yes",
    )


def _text_of(found: list[Rendered] | UnusableText) -> str:
    return "" if isinstance(found, UnusableText) else "".join(each.text for each in found)


def _shows_text(found: list[Rendered] | UnusableText) -> bool:
    """Return whether contents are shown, and not as Python or JSON writes a list of parts."""
    text = _text_of(found)
    return "A probe." in text and not re.search("[\"']type[\"']", text)


def _shows_call(found: list[Rendered] | UnusableText) -> bool:
    """Return whether arguments are shown, and not as Python writes them or as JSON in a string."""
    text = _text_of(found)
    is_escaped = '\\"probe_key' in text or "'probe_key'" in text
    return "probe_key" in text and "probe_value" in text and not is_escaped


def template_warnings(template: ChatTemplate) -> Iterator[str]:
    """Yield warnings about shapes of conversations that a template cannot render, drops or changes."""
    shapes = dict(_SHAPES)
    if "tool_calls" not in (template.tool_text or template.text):
        del shapes["tool calls"]
    conversations = list(map(_conversation, shapes.values()))
    try:
        rendered = chat.render_conversations(template, conversations)
        of_each_answer = chat.render_conversations(template._replace(learn="each"), conversations)
    except chat.TooCostly as error:
        num_messages = counted(len(list(shapes.values())[error.number]), "message")
        raise errors.UsageError(f"{error}, for a conversation of {num_messages}; {_COSTLY}") from None
    unusable: dict[str, list[str]] = {}  # why -> names of shapes
    losing = []
    for (name, shape), found in zip(shapes.items(), rendered, strict=True):
        if isinstance(found, UnusableText):
            unusable.setdefault(found.detail, []).append(name)
            continue
        texts = strings_in([[message.get("content"), message.get("tool_calls")] for message in shape])
        said = [words for text in texts for words in re.split(r"\s*</?think>\s*", text)]
        lost = [words for words in said if words not in _NO_TEXT and words not in _text_of(found)]
        if lost:
            losing.append(f"{name} ({lost[0]!a})")
    for why, shapes_lost in unusable.items():
        yield (
            f"the chat template cannot render conversations with {', or '.join(shapes_lost)}: {why}; they "
            "are left out; change the data, or a copy of the template for --chat_template_file"
        )
    change = next(filter(None, map(_change_of, of_each_answer)), "") if template.learn == "all" else ""
    if change:
        yield (
            f"the chat template changes earlier turns: {change}; --learn all teaches answers as it shows "
            "them in the whole conversation, --learn each as the model gives them, in documents of their "
            "own, and --learn last only the last one"
        )
    if losing:
        todo = "" if change else "; to keep it, pass a template that renders it as --chat_template_file"
        yield f"the chat template leaves out text of conversations with {', or '.join(losing)}{todo}"


def _change_of(found: list[Rendered] | UnusableText) -> str:
    """Return how an answer changes when a turn follows, given a document for each, or "" if it does not."""
    if isinstance(found, UnusableText) or len(found) == 1:
        return ""
    alone = found[0].text
    whole = found[-1].text
    begin = min(len_of_common_beginning(alone, whole), found[0].spans[0][0])
    given = alone[begin : begin + _MOST_EXAMPLE_CHARS]
    later = whole[begin : begin + _MOST_EXAMPLE_CHARS]
    return f"where an answer is {given!a} when it is given, it is {later!a} when a turn follows"


def form_line(records: list[Any], options: PlanOptions) -> str:
    """Return which fields of the records make conversations, if that needs a word."""
    fields = MessageFields(options)
    forms: Counter[str] = Counter()
    beside: set[str] = set()
    for record in records:
        given = {path: value_at(record, path) for path in fields.text_paths}
        recognized = fields.recognize(given)
        if isinstance(recognized, UnusableText):
            continue
        forms[FORMS[recognized.form]] += 1
        beside |= fields.beside(given)
    if not beside and forms.keys() <= {FORMS["messages"]}:
        return ""
    more = f", with {', '.join(sorted(beside))}" if beside else ""
    forms_text = " or ".join(forms)
    return f"conversations are read from {forms_text}{more}; --chat_format and --text_field say otherwise"


class ConversationSample:
    """What the sampled conversations become."""

    def __init__(self, options: PlanOptions) -> None:
        self._options = options
        self._num_conversations = self._num_documents = self._num_tokens = self._num_learnt = 0
        self._shown: tuple[int, list[str]] = (-1, [])  # how many kinds of parts it has, and its lines
        self._unseen_tools: Counter[str] = Counter()

    def see(self, documents: DocumentBatch, tokens: TokenBatch) -> None:
        """Look at a batch and its ids, which have NO_LOSS where nothing is learnt."""
        is_learnt = tokens.ids < NO_LOSS
        self._num_conversations += len(np.unique(documents.lines))
        self._num_documents += len(documents.lines)
        self._num_tokens += len(tokens.ids)
        self._num_learnt += int(is_learnt.sum())
        columns = documents.columns
        for number, text_bytes in enumerate(documents.texts):
            given = parsed_conversation(columns["messages"][number])
            text = text_bytes.decode()
            names = [str((tool.get("function") or tool).get("name")) for tool in given.get("tools") or []]
            self._unseen_tools.update(name for name in names[:1] if name not in text)
            worth = _num_kinds(given) if len(text) <= _MOST_SHOWN_CHARS else 0
            if worth <= self._shown[0]:
                continue
            here = is_learnt[slice(*tokens.offsets[number : number + 2].tolist())]
            title = f"a sampled conversation; {here.sum():,} of its {len(here):,} tokens are learnt, ⟪so⟫:"
            self._shown = (worth, [title, *_indented(_marked(text, columns["spans"][number]))])

    def lines(self) -> Iterator[str]:
        """Yield lines about the sample."""
        if self._unseen_tools:
            name, number = self._unseen_tools.most_common(1)[0]
            where = counted(number, "sampled conversation")
            yield (
                f"warning: the chat template does not show the tools of {where}, such as {printable(name)}; "
                "pass one that does as --chat_template_file"
            )
        if not self._num_documents:
            return
        what = counted(self._num_documents, "sampled document")
        if self._options.learn == "each":
            what += f", made of {counted(self._num_conversations, 'conversation')}"
        share = self._num_learnt / max(1, self._num_tokens)
        yield f"{share:.0%} of the tokens of {what} are learnt (--learn {self._options.learn})"
        yield from self._shown[1]


def _num_kinds(conversation: dict[str, Any]) -> int:
    """Return how many kinds of messages and parts a conversation shows."""
    messages = conversation["messages"]
    keys = {key for message in messages for key in message}
    return len({message["role"] for message in messages} | (keys & {"tool_calls", *REASONING_KEYS}))


def _marked(text: str, spans: list[tuple[int, int]]) -> str:
    pieces = []
    end_before = 0
    for begin, end in spans:
        pieces += [text[end_before:begin], "⟪", text[begin:end], "⟫"]
        end_before = end
    return "".join([*pieces, text[end_before:]])


def _indented(text: str) -> list[str]:
    shown = text
    if len(text) > _MOST_SHOWN_CHARS:
        shown = f"{text[:_MOST_SHOWN_CHARS]} ... ({len(text)} characters)"
    return [f"  {printable(line)}" for line in shown.split("\n")]
