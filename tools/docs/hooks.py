"""Hooks of mkdocs: what the site shows of Markdown written for the repository, public names only, and moved pages."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkdocs.utils import get_relative_url

# The handlers of functions are attributes that a module makes when they are asked for: no page shows them.
logging.getLogger("mkdocs.plugins.griffe").addFilter(lambda record: "Unsupported item" not in record.getMessage())

_COMMANDS = re.compile(r"^( *)```console\n((?:\1\$ (?:.*\\\n)*.*\n)+)\1```$", re.MULTILINE)
"""A block of commands without output, also in a list."""
_SHOWN = re.compile(r"^::: ([\w.]+\.(\w+))$", re.MULTILINE)
"""A public name that a page of the API reference describes."""
_UNRESOLVED = re.compile(r'<span title="[^"]*">((?:<code>)?(\w+)(?:</code>)?|[^<]*)</span>')
"""A type or a reference for which mkdocstrings has found no description."""
_NAME = re.compile(r"<(a|h\d)\b.*?</\1>|<code>(?:stoker[\w.]*\.)?([A-Z]\w+|\w+_\w+)</code>", re.DOTALL)
"""A link or a heading, which stay as they are, or a name in a text."""
_BASES = re.compile(r'<p class="doc doc-class-bases">\s*Bases: (.*?)</p>', re.DOTALL)


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return a page whose links all lead to pages of the site, and whose commands can be copied without a prompt."""
    steps = page.file.src_uri.count("/") + 1
    markdown = re.sub(rf"\[([^\]]*)\]\((?:\.\./){{{steps},}}[^)]*\)", r"\1", markdown)
    return _COMMANDS.sub(_without_prompts, markdown)


def _without_prompts(commands: re.Match[str]) -> str:
    indent, lines = commands.groups()
    return f"{indent}```bash\n" + re.sub("^( *)[$] ", r"\1", lines, flags=re.MULTILINE) + f"{indent}```"


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Return a page whose names lead to their descriptions: in the API reference all, elsewhere the first of each."""
    shown = [
        (name, path, source)
        for source in (Path(config.docs_dir) / "api").glob("*.md")
        for path, name in _SHOWN.findall(source.read_text("utf-8"))
    ]
    counts = Counter(name for name, _, _ in shown)
    places = {
        name: f"{get_relative_url(f'api/{source.stem}/', page.url)}#{path}"
        for name, path, source in shown
        if counts[name] == 1 or source == Path(page.file.abs_src_path)
    }
    is_reference = page.file.src_uri.startswith("api/")

    def link(text: str, name: str | None) -> str:
        place = places.get(name) if is_reference else places.pop(name, None)
        return f'<a class="autorefs autorefs-internal" href="{place}">{text}</a>' if place else text

    if is_reference:
        output = _BASES.sub(lambda found: _public_bases(found[0], places), output)
        output = _UNRESOLVED.sub(lambda found: link(found[1], found[2]), output)
    return _NAME.sub(lambda found: link(found[0], found[2]), output)


def on_post_build(config: Any) -> None:
    """Write a page at each address that a page had before, which leads to the new one."""
    for old, new in config.extra["moved"].items():
        page = Path(config.site_dir) / old / "index.html"
        page.parent.mkdir(exist_ok=True)
        page.write_text(
            f'<!doctype html><title>Moved</title><meta http-equiv="refresh" content="0; url=../{new}/">'
            f'<link rel="canonical" href="../{new}/"><a href="../{new}/">This page has moved.</a>\n',
            "utf-8",
        )


def _public_bases(paragraph: str, places: Mapping[str, str]) -> str:
    """Return the paragraph of a class's bases without the private ones."""
    bases = re.findall("<code>.*?</code>", paragraph)
    names = [re.sub("<.*?>", "", base).rpartition(".")[2] for base in bases]
    shown = [
        base if "._" not in base else f"<code>{name}</code>"
        for base, name in zip(bases, names, strict=True)
        if "._" not in base or name in places
    ]
    return f'<p class="doc doc-class-bases">Bases: {", ".join(shown)}</p>' if shown else ""
