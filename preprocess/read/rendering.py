"""Render conversations with a chat template, and say which of their text is learnt.

This runs in the process of ``chat.py``. The template gets what ``apply_chat_template`` of the installed
transformers gives it, so the texts are equal. Tool calls' arguments and contents are converted first only if
the template cannot use the form that a record has.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from msgspec.structs import asdict

from preprocess.read.answers import Answers, Message, Span, Unrendered, strings_in
from preprocess.read.messages import parsed_conversation
from preprocess.read.text_fields import UnusableText, from_json, parsed_if_json
from shardprep.format.plan_options import PlanOptions

# Today's date, for templates that ask for it: equal inputs give equal bytes on any day.
FIXED_DATE = datetime.datetime(2024, 7, 26)  # noqa: DTZ001  the one that Llama 3.1's template falls back on
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Parameters of apply_chat_template, which are no variables of a template.
_NO_VARIABLES = {
    "conversation", "conversations", "messages", "tools", "documents", "chat_template", "tokenize",
    "add_generation_prompt", "continue_final_message", "sanitize_control_tokens", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
_MOST_RENDERED_CHARS = 16 << 20  # of one conversation; a longer one is left out
# Rendering takes quadratic time, so conversations with very many answers are left out. Their work is the
# number of answers x (characters + _MESSAGE_CHARS per message). The limits are 2 s of work: 700 short answers
# without tags, 8,000 with them.
_MOST_WORK, _MOST_TAGGED_WORK = 1 << 28, 1 << 35
_MESSAGE_CHARS = 256


class ChatTemplate(NamedTuple):
    """All that decides how a conversation is rendered, and what is learnt. The plan contains it."""

    text: str  # Jinja
    tokens: str  # JSON: "named", the special tokens by name; "control", the texts of all control tokens
    allows_control_tokens: bool  # in messages
    variables: str = ""  # JSON of --chat_template_kwargs
    arguments: Literal["", "objects", "strings"] = ""  # what tool calls' arguments must be; "" as they are
    content: Literal["", "text", "parts"] = ""  # what a content must be; "" as it is
    learn: Literal["all", "last", "each"] = "all"
    learns_reasoning: bool = True
    tool_text: str = ""  # Jinja for conversations with tools; "" for the same as of others

    @staticmethod
    def of_options(options: PlanOptions) -> ChatTemplate:
        return ChatTemplate(
            text=options.chat_template,
            tokens=options.chat_tokens,
            allows_control_tokens=options.allow_special_tokens,
            variables=options.chat_template_kwargs,
            arguments=options.chat_arguments,
            content=options.chat_content,
            learn=options.learn,
            learns_reasoning=options.learn_reasoning == "yes",
            tool_text=options.chat_tool_template,
        )

    def has_tags(self) -> bool:
        """Return whether a template says itself what the assistant wrote."""
        return any(GENERATION.search(text) for text in (self.text, self.tool_text))


class Rendered(NamedTuple):
    """A document of a conversation."""

    text: str
    spans: list[Span]  # what is learnt, ascending


def rendered_json(template: ChatTemplate, conversation: str) -> str:
    """Return the documents of a conversation, or the fields of an UnusableText, as JSON.

    It is ASCII, as the texts may have lone surrogates.
    """
    try:
        return json.dumps(_renderer(template).documents(conversation))
    except Unrendered as error:
        return json.dumps(asdict(UnusableText(*error.args)))


@functools.lru_cache(maxsize=4)
def _renderer(template: ChatTemplate) -> _Renderer:
    return _Renderer(template)


class _Renderer:
    """Renders conversations with one template."""

    def __init__(self, template: ChatTemplate) -> None:
        from transformers.utils import chat_template_utils

        class FixedDate(datetime.datetime):
            # mypy wants now() of a subclass to return a FixedDate, which strftime does not need.
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]  # noqa: ARG003
                return FIXED_DATE

        chat_template_utils.datetime = FixedDate  # type: ignore[attr-defined]  # used by strftime_now
        self._template = template
        tokens = json.loads(template.tokens)
        self._named = tokens["named"]
        self._variables = json.loads(template.variables or "{}")
        self._render: Callable[..., Any] = functools.partial(
            chat_template_utils.render_jinja_template, chat_template=template.text
        )
        self._is_tagged = bool(GENERATION.search(template.text))
        self._control = _pattern_of(tokens["control"])
        self._forbidden = _pattern_of([] if template.allows_control_tokens else tokens["control"])

    def documents(self, conversation: str) -> list[Rendered]:
        """Return the documents of a conversation. Raises Unrendered."""
        given = parsed_conversation(conversation)
        if self._template.tool_text and given.get("tools") is not None:
            for_tools = self._template._replace(text=self._template.tool_text, tool_text="")
            return _renderer(for_tools).documents(conversation)
        learn = self._template.learn
        answers = [number for number, message in enumerate(given["messages"]) if _is_answer(message)]
        learnt = [number for number in answers if _is_learnt(given["messages"][number], number)]
        takes_all = learn == "all" and learnt == answers and self._template.learns_reasoning
        is_simple = takes_all and self._is_tagged  # the tags say what is learnt
        messages = self._checked(given, len(answers), is_linear=is_simple)
        if not answers:
            raise Unrendered("no_assistant", "no message is the assistant's")
        if learn == "last":
            learnt = [number for number in learnt if number == answers[-1]]
        if not learnt:
            raise Unrendered("not_learnt", "no answer in it is to be learnt, by weight or train")
        render = functools.partial(self._text, given)
        if is_simple:
            found = [Rendered(*render(messages, return_assistant_tokens_mask=True))]
        elif learn == "each":
            found = list(self._each(render, messages, learnt))
        else:
            found = [self._document(render, messages, learnt)]
        found = [each for each in found if any(begin < end for begin, end in each.spans)]
        if not found:
            raise Unrendered("no_assistant", "the template renders nothing that the assistant wrote")
        return found

    def _each(
        self, render: Callable[..., Any], messages: list[Message], learnt: list[int]
    ) -> Iterator[Rendered]:
        """Yield a document for each answer, rendered up to it.

        If that is the beginning of the next one, which then shows the answer in the same context, they share
        the next document.
        """
        group: list[int] = []
        text = ""
        for number in learnt:
            try:
                up_to, _ = render(messages[: number + 1])
            except Unrendered:
                if number == learnt[-1]:
                    raise
                group.append(number)  # such as a welcome before the first question
                continue
            if group and not up_to.startswith(text):
                yield self._document(render, messages[: group[-1] + 1], group)
                group = []
            group.append(number)
            text = up_to
        if group:
            yield self._document(render, messages[: group[-1] + 1], group)

    def _document(self, render: Callable[..., Any], messages: list[Message], learnt: list[int]) -> Rendered:
        """Render messages, of which the answers ``learnt`` are learnt."""

        def text_of(some: list[Message], **options: Any) -> str:
            text: str = render(some, **options)[0]
            return text

        answers = Answers(text_of, messages, self._control)
        if self._is_tagged:
            _, tagged = render(messages, return_assistant_tokens_mask=True)
            all_spans = {n: answers.spans_of(n) for n, message in enumerate(messages) if _is_answer(message)}
            spans = []
            for span in tagged:
                owner = max(all_spans, key=lambda number: _overlap(all_spans[number], span))
                if owner in learnt and _overlap(all_spans[owner], span) > 0:
                    spans.append(span)
        else:
            spans = sorted(itertools.chain.from_iterable(map(answers.spans_of, learnt)))
        if not self._template.learns_reasoning:
            for number in learnt:
                for thought in answers.thoughts_of(number):
                    spans = list(_without(spans, thought))
        return Rendered(answers.text, spans)

    def _checked(self, given: dict[str, Any], num_answers: int, *, is_linear: bool) -> list[Message]:
        """Return the messages as the template gets them. Raises Unrendered."""
        messages = given["messages"]
        if not messages:
            raise Unrendered("no_messages", "the list of messages is empty")
        num_chars = 0
        found: list[Message] = []
        for number, message in enumerate(messages):
            role = message.get("role") if isinstance(message, dict) else None
            if role not in ROLES:
                raise Unrendered("wrong_role", f"message {number} has the role {str(role)[:40]!r}")
            num_chars += self._num_chars(message, f"message {number} holds")
            # As apply_chat_template does: templates fail on nulls, and messages of tables have equal keys.
            own = {key: value for key, value in message.items() if value is not None}
            found.append(self._with_forms(own, number))
        for name in ("tools", "documents"):
            num_chars += self._num_chars(given.get(name), f"{name} hold")
        taken = _NO_VARIABLES & {*given.get("chat_template_kwargs", {})}
        if taken:
            why = f"chat_template_kwargs has {min(taken)}, which is no variable of a template"
            raise Unrendered("wrong_kwargs", why)
        work = num_answers * (num_chars + _MESSAGE_CHARS * len(messages))
        if work > (_MOST_TAGGED_WORK if is_linear else _MOST_WORK):
            why = f"{num_answers} answers in {len(messages)} messages of {num_chars} characters "
            why += "take too long to render"
            if not is_linear:
                why += "; with {% generation %} in the template and --learn all it may have more"
            raise Unrendered("too_many_answers", why)
        return found

    def _num_chars(self, value: Any, holder: str) -> int:
        """Return the length of all strings in a value. Raises Unrendered if one has a control token."""
        num_chars = 0
        for text in strings_in(value):
            num_chars += len(text)
            if control := self._forbidden.search(text):
                raise Unrendered("control_token", f"{holder} the control token {control[0]}")
        return num_chars

    def _with_forms(self, message: Message, number: int) -> Message:
        """Return a message whose content and arguments have the forms that the template can use."""
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                if kind != "text" or not isinstance(part.get("text"), str):
                    why = f"message {number} has a part of type {str(kind)[:40]!r}"
                    raise Unrendered("content_part", f"{why}, and only text can be rendered")
                # Templates take a part with the key "image" for one, also if it is null.
                parts.append({key: value for key, value in part.items() if value is not None})
            message["content"] = parts
            if self._template.content == "text":
                message["content"] = "".join(part["text"] for part in parts)
        elif isinstance(content, str) and self._template.content == "parts":
            message["content"] = [{"type": "text", "text": content}]
        calls = parsed_if_json(message.get("tool_calls"))
        if isinstance(calls, list):
            message["tool_calls"] = [_with_arguments(call, self._template.arguments) for call in calls]
        return message

    def _text(self, given: dict[str, Any], messages: list[Message], **options: Any) -> tuple[str, list[Span]]:
        """Render messages. Returns their text and, if asked for, the spans of the template's tags."""
        variables = {**self._named, **self._variables, **given.get("chat_template_kwargs", {})}
        beside = {"tools": given.get("tools"), "documents": given.get("documents")}
        try:
            texts, spans = self._render(conversations=[messages], **beside, **variables, **options)
        except MemoryError:  # ends the process, see ``serve``
            raise
        except Exception as error:  # a template may raise anything
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise Unrendered("template_error", f"the template raised {said}") from None
        text: str = texts[0]
        if len(text) > _MOST_RENDERED_CHARS:
            most = _MOST_RENDERED_CHARS >> 20
            raise Unrendered("template_error", f"the template makes more than {most} Mi characters of it")
        return text, spans[0] if spans else []


