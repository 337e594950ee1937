"""Take conversations out of records, in the forms that people give them.

A record has a list of messages, or one of the other forms in ``FORMS``. Beside it there may be ``tools``,
``documents`` and ``chat_template_kwargs``, as lists and objects or as JSON. A conversation is passed on as
JSON: the list of its messages, or, if there is more, an object of ``messages`` and these three.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from preprocess.read.text_fields import (
    MISSING,
    FieldPath,
    JsonValue,
    TextFields,
    UnusableText,
    parsed_if_json,
    unusable,
)  # fmt: skip
from shardprep.errors import UsageError
from shardprep.format.plan_options import PlanOptions

# --chat_format -> how ``plan`` tells it.
FORMS = {
    "messages": "messages of role and content",
    "sharegpt": "ShareGPT's messages of from and value",
    "prompt": "prompt and completion",
    "alpaca": "Alpaca's instruction, input and output",
}
_SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
_OTHER_FIELDS = (
    "prompt", "completion", "instruction", "input", "output", "history", "system", "chosen", "rejected",
)  # fmt: skip
# What a conversation may have beside its messages.
PARTS_BESIDE = {"tools": list, "documents": list, "chat_template_kwargs": dict}
_PAIR = (
    "it is a preference pair, which is no row for a language model's loss: for one side, plan with "
    "--text_field chosen; for the pair, use a preference trainer on the records"
)


class Recognized(NamedTuple):
    """Messages, and in which of FORMS they were."""

    form: str
    messages: list[JsonValue]


class MessageFields(TextFields):
    """Takes conversations out of records. The text is their JSON, to be rendered later."""

    is_chat = True

    def __init__(self, options: PlanOptions, path: str = "") -> None:
        super().__init__(options, path)
        self.plain_name = None
        if self.is_first_of:
            expected = "one field with the list of messages, or one for each pattern of files"
            raise UsageError(found=f"--text_field {options.text_field}", expected=expected)
        (first,) = self.text_paths
        lists = [first]
        if first == ("messages",):
            lists.append(("conversations",))
        beside = {
            "tools": options.tools_field,
            "documents": options.documents_field,
            "chat_template_kwargs": options.kwargs_field,
        }
        # Name -> places, of which the first one with a value counts: beside nested messages, then at the top.
        self._places: dict[str, list[FieldPath]] = {"lists": lists}
        for name in _OTHER_FIELDS:
            self._places[name] = [(*first[:-1], name)]
        for name, field_name in beside.items():
            beside_it = tuple(field_name.split("."))
            self._places[name] = [(*first[:-1], *beside_it), beside_it]
        self.text_paths = list(dict.fromkeys(path for paths in self._places.values() for path in paths))
        self._drops_nulls = False

    def at(self, places: Mapping[FieldPath, FieldPath]) -> MessageFields:
        copied = MessageFields(self.options)
        copied.text_paths = [places.get(path, path) for path in self.text_paths]
        copied.named = {each: places.get(path, path) for each, path in self.named.items()}
        for name, paths in self._places.items():
            copied._places[name] = [places.get(path, path) for path in paths]
        copied._drops_nulls = True
        return copied

    def text_of_values(self, values: Sequence[JsonValue]) -> str | UnusableText:
        """Return the conversation as JSON, given the values of ``text_paths``."""
        given = dict(zip(self.text_paths, values, strict=True))
        recognized = self.recognize(given)
        if isinstance(recognized, UnusableText):
            return recognized
        found: dict[str, JsonValue] = {"messages": recognized.messages}
        for name, expected in PARTS_BESIDE.items():
            path, value = self._first(name, given)
            if isinstance(value, UnusableText):
                return value
            value = parsed_if_json(value) if value != "" else None
            if isinstance(value, list):
                value = list(map(parsed_if_json, value))
            if value is None or value == {}:
                continue
            if not isinstance(value, expected):
                return unusable(path, value, "a list" if expected is list else "an object")
            found[name] = value
        conversation = found if len(found) > 1 else recognized.messages
        try:
            return json.dumps(conversation, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:  # such as a NaN in a table
            name = ".".join(self._places["lists"][0])
            return UnusableText("wrong_type", f"the field {name} cannot be JSON ({error})")

    def recognize(self, given: Mapping[FieldPath, JsonValue]) -> Recognized | UnusableText:
        """Return the messages of a record, given the values of ``text_paths``."""
        form = self.options.chat_format
        value_of = {name: self._first(name, given)[1] for name in _OTHER_FIELDS}
        has = {name for name, value in value_of.items() if value is not None}
        path, value = self._first("lists", given)
        if isinstance(value, UnusableText):
            return value
        found: Recognized | UnusableText | None = None
        # Such as --text_field chosen, beside a prompt.
        is_part = self.options.text_field != "messages" and _is_completion(value) and "prompt" in has
        if is_part and form in ("auto", "prompt"):
            found = Recognized("prompt", _prompt_and_completion(value_of["prompt"], value))
        elif value is not None and form in ("auto", "messages", "sharegpt"):
            found = _messages_of_list(path, value, form)
        elif {"prompt", "completion"} <= has and form in ("auto", "prompt"):
            messages = _prompt_and_completion(value_of["prompt"], value_of["completion"])
            found = Recognized("prompt", messages)
        elif {"instruction", "output"} <= has and form in ("auto", "alpaca"):
            found = _alpaca(value_of)
        elif {"chosen", "rejected"} <= has:
            return UnusableText("preference_pair", _PAIR)
        if found is None:
            first = self._places["lists"][0]
            if form != "auto" and value is not None:
                return UnusableText("no_field", f"it has no {FORMS[form]}, as --chat_format says")
            return unusable(first, given.get(first, MISSING))
        system = value_of["system"]
        if isinstance(found, UnusableText) or found.form == "messages":
            return found
        if isinstance(system, str) and system and _role(found.messages) != "system":
            found.messages.insert(0, {"role": "system", "content": system})
        return found

    def beside(self, given: Mapping[FieldPath, JsonValue]) -> set[str]:
        """Return what a record has beside its messages: some of tools, documents and chat_template_kwargs."""
        return {name for name in PARTS_BESIDE if self._first(name, given)[1] not in (None, "", "[]", [], {})}

    def _first(self, name: str, given: Mapping[FieldPath, JsonValue]) -> tuple[FieldPath, JsonValue]:
        """Return the first of the places of a name that has a value, and the value, which may be None."""
        paths = self._places[name]
        for path in paths:
            value = given.get(path)
            if value is not None and value is not MISSING:
                return path, _without_nulls(value) if self._drops_nulls else value
        return paths[0], None


def _messages_of_list(path: FieldPath, value: JsonValue, form: str) -> Recognized | UnusableText:
    # In some tables the list, or each message, is a string of JSON, as messages may have other fields.
    value = parsed_if_json(value)
    if not isinstance(value, list):
        return unusable(path, value, "a list")
    messages = list(map(parsed_if_json, value))
    is_sharegpt = bool(messages) and isinstance(messages[0], dict) and {"from", "value"} <= messages[0].keys()
    if form == "messages" or (form == "auto" and not is_sharegpt):
        return Recognized("messages", messages)
    return Recognized("sharegpt", list(map(_of_sharegpt, messages)))


def _of_sharegpt(message: JsonValue) -> JsonValue:
    """Return a message of from and value as one of role and content. Unknown roles are refused later."""
    if not isinstance(message, dict):
        return message
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    speaker = message.get("from")
    value = message.get("value")
    lower = str(speaker).lower()
    role = _SHAREGPT_ROLES.get(lower, speaker)
    if lower != "function_call":
        return {"role": role, "content": value, **others}
    calls = parsed_if_json(value)
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": role, "content": "", "tool_calls": [_call(each) for each in calls], **others}


def _call(call: JsonValue) -> JsonValue:
    return {"type": "function", "function": call}


def _is_completion(value: JsonValue) -> bool:
    """Return whether a value is an answer without its question."""
    messages = _messages_in(value)
    return isinstance(value, str) if messages is None else _role(messages) == "assistant"


def _role(messages: list[JsonValue]) -> JsonValue:
    return messages[0].get("role") if messages and isinstance(messages[0], dict) else None


def _prompt_and_completion(prompt: JsonValue, completion: JsonValue) -> list[JsonValue]:
    """Return the messages of a prompt and its completion, which may be texts. Only the second is learnt."""
    messages: list[JsonValue] = []
    for message in _as_messages(prompt, "user"):
        is_answer = _role([message]) == "assistant"
        messages.append({**message, "train": False} if is_answer else message)
    return messages + _as_messages(completion, "assistant")


def _as_messages(value: JsonValue, role: str) -> list[JsonValue]:
    messages = _messages_in(value)
    return [{"role": role, "content": value}] if messages is None else messages


def _messages_in(value: JsonValue) -> list[JsonValue] | None:
    """Return the messages of a list or of its JSON, or None if it is no list of messages, such as a text."""
    value = parsed_if_json(value)
    messages = list(map(parsed_if_json, value)) if isinstance(value, list) else []
    return messages if _role(messages) else None


def _alpaca(value_of: Mapping[str, JsonValue]) -> Recognized | UnusableText:
    messages: list[JsonValue] = []
    history = parsed_if_json(value_of["history"]) or []
    if not isinstance(history, list):
        return unusable(("history",), history, "a list of questions with their answers")
    for turn in history:
        if not isinstance(turn, list) or len(turn) != 2:
            return unusable(("history",), history, "one of questions with their answers")
        question, answer = turn
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    asked = [value_of["instruction"]]
    if value_of["input"]:
        asked.append(value_of["input"])
    messages.append({"role": "user", "content": "\n".join(map(str, asked))})
    messages.append({"role": "assistant", "content": value_of["output"]})
    return Recognized("alpaca", messages)


def _without_nulls(value: JsonValue) -> JsonValue:
    """Return a value without keys that have null, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def parsed_conversation(text: str) -> dict[str, JsonValue]:
    """Return a conversation's JSON as an object with ``messages``, and perhaps more."""
    given = json.loads(text)
    return given if isinstance(given, dict) else {"messages": given}
