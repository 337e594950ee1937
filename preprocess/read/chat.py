"""Render conversations as texts with a model's chat template, and find what the assistant wrote in them.

transformers renders them, so the texts are those of ``apply_chat_template``. It runs in a process of its own,
without torch. The process starts in about 2.5 s, renders about 3,000 short conversations per second, and is
kept for the next shard.

The assistant's parts are those that the template puts between ``{% generation %}`` and ``{% endgeneration
%}``. A template without these tags is rendered up to each answer, with the generation prompt, and again with
the answer: what the second text has more is the assistant's. The whole text must begin with both.

Templates are code of other people, so the process has a limit of memory and, per conversation, of CPU time.
A conversation over a limit fails the attempt. It is not left out, as its time depends on the node.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from preprocess.read.text_fields import MAX_JSON_DEPTH, UnusableText
from shardprep.errors import BadInput, Refused, UsageError
from shardprep.format.plan import MaskRule
from shardprep.hub import no_tokenizer
from shardprep.limited_process import CallFailed, LimitedProcess

# Today's date, for templates that ask for it: equal inputs give equal bytes on any day.
FIXED_DATE = datetime.datetime(2024, 7, 26)  # noqa: DTZ001  the one that Llama 3.1's template falls back on
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MOST_CPU_S = 20  # for one conversation; an ordinary one takes 0.0003 s, one of 4 MiB about 1 s
_MOST_MEMORY_BYTES = 1 << 30  # beyond what importing transformers takes
_MOST_RENDERED_CHARS = 16 << 20  # of one conversation; a longer one is left out
_MOST_BATCH_BYTES = 256 << 20  # of answers for a batch, which has 0.5 MiB of messages
# Rendering takes quadratic time, so conversations with very many answers are left out. Their work is the
# number of answers x (characters + _MESSAGE_CHARS per message). The limits are 2 s of work: 700 short answers
# without tags, 8,000 with them.
_MOST_WORK, _MOST_TAGGED_WORK = 1 << 28, 1 << 35
_MESSAGE_CHARS = 256
_PROBE = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A probe."}]

Spans = list[tuple[int, int]]  # characters [begin, end) of a text


class ChatTemplate(NamedTuple):
    """All that decides how a conversation is rendered. The plan contains it."""

    text: str  # Jinja
    tokens: str  # JSON: "named", the special tokens by name; "control", the texts of all control tokens
    allows_control_tokens: bool  # in messages


class Rendered(NamedTuple):
    text: str
    spans: Spans  # what the assistant wrote, ascending


class TooCostly(BadInput):
    """A conversation took more memory or time to render than is allowed."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(f"the chat template {what}")
        self.number = number  # of the conversation in its batch


def chat_versions() -> str:
    from importlib.metadata import version  # takes 10 ms, which tasks without conversations save

    return ", ".join(f"{name} {version(name)}" for name in ("transformers", "jinja2"))


def check_chat_versions(planned: str) -> None:
    """Raise Refused if the installed versions differ from those that planned."""
    if (found := chat_versions()) != planned:
        expected = f"{planned}, as another version may give another text: install these, or plan again"
        raise Refused(found=f"conversations rendered with {found}", expected=expected)


