"""The site's page of all flags, from the help of the commands.

python -m tests.command_reference  # prints it
"""

from __future__ import annotations

import importlib
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator

from shardprep.__main__ import COMMANDS

HEAD = """\
# All flags

The help of each command. A flag that several commands share is explained once; a flag without a default is
off or unset. [Commands](commands.md) has exit codes and common flags.
"""
EXPLAINED_IN = {  # command -> the section that shows how to use it
    "doctor": "seeing.md#before-doctor",
    "plan": "inputs.md",
    "run": "getting-started.md#3-plan-run-verify",
    "shard": "reference.md#the-form-of-the-first-script",
    "verify": "seeing.md#proof-from-the-input-verify---deep",
    "peek": "seeing.md#afterwards-peek",
    "export": "seeing.md#in-the-layouts-of-other-tools-export",
    "blank": "training_data.md#blanking-documents",
    "overlap": "overlap.md",
    "duplicates": "overlap.md#duplicates",
    "train_tokenizer": "inputs.md#a-tokenizer-of-your-own",
    "submit": "cluster.md#3-submit-watch-repair",
    "status": "cluster.md#3-submit-watch-repair",
    "report": "seeing.md#afterwards-report",
    "stage": "cluster.md#staging-shards-on-the-nodes-own-disks",
    "forecast": "seeing.md#what-a-run-will-read-forecast",
    "where": "seeing.md#what-a-step-of-training-saw-where",
    "lustre show": "lustre.md",
    "completion": "reference.md#names-and-completion",
}


def page() -> str:
    """Return the page in Markdown. Its links are relative to docs/."""
    explained: dict[str, str] = {}  # a flag with its help -> the first command that has it
    sections = [section_of(title, text, explained) for title, text in helps()]
    return HEAD + "".join(sections)


def helps() -> Iterator[tuple[str, str]]:
    """Yield the name and the help of each command."""
    for command, package in COMMANDS.items():
        program = importlib.import_module(f"{package}.__main__").PROGRAM
        if package == command:
            for word in program.commands:
                yield f"{command} {word}", program.parser_of(word, name=f"shardprep {command}").format_help()
        else:
            yield command, program.parser_of(command, name="shardprep").format_help()


def section_of(title: str, text: str, explained: dict[str, str]) -> str:
    """Return the section of a command: its help without defaults of off or none, and without repeated flags.

    ``explained`` has the flags of earlier sections and is updated.
    """
    text = re.sub(r"\s+\(default:\s+(off|none)\)", "", text)
    text = re.sub(
        r"^  --(\w+), --no-\1\s+", lambda m: f"  --[no-]{m[1]}".ljust(26) + "  ", text, flags=re.MULTILINE
    )
    usage, description, *groups = re.split(r"\n\n", text.rstrip("\n"))
    words = " ".join(usage.split()).removeprefix("usage: shardprep ").removesuffix(" [flags]")
    what = " ".join(description.split())
    if title in EXPLAINED_IN:  # keep the first sentence; the linked page has the rest
        what = re.split(r"(?<=\.) (?=[A-Z])", what)[0]
        what += f" See [{EXPLAINED_IN[title].partition('#')[0]}]({EXPLAINED_IN[title]})."
    section = f"\n## {words}\n\n{textwrap.fill(what, 120, break_on_hyphens=False, break_long_words=False)}"
    kept: list[str] = []
    repeated: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        head, *entries = re.split(r"\n(?=  (?! ))", group)
        shown = []
        for entry in entries:
            words = " ".join(entry.split())
            if words not in explained and not words.startswith("-h, --help"):
                explained[words] = title
                shown.append(entry)
            elif words in explained and words.startswith("-"):
                repeated[explained[words]].append(name_of(words))
        # argparse's default headings say nothing about the flags below them.
        if shown and head not in ("options:", "positional arguments:"):
            kept.append(f"**{head.rstrip(':')}**")
        elif not entries:
            kept.append(_plain(head))
        if shown:
            kept.append("\n".join(map(_item, shown)))
    section += "".join(f"\n\n{part}" for part in kept) + "\n"
    for other, flags in repeated.items():
        own = [name_of(words) for words, of in explained.items() if of == other and words.startswith("-")]
        missing = [name for name in own if name not in flags]
        listed = ", ".join(flags)
        if len(missing) < len(flags):
            listed = f"all flags except {', '.join(missing)}" if missing else "all flags"
        section += f"\nThe same as for `{other}`: {listed}.\n"
    return section


def _item(entry: str) -> str:
    """Return an entry of a help as an item of a list, which a phone shows without scrolling sideways."""
    name, *rest = re.split(r" {2,}|\n\s*", entry.strip(), maxsplit=1)
    explained = " ".join(" ".join(rest).split())
    return f"- `{name}`: {_plain(explained)}" if explained else f"- `{name}`"


def _plain(text: str) -> str:
    """Return a text for Markdown, in which none of its characters has a meaning."""
    return re.sub(r"([\\`*_\[\]])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))


def name_of(words: str) -> str:
    """Return the long name of a flag from its entry in a help."""
    return f"`{re.findall(r'--[a-z_]+', words.replace('[no-]', ''))[0]}`"


if __name__ == "__main__":
    print(page())
