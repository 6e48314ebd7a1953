"""An extension of griffe: what the API reference shows of docstrings written for Sphinx and doctest, and of types."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|data|attr|mod|exc|obj):`(~?)([\w.]+)`")
_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
_ATTRIBUTES = re.compile(r"^( *)Attributes:$", re.MULTILINE)
_LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)


def _reference(match: re.Match[str]) -> str:
    short, name = match.groups()
    shown = name.rpartition(".")[2] if short else name
    return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'


class Reference(griffe.Extension):
    """Rewrites docstrings as Markdown, settings as parameters with defaults, and types with bounds as plain types."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that was loaded."""
        if obj.docstring is not None and obj.docstring.value.startswith("Deprecated name of "):
            obj.docstring = None  # hidden: the page of the API reference lists these names
        elif obj.docstring is not None:
            text = _EXAMPLE.sub(r"\1Examples:", _ROLE.sub(_reference, obj.docstring.value))
            obj.docstring.value = _LITERAL_BLOCK.sub(":", text)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Shorten the defaults that are config objects, which imported functions show with all their fields."""
        for parameter in func.parameters:
            parameter.default = parameter.default and re.sub(r"^(\w+Config)\(.+\)$", r"\1()", str(parameter.default))

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Rewrite the classes of a package, all modules of which were loaded."""
        for each in pkg.members.values():
            if isinstance(each, griffe.Module):
                self.on_package(pkg=each, loader=loader)
            elif isinstance(each, griffe.Class):
                _rewrite_settings(each)
                for attribute in each.attributes.values():
                    _show_default(attribute.value)
                    if attribute.annotation is not None:
                        attribute.annotation = _plain_type(attribute.annotation, loader.modules_collection)


def _rewrite_settings(found: griffe.Class) -> None:
    """Describe the fields of a dataclass with defaults as parameters, with which the site shows the defaults."""
    is_dataclass = any(each.callable_path.endswith("dataclass") for each in found.decorators)
    if is_dataclass and found.docstring and any(each.value for each in found.attributes.values() if each.annotation):
        found.docstring.value = _ATTRIBUTES.sub(r"\1Args:", found.docstring.value)


def _show_default(value: griffe.Expr | str | None) -> None:
    """Rewrite ``field(default_factory=lambda: X)`` as ``field(default=X)``, of which the site shows X."""
    for argument in value.arguments if isinstance(value, griffe.ExprCall) else ():
        if isinstance(argument, griffe.ExprKeyword) and isinstance(argument.value, griffe.ExprLambda):
            argument.name, argument.value = "default", argument.value.body


def _plain_type(annotation: griffe.Expr | str, modules: griffe.ModulesCollection) -> griffe.Expr | str:
    """Return a type without bounds: ``Positive[float]``, which is ``Annotated``, as ``float``."""
    if isinstance(annotation, griffe.ExprBinOp):
        annotation.left = _plain_type(annotation.left, modules)
        annotation.right = _plain_type(annotation.right, modules)
    elif isinstance(annotation, griffe.ExprSubscript) and _bounded_type(annotation.left, modules):
        return _plain_type(annotation.slice, modules)
    elif bounded := _bounded_type(annotation, modules):
        return bounded
    return annotation


def _bounded_type(annotation: object, modules: griffe.ModulesCollection) -> griffe.Expr | str | None:
    """Return the type that an alias annotates, if the annotation is the name of one."""
    if not isinstance(annotation, griffe.ExprName):
        return None
    try:
        value = modules[annotation.canonical_path].value
    except (KeyError, AttributeError):
        return None
    if not isinstance(value, griffe.ExprSubscript) or not isinstance(value.slice, griffe.ExprTuple):
        return None
    return value.slice.elements[0] if str(value.left) == "Annotated" else None
