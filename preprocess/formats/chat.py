"""Conversations -> texts, by a model's chat template, and which parts of a text the assistant wrote.

transformers renders, so that texts are those of ``apply_chat_template``; in a process of its own and without
torch, as transformers has no place in a process that makes shards. Both talk in lines of JSON. The process
starts in about 2.5 s, renders about 3,000 short conversations per second, and is kept for the next shard.

The assistant's parts are what the template puts between ``{% generation %}`` and ``{% endgeneration %}``. A
template without these tags is rendered up to each turn of the assistant, with the prompt for it, and again
with the turn: what came behind the first text is the assistant's. Both must be beginnings of the whole text.

A template that asks for today's date is told FIXED_DATE: equal inputs give equal bytes on any day.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import importlib.metadata
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from preprocess.formats.text_fields import UnusableText
from shardprep.console import guard_streams
from shardprep.errors import ReadWriteError, Refused, UsageError
from shardprep.format.checked_json import MAX_JSON_DEPTH
from shardprep.own_packages import HOME
from shardprep.signals import STOP_SIGNALS, stop_signals_wait

FIXED_DATE = datetime.datetime(2024, 7, 26)  # noqa: DTZ001  the one that Llama 3.1's template falls back on
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ENDS_WITHIN_S = 10.0
_LIBRARIES = ("transformers", "jinja2")
_CODE = "import sys; sys.path[0] = sys.argv[1]; from preprocess.formats.chat import serve; serve()"


def _turns(*texts: str) -> list[dict[str, Any]]:
    return [dict(zip(("role", "content"), text.split(": ", 1), strict=True)) for text in texts]


_PROBE = _turns("user: What is it?", "assistant: A probe.")
_CALL = {
    "id": "call00001",  # nine letters and digits, as Mistral's templates want it
    "type": "function",
    "function": {"name": "probe_tool", "arguments": {"probe_key": "probe_value"}},
}
# Conversations of other shapes. What every part that a data set may need renders to has to be in the text.
_SHAPES = {
    "several turns": [*_PROBE, *_turns("user: And now?", "assistant: Again.")],
    "a system message": [*_turns("system: Be brief."), *_PROBE],
    "two user messages in a row": [*_turns("user: Hear this."), *_PROBE],
    "two answers in a row": [*_PROBE, *_turns("assistant: And more.")],
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

Spans = list[tuple[int, int]]  # characters [begin, end) of a text


class ChatTemplate(NamedTuple):
    """What decides how a conversation reads; all of it lies in the plan."""

    text: str  # Jinja
    tokens: str  # JSON: "named", the special tokens by their names; "control", the text of each
    allows_control_tokens: bool  # in what people wrote


class Rendered(NamedTuple):
    text: str
    spans: Spans  # what the assistant wrote, ascending


def chat_versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES)


def check_chat_versions(planned: str) -> None:
    """That conversations are rendered here as planned. Raises Refused."""
    if (found := chat_versions()) != planned:
        raise Refused(
            f"the plan renders conversations with {planned}, here {found}: another version may give another "
            "text; install those that planned, or plan anew into a new folder"
        )


def chat_template_of(folder: Path, given: Path | None, *, allows_control_tokens: bool) -> ChatTemplate:
    """The template of a tokenizer's folder, or of a file, once it has rendered a conversation.

    Raises UsageError where there is none, or it cannot be used.
    """
    text = None if given is None else _text_of(given)
    found = _asked({"folder": str(folder)})
    text = found["template"] if text is None else text
    if not text:
        raise UsageError(
            "the tokenizer has no chat template, as those of base models; take the model_id of its chat "
            "variant, or pass --chat_template_file with a Jinja template"
        )
    template = ChatTemplate(text, json.dumps(found["tokens"], ensure_ascii=False), allows_control_tokens)
    (rendered,) = render_conversations(template, [json.dumps(_PROBE)])
    if isinstance(rendered, UnusableText):
        raise UsageError(
            f"the chat template cannot be used: of a question and its answer, {rendered.detail}. A template "
            "says what the assistant writes by {% generation %} and {% endgeneration %}: put them there in a "
            "copy of it, and pass --chat_template_file"
        )
    return template


def template_notes(template: ChatTemplate) -> list[str]:
    """Return a line for each reason why conversations of some shapes cannot be rendered, or lose text.

    Raises ReadWriteError.
    """
    shapes = dict(_SHAPES)
    if "tool_calls" not in template.text:
        del shapes["tool calls"]
    rendered = render_conversations(template, list(map(json.dumps, shapes.values())))
    unusable: dict[str, list[str]] = {}
    losing = []
    for (name, shape), one in zip(shapes.items(), rendered, strict=True):
        if isinstance(one, UnusableText):
            unusable.setdefault(one.detail, []).append(name)
        elif lost := [word for word in _words_of(shape) if word not in one.text]:
            losing.append(f"{name} ({lost[0]!a})")
    remedies = (
        "change the data, or put {% generation %} and {% endgeneration %} around what the assistant writes "
        "in a copy of the template, and pass --chat_template_file"
    )
    notes = [
        f"the chat template cannot render conversations with {', or '.join(names)}: {detail}; such "
        f"conversations will be left out; {remedies}"
        for detail, names in unusable.items()
    ]
    if losing:
        notes.append(
            f"the chat template leaves out text of conversations with {', or '.join(losing)}; the assistant "
            "will not learn it: to keep it, pass a template that renders it as --chat_template_file"
        )
    return notes


def _words_of(shape: list[dict[str, Any]]) -> list[str]:
    """What of a conversation's text the rendered one is expected to have."""
    said = [message.get(key) for message in shape for key in ("content", "tool_calls")]
    parts = itertools.chain.from_iterable(re.split(r"\s*</?think>\s*", text) for text in _strings(said))
    return [part for part in parts if part and part not in ("call00001", "function")]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat_template_file {path} cannot be read: {error}") from None


