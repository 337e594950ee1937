"""Render conversations as texts with a model's chat template, in processes with limits.

transformers renders them, so the texts are those of ``apply_chat_template``. It runs in processes of its own,
without torch. A process starts in about 2.5 s, renders about 3,000 short conversations per second, and is
kept for the next shard. A task with four CPUs or more has several, which render parts of each batch. The
bytes of a shard do not depend on their number. ``rendering.py`` is what runs there; ``answers.py`` finds what
the assistant wrote.

Templates are code of other people, so the process has a limit of memory and, per conversation, of CPU time.
A conversation over a limit fails the attempt. It is not left out, as its time depends on the node.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain, pairwise, repeat
from pathlib import Path
from typing import Any

from preprocess.read.rendering import ChatTemplate, Rendered, rendered_json
from preprocess.read.text_fields import MAX_JSON_DEPTH, UnusableText
from shardprep.errors import BadInput, Refused, UsageError
from shardprep.format.plan_options import MaskRule
from shardprep.hub import no_tokenizer
from shardprep.limited_process import CallFailed, LimitedProcess

_MOST_CPU_S = 20  # for one conversation; an ordinary one takes 0.0003 s, one of 4 MiB about 1 s
_MOST_MEMORY_BYTES = 1 << 30  # beyond what importing transformers takes
_MOST_BATCH_BYTES = 256 << 20  # of answers for a batch, which has 0.5 MiB of messages
_PROBE = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A probe."}]


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
    is no template, and Refused if the rule is unknown.
    """
    try:
        (answer,) = _PROCESSES[0].call_each(_tokenizer_facts, (), [str(folder)])
    except CallFailed as error:
        raise no_tokenizer(str(folder), error.what) from None
    found = json.loads(answer)
    text = found["template"]
    tool_text = found["tool_template"]
    if given is not None:
        tool_text = ""
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
    tokens = json.dumps(found["tokens"], ensure_ascii=False)
    template = ChatTemplate(text, tokens, allows_control_tokens, tool_text=tool_text)
    mask_rule: MaskRule = found["mask_rule"] if template.has_tags() else "characters"
    if not mask_rule:
        what = "loss masks by a rule that this version of shardprep does not know"
        raise Refused(f"{chat_versions()} make {what}; install transformers 5.24, or a later shardprep")
    return template, mask_rule


def render_conversations(
    template: ChatTemplate, conversations: list[str]
) -> list[list[Rendered] | UnusableText]:
    """Return the documents of conversations, given as JSON, or why there are none.

    Raises TooCostly and ReadWriteError.
    """
    parts = _parts(conversations, len(_PROCESSES))
    answers = _ask(_PROCESSES[0], template, parts[0], 0) if len(parts) == 1 else _ask_several(template, parts)
    found: list[list[Rendered] | UnusableText] = []
    for answer in map(json.loads, answers):
        is_unusable = isinstance(answer, dict)
        found.append(UnusableText(**answer) if is_unusable else [Rendered(*each) for each in answer])
    return found


def _ask_several(template: ChatTemplate, parts: list[list[str]]) -> list[Any]:
    """Render each part in a process of its own."""
    processes = _PROCESSES[: len(parts)]
    firsts = accumulate(map(len, parts), initial=0)
    for process in processes:
        process.start()  # from this thread, which gets the signals
    with ThreadPoolExecutor(len(parts)) as pool:
        try:
            # In order, so that the first conversation over a limit is named.
            return list(chain.from_iterable(pool.map(_ask, processes, repeat(template), parts, firsts)))
        except BaseException:
            for process in processes:  # threads that wait for them end, too
                process.end(at_once=True)
            raise


def _ask(process: LimitedProcess, template: ChatTemplate, part: list[str], first: int) -> list[Any]:
    """Render a part of the conversations, whose first one has the number ``first``."""
    try:
        return process.call_each(rendered_json, (template,), part)
    except CallFailed as error:
        raise TooCostly(first + error.number, error.what) from None


def _parts(conversations: list[str], most: int) -> list[list[str]]:
    """Cut conversations into at most so many parts, of about the same number of characters."""
    ends = list(accumulate(map(len, conversations)))
    shares = [ends[-1] * number // most for number in range(1, most)]
    cuts = [0, *(bisect_right(ends, share) for share in shares), len(conversations)]
    parts = [conversations[first:end] for first, end in pairwise(cuts) if first < end]
    return parts or [[]]


def use_processes(number: int) -> None:
    """Render in so many processes from now on."""
    while len(_PROCESSES) < number:
        _PROCESSES.append(_new_process())
    while len(_PROCESSES) > number:
        _PROCESSES.pop().end()


def cpu_s() -> float:
    """Return the CPU time of the processes, 0 before they start. It is no part of this one's."""
    seconds = 0.0
    for process in _PROCESSES:
        if process.is_started:
            seconds += float(process.call_each(_cpu_s, (), [None])[0])
    return seconds


# The processes that render. ------------------------------------------------------------------------------


def _prepare() -> None:
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would take address space
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    # transformers walks through messages with recursive functions, some of which take two calls per level.
    sys.setrecursionlimit(20 * MAX_JSON_DEPTH)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
    from transformers.utils import chat_template_utils  # noqa: F401


def _new_process() -> LimitedProcess:
    return LimitedProcess(
        name="renders chat templates",
        prepare=_prepare,
        memory_bytes=_MOST_MEMORY_BYTES,
        cpu_s=_MOST_CPU_S,
        answer_bytes=_MOST_BATCH_BYTES,
    )


_PROCESSES = [_new_process()]


def _cpu_s(_: None) -> float:
    return time.process_time()


def _tokenizer_facts(folder: str) -> str:
    """Return the template of a tokenizer, its tokens, and the rule of loss masks of transformers, as JSON."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    template = tool_template = ""
    with contextlib.suppress(ValueError):  # it has none
        template = tokenizer.get_chat_template()
        # Of several templates, transformers takes another one if there are tools.
        tool_template = tokenizer.get_chat_template(tools=[])
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
        "tool_template": "" if tool_template == template else tool_template,
        "tokens": {"named": tokenizer.special_tokens_map, "control": control},
        "mask_rule": masks.get(tuple(found["assistant_masks"]), ""),
    }
    return json.dumps(facts, default=str)  # a token may not be a str