def check_variables(variables: str) -> str:
    """Return what is wrong with --chat_template_kwargs, or ""."""
    found = from_json(variables)
    if not isinstance(found, dict):
        return "no object of JSON"
    taken = _NO_VARIABLES & found.keys()
    return f"{min(taken)}, which is no variable of a template" if taken else ""


def _pattern_of(tokens: list[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _is_learnt(message: Message, number: int) -> bool:
    """Return whether an answer is learnt, by OpenAI's ``weight`` or by ``train``. Raises Unrendered."""
    found = []
    for key in ("weight", "train"):
        value = message.get(key)
        value = 1 if value is None else value
        if value not in (0, 1):
            why = f"message {number} has the {key} {str(value)[:40]!r}, expected 0 or 1, false or true"
            raise Unrendered("wrong_weight", why)
        found.append(bool(value))
    return all(found)


def _with_arguments(call: Any, form: str) -> Any:
    """Return a tool call with arguments as an object or as a string of JSON."""
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return {**call, "function": _with_arguments(call["function"], form)}
    arguments = call.get("arguments")
    if form == "strings" and isinstance(arguments, (dict, list)):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    if form == "objects" and isinstance(arguments, str):
        parsed = from_json(arguments)
        return {**call, "arguments": parsed if isinstance(parsed, dict) else arguments}
    return call


def _overlap(spans: list[Span], other: Span) -> int:
    """Return how many characters of ``other`` are in spans."""
    return sum(max(min(end, other[1]) - max(begin, other[0]), 0) for begin, end in spans)


def _without(spans: list[Span], hole: Span) -> Iterator[Span]:
    """Yield what is left of spans outside a hole."""
    for begin, end in spans:
        left = (begin, min(end, hole[0]))
        right = (max(begin, hole[1]), end)
        yield from (each for each in (left, right) if each[0] < each[1])
