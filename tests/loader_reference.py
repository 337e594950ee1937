"""``python -m tests.loader_reference`` writes docs/loader.md of what the loader's code declares.

The signature and docstring of ``get_llama3_dataloader`` are the declaration; of the other names it is theirs.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

import loader
from tests.checkout import ROOT

PAGE = ROOT / "docs" / "loader.md"
HEAD = """\
# Loader reference

Each argument of `get_llama3_dataloader` and each member of the loader that it returns;
[training.md](training.md) says how to use them. `python -m tests.loader_reference` writes this page.

```python
from loader import get_llama3_dataloader  # or: from shardprep import get_llama3_dataloader
```

Pass `input_shards`, `batch_size` and `model_id` by position, all others by name. `seq_len` is the width of
packed rows, `max_length` a limit for documents that are not packed.

## Arguments of get_llama3_dataloader
"""


def page() -> str:
    """What docs/loader.md must say."""
    return "\n".join([HEAD, *_arguments(), *_members(), *_names()]) + "\n"


def arguments_by_group() -> dict[str, dict[str, str]]:
    """The arguments that the docstring explains: group -> name -> text."""
    groups: dict[str, dict[str, str]] = {}
    docstring = inspect.getdoc(loader.get_llama3_dataloader) or ""
    text = docstring.partition("\nArgs:\n")[2].partition("\nReturns:\n")[0]
    for group in re.split(r"^ {4}(?=\S)", text, flags=re.MULTILINE)[1:]:
        title, _, arguments = group.partition(":\n")
        items = re.split(r"^ {8}(?=\S)", arguments, flags=re.MULTILINE)[1:]
        explained = (item.partition(": ") for item in items)
        groups[title] = {name: " ".join(words.split()) for name, _, words in explained}
    return groups


def _arguments() -> Iterator[str]:
    parameters = inspect.signature(loader.get_llama3_dataloader).parameters
    for group, arguments in arguments_by_group().items():
        yield f"### {group}\n"
        for name, text in arguments.items():
            default = parameters[name].default
            shown = "" if default in (None, (), inspect.Parameter.empty) else f"={default!r}"
            yield f"- `{name}{shown}`: {_one_line(text)}"
        yield ""


def _members() -> Iterator[str]:
    yield "## The loader\n"
    for name, member in sorted(vars(loader.TokenLoader).items()):
        is_property = isinstance(member, (property, functools.cached_property))
        if name.startswith("_") or not (is_property or inspect.isfunction(member)):
            continue
        called = ""
        if inspect.isfunction(member):
            _, *parameters = inspect.signature(member).parameters
            called = f"({', '.join(parameters)})"
        yield f"- `{name}{called}`: {_one_line(_first_paragraph(member))}"
    counts = "`num_batches`, `num_tokens`, `num_padding`, `num_cut_tokens`, `wait_s`, `padding_share`"
    yield f"- `metrics`: counts of this rank: {counts}; `reset()`."
    yield ""


def _names() -> Iterator[str]:
    yield "## Other names of the package\n"
    errors = []
    for name in loader.__all__:
        item = getattr(loader, name)
        if inspect.isclass(item) and issubclass(item, loader.ShardprepError):
            errors.append(f"`{name}`")
        elif name not in ("get_llama3_dataloader", "TokenLoader"):
            yield f"- `{name}`: {_one_line(_first_paragraph(item))}"
    yield f"\nErrors, with the [exit codes](commands.md#exit-codes) of commands: {', '.join(errors)}."


def _first_paragraph(item: Any) -> str:
    """What a member or a name is; of what it does the verb stays."""
    return (inspect.getdoc(item) or "").partition("\n\n")[0].removeprefix("Return ")


def _one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
