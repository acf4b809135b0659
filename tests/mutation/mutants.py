"""Enumerate the mutants of a module: each is its syntax tree with one small change (`operators.py`).

Only behaviour is changed. Strings, annotations, imports, assertions, `raise` statements, decorators, base classes, log
calls and `__repr__` are left alone. A mutant is named by its module, function, operator and ordinal, so that its name
stays the same when other code changes.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mutation.operators import names_bound_by, of_expression, of_statement

Place = tuple[str, int | None]
"""A field of a node, and the position in it if the field is a list."""

_UNTOUCHED = (ast.Assert, ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.pattern)
_UNTOUCHED_FIELDS = frozenset({"annotation", "returns", "decorator_list"})
_UNTOUCHED_FUNCTIONS = frozenset({"__repr__", "__str__"})
_STRING = ast.Name("str", ast.Load())
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    module: str
    function: str
    """Qualified name; empty: it is outside any function."""
    operator: str
    ordinal: int
    """Among the mutants of this function by this operator, in the order of the source."""
    span: tuple[int, int] | None
    """First and last line of the statement that it is in. None: it runs when the module is imported."""
    line: int
    before: str
    after: str
    places: tuple[Place, ...]
    """The way from the root of the tree to the node that is replaced."""
    replacement: ast.AST

    @property
    def name(self) -> str:
        """Tells it from all others."""
        return f"{self.module}:{self.function}:{self.operator}:{self.ordinal}"

    def apply(self, source: str) -> ast.Module:
        """Return the tree of the module's source with this change."""
        tree = ast.parse(source)
        node: ast.AST = tree
        *way, (field, position) = self.places
        for step, index in way:
            value = getattr(node, step)
            node = value if index is None else value[index]
        if position is None:
            setattr(node, field, copy.deepcopy(self.replacement))
        else:
            getattr(node, field)[position] = copy.deepcopy(self.replacement)
        return ast.fix_missing_locations(tree)


def mutants(source: str, module: str) -> list[Mutant]:
    """All mutants of a module, in the order of its source."""
    tree = ast.parse(source)
    walker = _Walker(module, _alike(tree))
    walker.block(tree, "body", (), _Scope(), set())
    return walker.found


@dataclass(frozen=True)
class _Scope:
    function: str = ""
    is_running: bool = False
    """Its statements run when it is called, and not when the module is imported."""
    may_be_none: bool = False
    """The function may return None, by its annotation."""
    span: tuple[int, int] = (1, 1)


