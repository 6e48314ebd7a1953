"""Imports, attribute chains, strings and comments of one Python module."""

from __future__ import annotations

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, QualifiedNameProvider, QualifiedNameSource
from tools.codemod.table import Table
from tools.codemod.text import TextRewriter

__all__ = ["rewrite_python"]

_NAMING_A_LOGGER = {"getLogger", "logging.getLogger"}  # a name that people set levels by, wherever the file lies


def rewrite_python(source: str, module: str, text: TextRewriter, files: dict[str, str]) -> str:
    """Return a module's source with moved modules and renamed names in their new place.

    Args:
        source: text of the module.
        module: dotted name that it has after the move.
        text: rewriter of strings and comments.
        files: base names of the files beside the module before the move → after it.
    """
    tree = cst.parse_module(source).visit(_Moves(text, files))
    leaves = {name.rpartition(".")[2] for name in text.table.names}
    if any(leaf in source for leaf in leaves):
        tree = MetadataWrapper(tree).visit(_Names(text.table, module))
    return tree.code


def _dotted(name: str) -> cst.Attribute | cst.Name:
    parent, _, leaf = name.rpartition(".")
    return cst.Attribute(_dotted(parent), cst.Name(leaf)) if parent else cst.Name(leaf)


class _Moves(cst.CSTTransformer):
    def __init__(self, text: TextRewriter, files: dict[str, str]) -> None:
        super().__init__()
        self._text = text
        self._table = text.table
        self._files = files
        self._bound: set[str] = set()  # packages that a plain `import a.b` binds

    def visit_Import(self, node: cst.Import) -> None:
        for alias in node.names:
            if alias.asname is None:
                self._bound.add(alias.evaluated_name.partition(".")[0])

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        names = [alias.with_changes(name=_dotted(self._new(alias.evaluated_name))) for alias in original_node.names]
        return updated_node.with_changes(names=names)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        statement = original_node.body[0]
        if len(original_node.body) > 1 or not isinstance(statement, cst.ImportFrom):
            return updated_node
        split = self._split(statement)
        if split is None:
            return updated_node
        first, *others = split
        lines = [updated_node.with_changes(body=[first])]
        return cst.FlattenSentinel([*lines, *(cst.SimpleStatementLine([other]) for other in others)])

    def _split(self, node: cst.ImportFrom) -> list[cst.ImportFrom] | None:
        """Return an import by the modules that its names have gone to, or None if all are where they were."""
        if node.relative:
            raise ValueError("a relative import cannot be followed: write it absolute")
        module = get_full_name_for_node(node.module) if node.module else None
        if module is None or self._table.root_of(module) is None:
            return None
        if isinstance(node.names, cst.ImportStar):
            return [node.with_changes(module=_dotted(self._new(module)))]
        parts: dict[str, list[cst.ImportAlias]] = {}
        for alias in node.names:
            target, new = self._target(module, alias)
            parts.setdefault(target, []).append(new)
        if list(parts) == [module] and list(parts[module]) == list(node.names):
            return None
        if len(parts) == 1 and len(next(iter(parts.values()))) == len(node.names):
            target, names = next(iter(parts.items()))
            return [node.with_changes(module=_dotted(target), names=names)]
        plain = {"lpar": None, "rpar": None}
        return [
            node.with_changes(
                module=_dotted(target),
                names=[name.with_changes(comma=cst.MaybeSentinel.DEFAULT) for name in names],
                **(plain if len(names) == 1 else {}),
            )
            for target, names in parts.items()
        ]

    def _target(self, module: str, alias: cst.ImportAlias) -> tuple[str, cst.ImportAlias]:
        name = alias.evaluated_name
        below = self._table.modules.get(f"{module}.{name}")
        if below is None:
            return self._new(module), alias
        parent, _, leaf = below.rpartition(".")
        if leaf == name:
            return parent, alias
        asname = alias.asname or cst.AsName(name=cst.Name(name))
        return parent, alias.with_changes(name=cst.Name(leaf), asname=asname)

    def _new(self, module: str) -> str:
        return self._table.modules.get(module, module)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Call(self, node: cst.Call) -> bool:
        return get_full_name_for_node(node) not in _NAMING_A_LOGGER

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        name = get_full_name_for_node(node)
        return not (name and name.partition(".")[0] in self._bound and self._table.moved(name))

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        name = get_full_name_for_node(original_node)
        if not name or name.partition(".")[0] not in self._bound:
            return updated_node
        old = self._table.modules.get(name)
        if old is not None:
            return _dotted(old)
        return updated_node.with_changes(value=original_node.value.visit(self))

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        value = original_node.value
        bare = value.strip("\"'")
        if bare in self._files:
            return updated_node.with_changes(value=value.replace(bare, self._files[bare]))
        return updated_node.with_changes(value=self._text.rewrite(value))

    def leave_FormattedStringText(
        self, original_node: cst.FormattedStringText, updated_node: cst.FormattedStringText
    ) -> cst.FormattedStringText:
        return updated_node.with_changes(value=self._text.rewrite(original_node.value))

    def leave_Comment(self, original_node: cst.Comment, updated_node: cst.Comment) -> cst.Comment:
        return updated_node.with_changes(value=self._text.rewrite(original_node.value))


class _Names(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self, table: Table, module: str) -> None:
        super().__init__()
        self._table = table
        self._module = module
        self._leaves = {name.rpartition(".")[2] for name in table.names}

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        module = get_full_name_for_node(original_node.module) if original_node.module else None
        if module is None or isinstance(original_node.names, cst.ImportStar):
            return updated_node
        names = []
        for alias in original_node.names:
            new = self._table.names.get(f"{module}.{alias.evaluated_name}")
            names.append(alias if new is None else alias.with_changes(name=cst.Name(new)))
        return updated_node.with_changes(names=names)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        if original_node.attr.value not in self._leaves:
            return updated_node
        for found in self.get_metadata(QualifiedNameProvider, original_node, set()):
            new = self._table.names.get(found.name)
            if new is not None and found.source is QualifiedNameSource.IMPORT:
                return updated_node.with_changes(attr=cst.Name(new))
        return updated_node

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        if original_node.value not in self._leaves:
            return updated_node
        for found in self.get_metadata(QualifiedNameProvider, original_node, set()):
            local = found.source is QualifiedNameSource.LOCAL
            new = self._table.names.get(f"{self._module}.{found.name}" if local else found.name)
            if new is not None and found.name.rpartition(".")[2] == original_node.value:
                return updated_node.with_changes(value=new)
        return updated_node

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        """Rename in ``__all__`` and wherever else a string is nothing but the name, in the module that defines it."""
        bare = original_node.value.strip("\"'")
        new = self._table.names.get(f"{self._module}.{bare}")
        return updated_node if new is None else updated_node.with_changes(value=original_node.value.replace(bare, new))
