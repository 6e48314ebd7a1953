"""An extension of griffe: cross-references of docstrings, which Sphinx's roles write, become those of the site."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|data|attr|mod|exc|obj):`(~?)([\w.]+)`")


def _reference(match: re.Match[str]) -> str:
    short, name = match.groups()
    shown = name.rpartition(".")[2] if short else name
    return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'


class Roles(griffe.Extension):
    """Rewrites the docstring of every object; a reference to what the site does not show is plain code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that was loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(_reference, obj.docstring.value)
