"""What a mutant changes: one statement or expression of a syntax tree, by another that is nearly the same.

| operator | what it does |
|---|---|
| `condition` | an `if`, a filter or the guard of a `case` always or never holds; a `while` is never entered |
| `branch` | a conditional expression always gives one of its two values |
| `decide` | any other boolean expression is always true, or always false |
| `operand` | one operand of `and`, `or` or of arithmetic is dropped; so is one argument of `min` or `max` |
| `not` | a negation is dropped |
| `compare` | a comparison is exchanged for its neighbour: `<` for `<=`, `==` for `!=`, `is` for `is not`, ... |
| `link` | one operand of a chain of comparisons is dropped |
| `element` | one element of a list, a set or a tuple is dropped |
| `keyword` | one keyword of a `replace(...)`, or the `key` or `reverse` of a sort, is dropped |
| `unchanged` | `replace(x, ...)` gives `x`, and so does a function of this module that makes an `x` of an `x` |
| `swap` | `min` for `max`, `any` for `all`, `+` for `-`, `*` for `/`, union for intersection |
| `number`, `flag` | a number is another one; `True` is `False` |
| `none` | a function that may return `None` returns `None` here |
| `delete` | a call for its effect, or an assignment to a name that had a value before, is dropped |
| `case` | one case of a `match` is dropped |
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

Change = tuple[str, ast.AST]
"""The operator, and what takes the place of the node."""

_NEIGHBOURS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPPOSITES: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_OTHER_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SORTS = frozenset({"min", "max", "sorted", "sort"})
_QUESTIONS = ("is_", "has_", "can_", "must_", "may_", "should_", "_is_", "_has_", "_can_", "_must_", "_may_")


def of_statement(node: ast.stmt, bound: Collection[str], *, may_be_none: bool) -> Iterator[Change]:
    """What may take the place of a statement of a function.

    Args:
        node: the statement.
        bound: names that have a value when it begins.
        may_be_none: whether the function may return None.
    """
    match node:
        case ast.If():
            yield from (("condition", _with(node, test=ast.Constant(value))) for value in (False, True))
        case ast.While():
            yield "condition", _with(node, test=ast.Constant(value=False))
        case ast.Match(cases=cases) if len(cases) > 1:
            yield from (("case", _with(node, cases=_without(cases, index))) for index in range(len(cases)))
        case ast.Return(value=ast.expr()) if may_be_none:
            yield "none", ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "delete", ast.Pass()
        case ast.Assign():
            if names_bound_by(*node.targets) <= set(bound):
                yield "delete", ast.Pass()
            yield from _of_pairs(node, bound)


def of_expression(
    parent: ast.AST, field: str, node: ast.AST, *, is_running: bool, alike: Collection[str]
) -> Iterator[Change]:
    """What may take the place of an expression, or of a filter.

    Args:
        parent: the node that it is part of.
        field: the parent's field that holds it.
        node: the expression.
        is_running: whether it runs when a function is called, and not when the module is imported.
        alike: functions that return the type of their first argument.
    """
    if field == "guard":
        yield from (("condition", ast.Constant(value)) for value in (True, False))
    if isinstance(node, ast.List | ast.Set | ast.Tuple) and _is_droppable(parent, field, node):
        yield from (("element", _with(node, elts=_without(node.elts, index))) for index in range(len(node.elts)))
    if type(node) in _RULES and (is_running or not _is_union(node)):
        yield from _RULES[type(node)](node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in alike and node.args:
        yield "unchanged", node.args[0]
    is_part = isinstance(parent, ast.BoolOp | ast.UnaryOp | ast.Attribute)
    is_condition = is_part or field in {"test", "ifs", "guard", "func"}
    if isinstance(node, ast.expr) and not is_condition and _is_boolean(node):
        yield from (("decide", ast.Constant(value)) for value in (True, False))


def names_bound_by(*nodes: ast.AST) -> set[str]:
    """Names to which something inside gives a value."""
    inside = (each for node in nodes for each in ast.walk(node))
    return {each.id for each in inside if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _of_pairs(node: ast.Assign, bound: Collection[str]) -> Iterator[Change]:
    """`a, b = 1, 2` without one of the two, if that one had a value before."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(names) == len(values):
            for index, name in enumerate(names):
                if names_bound_by(name) <= set(bound):
                    left, right = _without(names, index), _without(values, index)
                    is_one = len(left) == 1
                    target = left[0] if is_one else ast.Tuple(left, ast.Store())
                    yield "delete", _with(node, targets=[target], value=right[0] if is_one else ast.Tuple(right))