def render_conversations(
    template: ChatTemplate, conversations: Sequence[str]
) -> list[Rendered | UnusableText]:
    """Each conversation, a list of messages as JSON; or why it cannot be used. Raises ReadWriteError."""
    answers = _asked({"template": template, "conversations": list(conversations)})
    return [
        UnusableText(**answer)
        if isinstance(answer, dict)
        else Rendered(answer[0], [(begin, end) for begin, end in answer[1]])
        for answer in answers
    ]


_LOCK = threading.Lock()


def _asked(question: dict[str, Any]) -> Any:
    """What this process's renderer answers: a line of JSON to a line of JSON."""
    with _LOCK:
        child = _child()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(question).encode() + b"\n")
            child.stdin.flush()
            return json.loads(child.stdout.readline())
        except (OSError, ValueError):  # no line, or half of one
            code = _end(child)
            _child.cache_clear()
            raise ReadWriteError(
                f"the process that renders chat templates ended with {code} and without a word; is there too "
                "little memory? Run this again"
            ) from None


@functools.lru_cache(maxsize=1)
def _child() -> subprocess.Popen[bytes]:
    """The one process that renders for this one; it ends with it."""
    command = [sys.executable, "-c", _CODE, str(HOME)]
    environ = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    with stop_signals_wait():
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
    atexit.register(_end, child)
    return child