def chat_template_of(
    folder: Path, given: Path | None, *, allows_control_tokens: bool
) -> tuple[ChatTemplate, MaskRule]:
    """Return the template of a tokenizer's folder, or of a file, and the rule of its loss masks.

    If the template has the tags, the rule is that of the installed transformers. Raises UsageError if there
    is no template, or if it cannot render a conversation, and Refused if the rule is unknown.
    """
    try:
        (answer,) = _PROCESS.call_each(_tokenizer_facts, (), [str(folder)])
    except CallFailed as error:
        raise no_tokenizer(str(folder), error.what) from None
    found = json.loads(answer)
    text = found["template"]
    if given is not None:
        try:
            text = given.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            expected = "the file of a Jinja template, in UTF-8"
            raise UsageError(path=given, found=f"--chat_template_file ({why})", expected=expected) from None
    if not text:
        todo = "use the model_id of its chat variant, or pass --chat_template_file with a Jinja template"
        message = f"the tokenizer has no chat template (base models have none); {todo}"
        raise UsageError(message, expected="chat template", remedy="--chat_template_file")
    template = ChatTemplate(text, json.dumps(found["tokens"], ensure_ascii=False), allows_control_tokens)
    mask_rule: MaskRule = found["mask_rule"] if _GENERATION.search(text) else "characters"
    if not mask_rule:
        what = "loss masks by a rule that this version of shardprep does not know"
        raise Refused(f"{chat_versions()} make {what}; install transformers 5.24, or a later shardprep")
    try:
        (rendered,) = render_conversations(template, [json.dumps(_PROBE)])
    except TooCostly as error:
        remedy = "pass a template without endless loops and huge texts as --chat_template_file"
        raise UsageError(f"{error}, for a question and its answer; {remedy}") from None
    if isinstance(rendered, UnusableText):
        what = f"the chat template cannot be used: for a question and its answer, {rendered.detail}"
        remedy = "correct a copy of it, perhaps with {% generation %} and {% endgeneration %} around answers"
        raise UsageError(f"{what}; {remedy}, and pass --chat_template_file")
    return template, mask_rule


def render_conversations(template: ChatTemplate, conversations: list[str]) -> list[Rendered | UnusableText]:
    """Render conversations, given as JSON, or return why not. Raises TooCostly and ReadWriteError."""
    try:
        answers = _PROCESS.call_each(_rendered, (template,), conversations)
    except CallFailed as error:
        raise TooCostly(error.number, error.what) from None
    found = map(json.loads, answers)
    return [UnusableText(**each) if isinstance(each, dict) else Rendered(*each) for each in found]


# The process that renders. ------------------------------------------------------------------------------


def _prepare() -> None:
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would take address space
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    # transformers walks through messages with recursive functions, some of which take two calls per level.
    sys.setrecursionlimit(20 * MAX_JSON_DEPTH)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
    from transformers.utils import chat_template_utils  # noqa: F401


_PROCESS = LimitedProcess(
    name="renders chat templates",
    prepare=_prepare,
    memory_bytes=_MOST_MEMORY_BYTES,
    cpu_s=_MOST_CPU_S,
    answer_bytes=_MOST_BATCH_BYTES,
)


def _rendered(template: ChatTemplate, conversation: str) -> str:
    """Return a text and its spans, or the fields of an UnusableText, as JSON: it may have lone surrogates."""
    try:
        return json.dumps(_renderer(template).answer(conversation))
    except _Unusable as error:
        return json.dumps(vars(UnusableText(*error.args)))


@functools.lru_cache(maxsize=1)
def _renderer(template: ChatTemplate) -> _Renderer:
    return _Renderer(template)