class _Walker:
    """Collects the mutants of one module."""

    def __init__(self, module: str, alike: frozenset[str]) -> None:
        self.found: list[Mutant] = []
        self._module, self._alike = module, alike
        self._counts: Counter[tuple[str, str]] = Counter()
        self._seen: set[tuple[tuple[Place, ...], str]] = set()

    def block(self, parent: ast.AST, field: str, places: tuple[Place, ...], scope: _Scope, bound: set[str]) -> None:
        """Visit a list of statements; add the names that it binds."""
        for index, statement in enumerate(getattr(parent, field)):
            self._statement(statement, (*places, (field, index)), scope, bound)

    def _statement(self, node: ast.stmt, places: tuple[Place, ...], scope: _Scope, bound: set[str]) -> None:
        if isinstance(node, _UNTOUCHED) or _is_docstring(node) or _is_log(node) or _is_for_types(node):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.name not in _UNTOUCHED_FUNCTIONS:
                self._definition(node, places, scope, bound)
            return
        here = replace(scope, span=_lines(node))
        if scope.is_running:
            for operator, replacement in of_statement(node, bound, may_be_none=scope.may_be_none):
                self._add(operator, node, replacement, places, here)
        for name, value in ast.iter_fields(node):
            if name not in _BLOCKS and name not in _UNTOUCHED_FIELDS:
                self._expressions(node, name, value, places, here)
        inside: set[str] = set()
        for parent, field, way in _blocks(node, places):
            names = set(bound)
            if isinstance(parent, ast.match_case) and parent.guard is not None:
                self._expressions(parent, "guard", parent.guard, way, replace(scope, span=_lines(parent.guard)))
            self.block(parent, field, way, scope, names)
            inside |= names
        bound |= names_bound_by(node) | inside

    def _definition(
        self, node: ast.FunctionDef | ast.ClassDef, places: tuple[Place, ...], scope: _Scope, bound: set[str]
    ) -> None:
        bound.add(node.name)
        function = f"{scope.function}.{node.name}" if scope.function else node.name
        inside = replace(scope, function=function, may_be_none=False, span=(node.lineno, node.lineno))
        names: set[str] = set()
        if isinstance(node, ast.FunctionDef):
            args = node.args
            for field in ("defaults", "kw_defaults"):
                self._expressions(args, field, getattr(args, field), (*places, ("args", None)), inside)
            names = {each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
            inside = replace(inside, is_running=True, may_be_none=_may_be_none(node.returns))
        self.block(node, "body", places, inside, names)

    def _expressions(
        self, parent: ast.AST, field: str, value: object, places: tuple[Place, ...], scope: _Scope
    ) -> None:
        """Visit what one field of a node holds."""
        items = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, node in items:
            if isinstance(node, ast.AST) and not isinstance(node, _UNTOUCHED):
                way = (*places, (field, index))
                for operator, replacement in of_expression(
                    parent, field, node, is_running=scope.is_running, alike=self._alike
                ):
                    self._add(operator, node, replacement, way, scope)
                for name, inner in ast.iter_fields(node):
                    self._expressions(node, name, inner, way, scope)

    def _add(
        self, operator: str, node: ast.AST, replacement: ast.AST, places: tuple[Place, ...], scope: _Scope
    ) -> None:
        key = (places, ast.dump(replacement))
        if key in self._seen or ast.dump(node) == ast.dump(replacement):
            return
        self._seen.add(key)
        ordinal = self._counts[scope.function, operator]
        self._counts[scope.function, operator] += 1
        line = getattr(node, "lineno", scope.span[0])
        span = scope.span if scope.is_running else None
        before, after = _texts(node, replacement)
        self.found.append(
            Mutant(self._module, scope.function, operator, ordinal, span, line, before, after, places, replacement)
        )


def _alike(tree: ast.Module) -> frozenset[str]:
    """Functions whose first parameter and result have the same type, and are no sentences for people."""
    found = set()
    for each in tree.body:
        if isinstance(each, ast.FunctionDef) and each.args.args and each.returns is not None:
            first = each.args.args[0].annotation
            if first is not None and ast.dump(first) == ast.dump(each.returns) != ast.dump(_STRING):
                found.add(each.name)
    return frozenset(found)


def _lines(node: ast.stmt | ast.expr) -> tuple[int, int]:
    """First and last line of what a statement runs itself, without the statements inside it."""
    is_expression = isinstance(node, ast.expr)  # some have a body too
    inside = [] if is_expression else [getattr(node, name)[0] for name in _BLOCKS if getattr(node, name, None)]
    firsts = [getattr(getattr(each, "pattern", each), "lineno", 0) for each in inside]
    last = min(firsts) - 1 if firsts else node.end_lineno or 0
    return node.lineno, max(node.lineno, last)


def _blocks(node: ast.stmt, places: tuple[Place, ...]) -> Iterator[tuple[ast.AST, str, tuple[Place, ...]]]:
    """The lists of statements inside a compound statement."""
    for name in _BLOCKS:
        inside = getattr(node, name, [])
        if name in {"handlers", "cases"}:
            yield from ((each, "body", (*places, (name, index))) for index, each in enumerate(inside))
        elif inside:
            yield node, name, places


def _may_be_none(annotation: ast.expr | None) -> bool:
    inside = ast.walk(annotation) if annotation is not None else ()
    return any(isinstance(each, ast.Constant) and each.value is None for each in inside)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_log(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log")))):
            return True
    return False


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _texts(before: ast.AST, after: ast.AST) -> tuple[str, str]:
    """One line each, made from the tree."""
    match before, after:
        case ast.Match(cases=cases), ast.Match(cases=kept):
            return " / ".join(f"case {ast.unparse(each.pattern)}" for each in cases if each not in kept), "no such case"
        case ast.comprehension(ifs=ifs), ast.comprehension(ifs=kept):
            return " ".join(f"if {ast.unparse(each)}" for each in ifs if each not in kept), " ".join(
                f"if {ast.unparse(each)}" for each in kept if each not in ifs
            ) or "no such filter"
        case (ast.If(test=test), ast.If(test=other)) | (ast.While(test=test), ast.While(test=other)):
            return f"if {ast.unparse(test)}", f"if {ast.unparse(other)}"
    return _line(before), _line(after)


def _line(node: ast.AST) -> str:
    return " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split())
