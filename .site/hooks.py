"""Hooks of mkdocs: files outside of docs/, flags and members are pages, too; ``llms.txt`` lists the pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "README.md", "README.ko.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/results.md"
)  # fmt: skip
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
_CODE = re.compile(r"(<pre\b.*?</pre>)|(?<=<code>)([^<]*)(?=</code>)|(?<=[\s>])(--\w+)", re.DOTALL)
_MAX_WHOLE = 30  # characters of a word that a phone shows in one line
_first_lines: dict[str, tuple[str, str]] = {}  # page -> its title and its first paragraph


def on_files(files: Files, config: Any) -> Files:
    for path in OUTSIDE:
        files.append(File.generated(config, path, content=(ROOT / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, "site.css", content=(ROOT / ".site/site.css").read_text("utf-8")))
    sys.path.insert(0, str(ROOT))
    from tests import command_reference, loader_reference

    files.append(File.generated(config, "flags.md", content=command_reference.page()))
    files.append(File.generated(config, "members.md", content=loader_reference.page_of_members()))
    return files


def on_page_markdown(markdown: str, page: Any, **_context: Any) -> str:
    """Turn links between files of the repository into links between pages: the site has docs/ as its root."""
    path = page.file.src_uri
    of_repository = path if path in OUTSIDE else f"docs/{path}"

    def rewritten(link: re.Match[str]) -> str:
        target = normpath(PurePosixPath(of_repository).parent / link[1])
        return relpath(target.removeprefix("docs/"), PurePosixPath(path).parent)

    # In a table GitHub needs `a \| b`; this Markdown would show the backslash.
    markdown = re.sub(r"(`[^`\n]*)\\\|([^`\n]*`)", r"\1|\2", markdown)
    title, _, rest = markdown.partition("\n")
    prose = re.sub(r"^```.*?^```$", "", rest, flags=re.MULTILINE | re.DOTALL)
    paragraphs = [part.strip() for part in prose.split("\n\n")]
    # Not a picture, nor a link to the other language.
    paragraph = next((part for part in paragraphs if re.match(r"[\w`]", part)), "")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)  # its links hold on the page only
    if text.endswith(":"):  # it introduces a table or code
        text = "; ".join(re.findall(r"^## (.*)", markdown, re.MULTILINE))
    if path == "README.ko.md":
        title += " (한국어)"
    _first_lines[page.url] = title.lstrip("# "), " ".join(text.split())
    return _LINK.sub(rewritten, markdown)


def on_page_content(html: str, **_context: Any) -> str:
    """Keep each word of inline code, and each flag in a heading, on one line."""

    def whole(found: re.Match[str]) -> str:
        block, code, flag = found.groups()
        if block:
            return block
        words = re.split(r"(\s+)", code or flag)
        return "".join(_whole(word) for word in words)

    return _CODE.sub(whole, html)


def _whole(word: str) -> str:
    return f'<span class="whole">{word}</span>' if 1 < len(word) <= _MAX_WHOLE else word


def on_post_build(config: Any) -> None:
    """Write llms.txt (llmstxt.org): the pages, each with its first paragraph."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Pages", ""]
    first = sorted(_first_lines, key=lambda url: url != "index.html")  # the README
    for url in first:
        title, text = _first_lines[url]
        lines.append(f"- [{title}]({url}): {text}")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
