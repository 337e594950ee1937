"""Find what the assistant wrote in the text of a conversation that a chat template rendered.

A template without ``{% generation %}`` does not say where an answer is. Two rules find it:

1. Prefixes. The messages before the answer, with the generation prompt, and the messages up to the answer are
   rendered, too. If the text begins with both, the answer is what the second has more.
2. Marks. Templates of reasoning models change earlier turns, so their texts do not begin so. Then characters
   that no text has are put into all messages. The text is the same but for these marks, which is checked, so
   they show what came from which message. The answer begins where the text, from the last mark before it, no
   longer agrees with the messages before it and the generation prompt; it ends where the text, from its own
   last mark, no longer agrees with the messages up to it.

Where both rules apply they agree. An answer that a control token does not end, as in GLM's and gpt-oss's
templates, also has the control token that follows: the model must learn to stop.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

Message = dict[str, Any]
Span = tuple[int, int]  # characters [begin, end) of a text
# messages, and add_generation_prompt=True for a prompt -> text; raises Unrendered
Render = Callable[..., str]
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # names of transformers
_THINK_TAG = re.compile("(</?think>)")
# Marks are characters that are not in the text: rare Chinese ones, which Python and JSON write as they are,
# or those of private use.
_MARKS = ("\U00020000", "\U0002a6d6"), ("\U000f0000", "\U0010fffd")
_MOST_CONTROL_CHARS = 64  # of a control token
_MOST_PROMPT_CHARS = 256  # of the end of a generation prompt


class Unrendered(Exception):
    """A template cannot render some messages. ``args``: a reason and a detail, as of UnusableText."""


class Answers:
    """Finds the answers in the text of one conversation."""

    def __init__(self, render: Render, messages: list[Message], control: re.Pattern[str]) -> None:
        """Render the messages. ``control`` matches control tokens. Raises Unrendered."""
        # A conversation is rendered up to the same message for several answers.
        self._texts: dict[tuple[int, int, bool], str] = {}
        self._given_render = render
        self._messages = messages
        self._control = control
        self.text = self._render(messages, len(messages))

    def spans_of(self, number: int) -> list[Span]:
        """Return what message ``number`` became, ascending. Raises Unrendered."""
        span = self._span_by_prefixes(number)
        spans = self._spans_by_marks(number) if span is None else [span]
        in_tokens = [self._to_tokens(begin, end) for begin, end in spans if begin < end]
        return [(begin, end) for begin, end in in_tokens if begin < end]

    def thoughts_of(self, number: int) -> list[Span]:
        """Return where the thoughts of message ``number`` are. Raises Unrendered."""
        thoughts = self._marked.thoughts[number]
        places = self._places
        return [(places[first], places[last]) for first, last in thoughts if {first, last} <= places.keys()]

    def _span_by_prefixes(self, number: int) -> Span | None:
        try:
            after = self._render(self._messages, number + 1)
            if not self.text.startswith(after):
                return None
            before = self._render(self._messages, number, with_prompt=True)
        except Unrendered:
            return None
        return (len(before), len(after)) if after.startswith(before) else None

    def _render(self, messages: list[Message], number: int, *, with_prompt: bool = False) -> str:
        """Render the first ``number`` messages."""
        key = (id(messages), number, with_prompt)
        if key not in self._texts:
            options = {"add_generation_prompt": True} if with_prompt else {}
            self._texts[key] = self._given_render(messages[:number], **options)
        return self._texts[key]

    def _spans_by_marks(self, number: int) -> list[Span]:
        marked = self._marked
        places = self._places
        own = [places[mark] for mark in marked.of_message[number] if mark in places]
        try:
            before = self._render(marked.messages, number, with_prompt=True)
            begin = self._begin_of_turn(*self._agreement(before))
        except Unrendered:
            if not own:
                raise
            begin = own[0]
        try:
            end, num_missing = self._agreement(self._render(marked.messages, number + 1))
        except Unrendered:  # such as an answer before the first question
            if not own:
                raise
            end = own[-1]
        else:
            if num_missing and not own:  # nothing shows where it ends, such as an empty answer
                return []
        return self._without_others(number, min([begin, *own]), max([end, *own]))

    def _without_others(self, number: int, begin: int, end: int) -> list[Span]:
        """Cut a span where another message has a mark, such as a tool's result between a call and its answer.

        Each piece ends at its last own mark, and the next one begins at its first.
        """
        own = {*self._marked.of_message[number]}
        spans = []
        last_own = begin
        has_other = False
        for mark, place in self._places.items():
            if not begin <= place <= end:
                continue
            if mark not in own:
                has_other = True
                continue
            if has_other and last_own > begin:
                spans.append((begin, last_own))
                begin = place
            has_other = False
            last_own = place
        return [*spans, (begin, end)]

    def _agreement(self, other: str) -> tuple[int, int]:
        """Compare the text with a marked one, from the last mark that both have.

        Returns up to where they agree, and how much more the other one has.
        """
        place = 0
        tail = other
        for found in reversed(list(self._mark.finditer(other))):
            # A template may repeat a text, such as a function's name in front of its result.
            if found[0] in self._places and other.count(found[0]) == 1:
                place = self._places[found[0]]
                tail = other[found.end() :]
                break
        tail = self._mark.sub("", tail)
        here = self.text[place : place + len(tail)]
        num_equal = len_of_common_beginning(here, tail)
        return place + num_equal, len(tail) - num_equal

    def _begin_of_turn(self, place: int, num_missing: int) -> int:
        """Return ``place``, or where the part of the generation prompt begins that is not all in the text.

        A prompt may end with <think>, for thoughts that the text no longer has.
        """
        if not num_missing:
            return place
        before = self.text[:place]
        ends = [found.end() for found in self._control.finditer(before, max(0, place - _MOST_PROMPT_CHARS))]
        return max(before.rfind("\n") + 1, *ends[-1:], 0) or place

    def _to_tokens(self, begin: int, end: int) -> Span:
        """Move the ends of a span out of control tokens, and include the control token that ends the turn."""
        last = begin  # end of the last control token in the span
        for found in self._control.finditer(self.text, max(0, begin - _MOST_CONTROL_CHARS)):
            if found.start() > end:
                break
            if found.start() < begin < found.end():
                begin = found.start()
            if found.end() <= end:
                last = max(last, found.end())
            elif self.text[last : found.start()].isspace() or (last == found.start() > begin):
                end = min(end, found.start())  # the turn has ended before this token
            else:
                end = found.end()
                break
        return begin, end

    @functools.cached_property
    def _mark(self) -> re.Pattern[str]:
        """Return a pattern of marks that are not in the text. Raises Unrendered if all are."""
        for first, last in _MARKS:
            pattern = re.compile(f"[{first}-{last}]")
            if not pattern.search(self.text):
                return pattern
        why = f"it has characters from {_MARKS[0][0]!a} and from {_MARKS[1][0]!a} on"
        raise Unrendered("no_beginning", f"{why}, so nothing tells what the assistant wrote")

    @functools.cached_property
    def _marked(self) -> _Marked:
        first = self._mark.pattern[1]
        last = self._mark.pattern[3]
        return _Marked(self._messages, range(ord(first), ord(last) + 1))

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        """Return where each mark is in the text, ascending. Raises Unrendered if marks change the text."""
        with_marks = self._render(self._marked.messages, len(self._messages))
        places: dict[str, int] = {}
        for number, found in enumerate(self._mark.finditer(with_marks)):
            places.setdefault(found[0], found.start() - number)
        if self._mark.sub("", with_marks) != self.text:
            why = "the template changes earlier turns, and rare characters in messages change what it does"
            raise Unrendered("no_beginning", f"{why}, so nothing tells what the assistant wrote")
        return places


class _Marked:
    """Messages with marks: around each part of an answer, and one inside each other text."""

    def __init__(self, messages: list[Message], marks: range) -> None:
        self._marks = marks  # their code points
        self._num_marks = 0
        self.of_message: list[list[str]] = []  # the marks in each message
        self.thoughts: list[list[tuple[str, str]]] = []  # the marks around each thought of it
        self.messages = [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        first = self._num_marks
        self.thoughts.append([])
        is_answer = message["role"] == "assistant"
        mark = self._around_parts if is_answer else self._inside
        marked = dict(message)
        if is_answer:
            for key in REASONING_KEYS:
                if isinstance(message.get(key), str):
                    marked[key] = self._around(message[key], is_thought=True)
        if "content" in message:
            marked["content"] = _with_texts(message["content"], mark)
        if is_answer and isinstance(message.get("tool_calls"), list):
            marked["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        self.of_message.append([chr(self._marks[number]) for number in range(first, self._num_marks)])
        return marked

    def _call(self, call: Any) -> Any:
        """Mark the strings in a tool call's arguments, which may stand in its function, else its name."""
        if not isinstance(call, dict):
            return call
        marked = dict(call)
        first = self._num_marks
        if "function" in call:
            marked["function"] = self._call(call["function"])
        if "arguments" in call:
            marked["arguments"] = _with_strings(call["arguments"], self._around)
        if self._num_marks == first and isinstance(call.get("name"), str):
            marked["name"] = self._around(call["name"])
        return marked

    def _around_parts(self, text: str) -> str:
        """Mark the parts of an answer, between which <think> and </think> stand."""
        pieces = _THINK_TAG.split(text)
        for number in range(0, len(pieces), 2):
            is_thought = pieces[number + 1 : number + 2] == ["</think>"]
            pieces[number] = self._around(pieces[number], is_thought=is_thought)
        return "".join(pieces)

    def _around(self, text: str, *, is_thought: bool = False) -> str:
        core = text.strip()
        if not core or self._num_marks + 2 > len(self._marks):
            return text
        first = self._next()
        last = self._next()
        if is_thought:
            self.thoughts[-1].append((first, last))
        return text.replace(core, f"{first}{core}{last}", 1)

    def _inside(self, text: str) -> str:
        """Put a mark into a text, not at its ends, at which templates may look."""
        core = text.strip()
        if not core or self._num_marks == len(self._marks):
            return text
        middle = text.index(core) + (len(core) + 1) // 2
        return f"{text[:middle]}{self._next()}{text[middle:]}"

    def _next(self) -> str:
        number = self._num_marks
        self._num_marks += 1
        return chr(self._marks[number])


def _with_texts(content: Any, change: Callable[[str], str]) -> Any:
    """Return a message's content, a text or a list of text parts, with changed texts."""
    if isinstance(content, list):
        return [{**part, "text": change(part["text"])} for part in content]
    return change(content) if isinstance(content, str) else content


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with all its strings changed, but not its keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _with_strings(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_strings(each, change) for each in value]
    return value


def len_of_common_beginning(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    if one == other:
        return len(one)
    for number, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return number
    return min(len(one), len(other))


def strings_in(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, at any depth, but not the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings_in(item)