def _tokenizer_facts(folder: str) -> str:
    """Return the template of a tokenizer, its tokens, and the rule of loss masks of transformers, as JSON."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    template = ""
    with contextlib.suppress(ValueError):  # it has none
        template = tokenizer.get_chat_template()
    added = sorted(tokenizer.added_tokens_decoder.items())
    control = [token.content for _, token in added if token.special]
    # Find the rule by which this transformers marks the assistant's tokens: it changed in 5.24. A character
    # of three tokens, 뷁, and a space that no token has tell the two apart. "" is an unknown rule.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    splits = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    bytewise.pre_tokenizer = pre_tokenizers.Sequence(splits)
    found: Any = PreTrainedTokenizerFast(tokenizer_object=bytewise).apply_chat_template(
        _PROBE,
        chat_template="a{% generation %}뷁{% endgeneration %}b{% generation %} c{% endgeneration %}",
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    masks = {(0, 1, 1, 1, 0, 1): "overlap", (0, 1, 0, 0, 0, 0): "char_to_token"}
    facts = {
        "template": template,
        "tokens": {"named": tokenizer.special_tokens_map, "control": control},
        "mask_rule": masks.get(tuple(found["assistant_masks"]), ""),
    }
    return json.dumps(facts, default=str)  # a token may not be a str


class _Unusable(Exception):
    """A conversation that is left out. ``args`` are those of UnusableText."""


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
        tokens = json.loads(template.tokens)
        self._render: Callable[..., Any] = functools.partial(
            chat_template_utils.render_jinja_template, chat_template=template.text, **tokens["named"]
        )
        self._is_tagged = bool(_GENERATION.search(template.text))
        control = [] if template.allows_control_tokens else sorted(tokens["control"], key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, control)) or "(?!)")

    def answer(self, conversation: str) -> tuple[str, Spans]:
        """Return the text of a conversation and the assistant's spans. Raises _Unusable."""
        messages = self._checked(json.loads(conversation))
        text, spans = self._text(messages, return_assistant_tokens_mask=self._is_tagged)
        for number, message in enumerate(messages):
            if self._is_tagged or message["role"] != "assistant":
                continue
            before, _ = self._text(messages[:number], add_generation_prompt=True)
            after, _ = self._text(messages[: number + 1])
            if not (after.startswith(before) and text.startswith(after)):
                why = f"the text up to message {number} is no beginning of the whole"
                raise _Unusable("no_beginning", f"{why}, so nothing tells what the assistant wrote")
            if len(before) < len(after):
                spans.append((len(before), len(after)))
        if not any(begin < end for begin, end in spans):
            raise _Unusable("no_assistant", "the template renders nothing that the assistant wrote")
        return text, spans

    def _checked(self, messages: list[Any]) -> list[dict[str, Any]]:
        """Return the messages without their nulls. Raises _Unusable."""
        if not messages:
            raise _Unusable("no_messages", "the list of messages is empty")
        num_answers = num_chars = 0
        for number, message in enumerate(messages):
            role = message.get("role") if isinstance(message, dict) else None
            if role not in ROLES:
                raise _Unusable("wrong_role", f"message {number} has the role {str(role)[:40]!r}")
            num_answers += role == "assistant"
            for text in texts_in(message):
                num_chars += len(text)
                if found := self._control.search(text):
                    raise _Unusable("control_token", f"message {number} holds the control token {found[0]}")
        if not num_answers:
            raise _Unusable("no_assistant", "no message is the assistant's")
        work = num_answers * (num_chars + _MESSAGE_CHARS * len(messages))
        if work > (_MOST_TAGGED_WORK if self._is_tagged else _MOST_WORK):
            what = f"{num_answers} answers in {len(messages)} messages of {num_chars} characters"
            remedy = "; put {% generation %} into a copy of the template, which may have more"
            why = f"{what} take too long to render{'' if self._is_tagged else remedy}"
            raise _Unusable("too_many_answers", why)
        # As apply_chat_template does: templates fail on nulls, and in tables all messages have the same keys.
        return [{key: value for key, value in message.items() if value is not None} for message in messages]

    def _text(self, messages: list[dict[str, Any]], **options: Any) -> tuple[str, Spans]:
        """Render messages. Returns their text and, if the template marks them, the assistant's spans."""
        try:
            texts, spans = self._render(conversations=[messages], **options)
        except MemoryError:  # ends the process, see ``serve``
            raise
        except Exception as error:  # a template may raise anything
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise _Unusable("template_error", f"the template raised {said}") from None
        text: str = texts[0]
        if len(text) > _MOST_RENDERED_CHARS:
            most = _MOST_RENDERED_CHARS >> 20
            raise _Unusable("template_error", f"the template makes more than {most} Mi characters of it")
        return text, spans[0] if spans else []


def texts_in(value: Any) -> Iterator[str]:
    """Yield all strings in a message, at any depth, but not the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_in(item)
