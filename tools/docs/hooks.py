"""Hooks of mkdocs: links out of the pages' folder, which lead to files of the source, become plain text."""

from __future__ import annotations

import logging
import re
from typing import Any

# The handlers of functions are attributes that a module makes when they are asked for: no page shows them.
logging.getLogger("mkdocs.plugins.griffe").addFilter(lambda record: "Unsupported item" not in record.getMessage())


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return a page whose links all lead to pages of the site."""
    steps = page.file.src_uri.count("/") + 1
    return re.sub(rf"\[([^\]]*)\]\((?:\.\./){{{steps},}}[^)]*\)", r"\1", markdown)