def _of_filter(node: ast.comprehension) -> Iterator[Change]:
    for index in range(len(node.ifs)):
        yield "condition", _with(node, ifs=_without(node.ifs, index))
        yield "condition", _with(node, ifs=[ast.Constant(value=False)])


def _of_conditional(node: ast.IfExp) -> Iterator[Change]:
    yield from (("branch", each) for each in (node.body, node.orelse))


def _of_and_or(node: ast.BoolOp) -> Iterator[Change]:
    for index in range(len(node.values)):
        rest = _without(node.values, index)
        yield "operand", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)


def _of_unary(node: ast.UnaryOp) -> Iterator[Change]:
    if isinstance(node.op, ast.Not):
        yield "not", node.operand


def _of_compare(node: ast.Compare) -> Iterator[Change]:
    for index, op in enumerate(node.ops):
        ops = [_NEIGHBOURS[type(op)]() if each == index else kept for each, kept in enumerate(node.ops)]
        yield "compare", _with(node, ops=ops)
    if len(node.ops) > 1:
        yield "link", ast.Compare(node.comparators[0], node.ops[1:], node.comparators[1:])
        for index in range(len(node.ops)):
            yield "link", ast.Compare(node.left, _without(node.ops, index), _without(node.comparators, index))


def _of_call(node: ast.Call) -> Iterator[Change]:
    called = _called(node)
    if called in _OTHER_CALLS and isinstance(node.func, ast.Name):
        yield "swap", _with(node, func=ast.Name(_OTHER_CALLS[called], ast.Load()))
        if called in {"min", "max"} and len(node.args) == 2:
            yield from (("operand", each) for each in node.args)
    for index, keyword in enumerate(node.keywords):
        is_change = called.endswith("replace") and len(node.keywords) > 1
        if is_change or (called in _SORTS and keyword.arg in {"key", "reverse"}):
            yield "keyword", _with(node, keywords=_without(node.keywords, index))
    if called.endswith("replace") and node.keywords and len(node.args) == 1:
        yield "unchanged", node.args[0]


def _of_constant(node: ast.Constant) -> Iterator[Change]:
    value = node.value
    if isinstance(value, bool):
        yield "flag", ast.Constant(not value)
    elif isinstance(value, int):
        yield "number", ast.Constant(value + 1)
    elif isinstance(value, float):
        yield from (("number", ast.Constant(each)) for each in ((value * 2, value / 2) if value else (1.0,)))


def _of_arithmetic(node: ast.BinOp) -> Iterator[Change]:
    sides = (node.left, node.right)
    if any(isinstance(each, ast.JoinedStr) or _is_string(each) for each in sides):
        return
    opposite = _OPPOSITES.get(type(node.op))
    if opposite is not None and not any(isinstance(each, ast.Tuple | ast.List) for each in sides):
        yield "swap", _with(node, op=opposite())
    if isinstance(node.op, ast.Add | ast.Sub | ast.BitOr | ast.BitAnd):
        yield "operand", node.left
        if not isinstance(node.op, ast.Sub):
            yield "operand", node.right


_RULES: dict[type[ast.AST], Callable[[Any], Iterator[Change]]] = {
    ast.comprehension: _of_filter,
    ast.IfExp: _of_conditional,
    ast.BoolOp: _of_and_or,
    ast.UnaryOp: _of_unary,
    ast.Compare: _of_compare,
    ast.Call: _of_call,
    ast.Constant: _of_constant,
    ast.BinOp: _of_arithmetic,
}


def _is_droppable(parent: ast.AST, field: str, node: ast.List | ast.Set | ast.Tuple) -> bool:
    """Whether a shorter one is not plainly another type: what is unpacked, and what a type names, keeps its length."""
    if not node.elts or not isinstance(getattr(node, "ctx", ast.Load()), ast.Load) or field == "slice":
        return False
    is_plain_value = isinstance(parent, ast.Assign | ast.Return | ast.IfExp | ast.List | ast.Tuple | ast.Dict)
    return not (isinstance(node, ast.Tuple) and is_plain_value) or any(isinstance(e, ast.Starred) for e in node.elts)


def _is_boolean(node: ast.expr) -> bool:
    match node:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.BoolOp(op=ast.And(), values=values):
            return any(_is_boolean(each) for each in values)
        case ast.BoolOp(values=values):
            return all(_is_boolean(each) for each in values)
        case ast.Call():
            return _called(node) in {"any", "all", "bool"} or _called(node).startswith(_QUESTIONS)
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
            return name.startswith(_QUESTIONS)
    return False


def _is_union(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """Return a shallow copy with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _without(items: Iterable[Any], index: int) -> list[Any]:
    return [each for position, each in enumerate(items) if position != index]
