"""Writes a plotly figure as one HTML file that needs no network."""

from __future__ import annotations

import html
from importlib import resources
from typing import Any

__all__ = ["page"]

_BUNDLE = "plotly-basic.min.js"
"""plotly.js with scatter, bar and pie traces only: a quarter of what the Python package would write into each page."""


def page(figure: Any, title: str) -> str:
    """Return an HTML page of a plotly figure of bars and lines, with all the script that it needs.

    Args:
        figure: a ``plotly.graph_objects.Figure``.
        title: of the page, as plain text.
    """
    script = resources.files("stoker._trace").joinpath(_BUNDLE).read_text("utf-8")
    body = figure.to_html(include_plotlyjs=False, full_html=False, default_width="100%")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<script>{script}</script></head>\n<body>\n{body}\n</body>\n</html>\n"
    )
