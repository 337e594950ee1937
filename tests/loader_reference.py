"""``python -m tests.loader_reference`` writes docs/loader.md from the loader's signatures and docstrings."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import loader
from tests.checkout import ROOT

PAGE = ROOT / "docs" / "loader.md"
HEAD = """\
# Loader reference

[training.md](training.md) shows its use. `python -m tests.loader_reference` generates this page.

## At a glance

Most training scripts need five arguments:

```python
from loader import get_llama3_dataloader  # or: from shardprep import get_llama3_dataloader

loader = get_llama3_dataloader(
    "DATA",  # input_shards: a folder, tars, or a dict of several sources
    batch_size=8,  # samples per batch on each rank
    global_batch_size=256,  # samples per optimizer step on all ranks; with the seed it determines the order
    seq_len=4096,  # tokens per row: documents are packed, or were by `plan --record packed`
    boundaries="transformers",  # attention stays inside each document of a row
)
```

The others have defaults. `input_shards`, `batch_size` and `model_id` may be passed by position.
Names that torch's DataLoader has mean the same here.

## Arguments of get_llama3_dataloader
"""

# What the loops on the pages of docs/ use.
OF_LOOPS = {
    "describe", "ends_step", "follow", "labels_per_rank", "load_state_dict", "num_steps_delivered",
    "set_epoch", "state_at", "state_dict",
}  # fmt: skip
LOADER = """\
## The loader

`help(type(loader))` prints all members, and `make docs` builds a page of them. Most loops use these:
"""
MEMBERS_HEAD = """\
# Members of the loader

Everything that a loader has, and the other names of the package `loader`. [Arguments](loader.md).

## The loader
"""


def page() -> str:
    """Return the contents of docs/loader.md."""
    lines = [HEAD]
    parameters = inspect.signature(loader.get_llama3_dataloader).parameters
    for group, arguments in arguments_by_group().items():
        lines.append(f"### {group}\n")
        for name, text in arguments.items():
            default = parameters[name].default
            shown = "" if default in (None, (), inspect.Parameter.empty) else f"={default!r}"
            lines.append(f"- `{name}{shown}`: {text.replace('``', '`')}")
        lines.append("")
    lines.append(LOADER)
    lines += [line for name, line in _lines_of_members().items() if name in OF_LOOPS]
    lines.append("")
    return "\n".join(lines)


def page_of_members() -> str:
    """Return the site's page of all members and names, which ``help(loader)`` prints, too."""
    lines = [MEMBERS_HEAD, *_lines_of_members().values()]
    counts = "`num_batches`, `num_tokens`, `num_padding`, `num_cut_tokens`, `wait_s`, `padding_share`"
    lines += [f"- `metrics`: counts of this rank: {counts}; `reset()`.\n", "## Other names of the package\n"]
    errors = []
    for name in loader.__all__:
        item = getattr(loader, name)
        if inspect.isclass(item) and issubclass(item, loader.ShardprepError):
            errors.append(f"`{name}`")
        elif name not in ("get_llama3_dataloader", "TokenLoader"):
            lines.append(f"- `{name}`: {_first_paragraph(item)}")
    codes = "[exit codes](commands.md#exit-codes)"
    return "\n".join([*lines, f"\nErrors, with the {codes} of commands: {', '.join(errors)}.\n"])


def _lines_of_members() -> dict[str, str]:
    """Return a line for each public member of a loader, by name."""
    lines = {}
    for name, member in sorted(vars(loader.TokenLoader).items()):
        is_property = isinstance(member, (property, functools.cached_property))
        if not name.startswith("_") and (is_property or inspect.isfunction(member)):
            taken = [] if is_property else [*inspect.signature(member).parameters][1:]
            called = "" if is_property else f"({', '.join(taken)})"
            lines[name] = f"- `{name}{called}`: {_first_paragraph(member)}"
    return lines


def arguments_by_group() -> dict[str, dict[str, str]]:
    """Return the arguments in the docstring of ``get_llama3_dataloader``, as group -> name -> text."""
    groups: dict[str, dict[str, str]] = {}
    docstring = inspect.getdoc(loader.get_llama3_dataloader) or ""
    text = docstring.partition("\nArgs:\n")[2].partition("\nReturns:\n")[0]
    for group in re.split(r"^ {4}(?=\S)", text, flags=re.MULTILINE)[1:]:
        title, _, arguments = group.partition(":\n")
        items = re.split(r"^ {8}(?=\S)", arguments, flags=re.MULTILINE)[1:]
        explained = (item.partition(": ") for item in items)
        groups[title] = {name: " ".join(words.split()) for name, _, words in explained}
    return groups


def _first_paragraph(item: Any) -> str:
    """Return the first paragraph of a docstring, without a leading "Return"."""
    text = (inspect.getdoc(item) or "").partition("\n\n")[0].removeprefix("Return ")
    return " ".join(text.replace("``", "`").split())


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