def _end(child: subprocess.Popen[bytes]) -> int:
    """A renderer ends when it is asked nothing more; returns its exit code."""
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        return child.wait(_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:  # a template that does not end
        child.kill()
        return child.wait()


def serve() -> None:
    """Body of the process. It heeds no signal: the end of who asks ends its input, and so it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    # transformers walks through messages by functions that call themselves, some of them twice a level.
    sys.setrecursionlimit(20 * MAX_JSON_DEPTH)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    guard_streams()
    conversations_of = functools.lru_cache(maxsize=1)(Conversations)
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            question = json.loads(line)
            if "folder" in question:
                _say(answers, _tokenizer_facts(question["folder"]))
            else:
                renderer = conversations_of(ChatTemplate(*question["template"]))
                _say(answers, [renderer.rendered(text) for text in question["conversations"]])


def _say(answers: IO[bytes], what: Any) -> None:
    answers.write(json.dumps(what, default=str).encode() + b"\n")  # a token may be no str
    answers.flush()


def _tokenizer_facts(folder: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    added = tokenizer.added_tokens_decoder
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        template = ""
    control = [token.content for _, token in sorted(added.items()) if token.special]
    return {
        "template": template,
        "tokens": {"named": tokenizer.special_tokens_map, "control": control},
    }


class _Unusable(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Conversations:
    """Renders, in the process that has transformers."""

    def __init__(self, template: ChatTemplate) -> None:
        from transformers.utils import chat_template_utils

        class FixedDate(datetime.datetime):
            # The ignored one: a subclass's now() has to return a FixedDate, which strftime does not need.
            @classmethod
            def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]  # noqa: ARG003
                return FIXED_DATE

        chat_template_utils.datetime = FixedDate  # type: ignore[attr-defined]  # what strftime_now asks
        tokens = json.loads(template.tokens)
        self._render: Callable[..., Any] = functools.partial(
            chat_template_utils.render_jinja_template, chat_template=template.text, **tokens["named"]
        )
        self._is_tagged = bool(_GENERATION.search(template.text))
        control = [] if template.allows_control_tokens else sorted(tokens["control"], key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, control)) or "(?!)")

    def rendered(self, conversation: str) -> list[Any] | dict[str, str]:
        """Text and spans; or reason and detail of a conversation that cannot be used."""
        try:
            messages = self._checked(json.loads(conversation))
            text, spans = self._tagged(messages) if self._is_tagged else self._by_beginnings(messages)
        except _Unusable as error:
            return {"reason": error.reason, "detail": str(error)}
        if not any(begin < end for begin, end in spans):
            detail = "the template renders nothing that the assistant wrote"
            return {"reason": "no_assistant", "detail": detail}
        return [text, spans]

    def _checked(self, messages: list[Any]) -> list[dict[str, Any]]:
        if not messages:
            raise _Unusable("no_messages", "the list of messages is empty")
        for number, message in enumerate(messages):
            role = message.get("role") if isinstance(message, dict) else None
            if role not in ROLES:
                raise _Unusable("wrong_role", f"message {number} has the role {str(role)[:40]!r}")
            for text in _strings(message):
                if found := self._control.search(text):
                    raise _Unusable("control_token", f"message {number} holds the control token {found[0]}")
        if not any(message["role"] == "assistant" for message in messages):
            raise _Unusable("no_assistant", "no message is the assistant's")
        # As apply_chat_template does: templates fail on a null, and tables have one for each other's keys.
        return [{key: value for key, value in message.items() if value is not None} for message in messages]

    def _tagged(self, messages: list[dict[str, Any]]) -> tuple[str, Spans]:
        (text,), (spans,) = self._asked(messages, return_assistant_tokens_mask=True)
        return text, spans

    def _by_beginnings(self, messages: list[dict[str, Any]]) -> tuple[str, Spans]:
        text = self._text(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._text(messages[:number], add_generation_prompt=True)
                after = self._text(messages[: number + 1])
                if not (after.startswith(before) and text.startswith(after)):
                    raise _Unusable(
                        "no_beginning",
                        f"the text up to message {number} is no beginning of the whole, so nothing tells "
                        "what the assistant wrote",
                    )
                spans.append((len(before), len(after)))
        return text, spans

    def _text(self, messages: list[dict[str, Any]], **options: Any) -> str:
        text: str = self._asked(messages, **options)[0][0]
        return text

    def _asked(self, messages: list[dict[str, Any]], **options: Any) -> tuple[list[str], list[Spans]]:
        try:
            found: tuple[list[str], list[Spans]] = self._render(conversations=[messages], **options)
        except Exception as error:  # whatever a template of others does
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise _Unusable("template_error", f"the template raised {said}") from None
        return found


def _strings(value: Any) -> Iterator[str]:
    """Every text in a message, however deep; names of keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
