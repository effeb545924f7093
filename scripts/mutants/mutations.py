"""Small changes of Python source: one operator, sign, index, constant, argument or name at a time, never text.

Left alone: docstrings and other strings, annotations, decorators, ``raise``, ``assert`` and warnings (their words and
numbers are messages), ``__all__`` and blocks for type checkers. Expressions inside f-strings are changed: a
person reads them. A change that cannot matter is not made where that is cheap to see: ``x + 0``, equal sides of a
swap, ``exist_ok``.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
COMPARISONS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
NAMES = {"min": "max", "any": "all", "amin": "amax", "argmin": "argmax", "floor": "ceil", "lower": "upper"}
NAMES |= {new: old for old, new in NAMES.items()}
GUARDS = {"strict", "exist_ok", "parents", "stacklevel", "missing_ok", "ignore_errors", "flush", "indent", "maxsize"}
MESSAGES = {"warn", "announce", "warning", "TypeVar", "NewType", "Literal", "cast"}
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change: bytes ``start`` to ``end`` of the file become ``new``; ``lines`` are those of its statement."""

    path: str
    kind: str
    line: int
    lines: tuple[int, int]
    start: int
    end: int
    new: str
    in_function: bool

    def apply(self, source: str) -> str:
        """The mutated source."""
        raw = source.encode()
        return (raw[: self.start] + self.new.encode() + raw[self.end :]).decode()

    def shown(self, source: str) -> tuple[str, str]:
        """The changed lines before and after, each as one line."""
        raw = source.encode()
        first, last = raw.rfind(b"\n", 0, self.start) + 1, raw.find(b"\n", self.end)
        last = len(raw) if last < 0 else last
        after = raw[first : self.start] + self.new.encode() + raw[self.end : last]
        return " ".join(raw[first:last].decode().split()), " ".join(after.decode().split())


def mutations(source: str, path: str = "") -> list[Mutation]:
    """All changes of ``source``, in the order of the file."""
    return list(_Finder(source, path).visit_body(ast.parse(source)))


class _Finder:
    def __init__(self, source: str, path: str) -> None:
        self.path = path
        self.starts = [0]
        for line in source.encode().splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.source = source.encode()

    def visit_body(self, node: ast.AST, names: tuple[str, ...] = (), in_function: bool = False) -> Iterator[Mutation]:
        for statement in ast.iter_child_nodes(node):
            if not isinstance(statement, ast.stmt | ast.ExceptHandler | ast.match_case) or _left_alone(statement):
                continue
            local = names
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                local = tuple(a.arg for a in _arguments(statement.args) if a.arg not in ("self", "cls"))
            first = statement.lineno if hasattr(statement, "lineno") else 0
            body = getattr(statement, "body", None)
            last = max(first, body[0].lineno - 1) if body else getattr(statement, "end_lineno", 0)
            for root in _expressions(statement):
                for unit, kind, new in self._changes(root, local):
                    yield Mutation(
                        path=self.path,
                        kind=kind,
                        line=unit.lineno,
                        lines=(first, last),
                        start=self.starts[unit.lineno - 1] + unit.col_offset,
                        end=self.starts[unit.end_lineno - 1] + unit.end_col_offset,
                        new=new,
                        in_function=in_function,
                    )
            if isinstance(statement, ast.AugAssign) and type(statement.op) in OPERATORS:
                yield self._augmented(statement, in_function)
            inside = in_function or isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from self.visit_body(statement, local, inside)

    def _augmented(self, statement: ast.AugAssign, in_function: bool) -> Mutation:
        changed = copy.copy(statement)
        changed.op = OPERATORS[type(statement.op)]()  # type: ignore[assignment]
        return Mutation(
            path=self.path,
            kind="operator",
            line=statement.lineno,
            lines=(statement.lineno, statement.end_lineno or statement.lineno),
            start=self.starts[statement.lineno - 1] + statement.col_offset,
            end=self.starts[(statement.end_lineno or statement.lineno) - 1] + (statement.end_col_offset or 0),
            new=ast.unparse(changed),
            in_function=in_function,
        )

    def _changes(self, root: ast.expr, names: tuple[str, ...]) -> Iterator[tuple[ast.expr, str, str]]:
        """Each changed expression, the kind of change, and its new text.

        Before Python 3.12 positions inside an f-string are unreliable, so the whole f-string is written anew.
        """
        for node, unit in _walk(root, None):
            for kind, changed in _variants(node, names):
                if unit is None:
                    yield node, kind, _source(changed)
                elif isinstance(node, ast.expr):
                    yield unit, kind, ast.unparse(_Replace(node, changed).visit(_shallow(unit)))


class _Replace(ast.NodeTransformer):
    """A copy of a tree in which one node, found by identity, is another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.old:
            return self.new
        return self.generic_visit(_shallow(node))


def _shallow(node: ast.AST) -> ast.AST:
    """A copy whose lists are its own; the children are shared."""
    twin = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            setattr(twin, name, list(value))
    return twin


def _walk(node: ast.AST, unit: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Expressions that may be changed, each with the f-string around it."""
    if isinstance(node, ast.Call) and _called(node) in MESSAGES:
        return
    if isinstance(node, ast.keyword) and (node.arg in GUARDS):
        return
    if isinstance(node, ast.JoinedStr) and unit is None:
        unit = node
    elif isinstance(node, ast.expr):
        yield node, unit
    for name, value in ast.iter_fields(node):
        if (isinstance(node, ast.FormattedValue) and name == "format_spec") or name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, unit)


def _variants(node: ast.expr, names: tuple[str, ...]) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS and not (_text(left) or _text(right)):
            neutral = 0 if isinstance(op, ast.Add | ast.Sub) else 1 if isinstance(op, ast.Mult | ast.Div) else None
            if neutral is None or not _is(right, neutral):
                yield "operator", ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.BinOp(left=left, op=ast.MatMult(), right=right):
            yield "swapped arguments", ast.BinOp(right, ast.MatMult(), left)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for i, op in enumerate(ops):
                for new in COMPARISONS[type(op)]:
                    yield "comparison", ast.Compare(left, [*ops[:i], new(), *ops[i + 1 :]], comparators)
        case ast.BoolOp(op=op, values=values):
            yield "boolean", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "boolean", operand
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "sign", operand
        case ast.Constant(value=bool(value)):
            yield "boolean", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
            if value > 0:
                yield "constant", ast.Constant(value - 1)
        case ast.Constant(value=float(value)) if value:
            yield "constant", ast.Constant(2 * value)
        case ast.Name(id=name, ctx=ast.Load()) if name in names and len(names) > 1:
            yield "swapped names", ast.Name(names[(names.index(name) + 1) % len(names)], ast.Load())
        case ast.Name(id=name) if name in NAMES:
            yield "swapped names", ast.Name(NAMES[name], ast.Load())
        case ast.Attribute(value=value, attr=attr, ctx=ast.Load()) if attr in NAMES:
            yield "swapped names", ast.Attribute(value, NAMES[attr], ast.Load())
        case ast.Call(func=func, args=args, keywords=keywords) if _called(node) not in ("isinstance", "getattr"):
            for swapped in _swaps(args):
                yield "swapped arguments", ast.Call(func, swapped, keywords)
            for values in _swaps([k.value for k in keywords]):
                pairs = [ast.keyword(k.arg, value) for k, value in zip(keywords, values)]
                yield "swapped arguments", ast.Call(func, args, pairs)
        case ast.List(elts=elements, ctx=ast.Load()):
            for swapped in _swaps(elements):
                yield "swapped arguments", ast.List(swapped, ast.Load())
        case ast.Tuple(elts=elements, ctx=ast.Load()) if not all(isinstance(e, ast.Constant) for e in elements):
            for swapped in _swaps(elements):
                yield "swapped arguments", ast.Tuple(swapped, ast.Load())
        case ast.Dict(keys=keys, values=values):
            for swapped in _swaps(values):
                yield "swapped arguments", ast.Dict(keys, swapped)


def _swaps(items: list[ast.expr]) -> Iterator[list[ast.expr]]:
    """``items`` with two neighbours exchanged, for each pair that differs."""
    for i, (a, b) in enumerate(pairwise(items)):
        if ast.dump(a) != ast.dump(b) and not isinstance(a, ast.Starred) and not isinstance(b, ast.Starred):
            yield [*items[:i], b, a, *items[i + 2 :]]


def _left_alone(statement: ast.AST) -> bool:
    match statement:
        case ast.Raise() | ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name.startswith("__")
    return False


def _expressions(statement: ast.AST) -> Iterator[ast.expr]:
    """Expressions of one statement: no annotations, decorators, base classes, caught types or inner statements."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from (d for d in [*statement.args.defaults, *statement.args.kw_defaults] if d is not None)
        case ast.ClassDef() | ast.ExceptHandler():
            return
        case ast.AnnAssign(value=value):
            if value is not None:
                yield value
        case _:
            for child in ast.iter_child_nodes(statement):
                if isinstance(child, ast.expr):
                    yield child
                elif isinstance(child, ast.withitem):
                    yield child.context_expr


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _source(node: ast.expr) -> str:
    if isinstance(node, ast.Tuple) and any(isinstance(e, ast.Slice) for e in node.elts):
        return ast.unparse(ast.Subscript(ast.Name("x", ast.Load()), node, ast.Load()))[2:-1]
    text = ast.unparse(node)
    return f"({text})" if isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare) else text


def _text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is(node: ast.expr, value: int) -> bool:
    return isinstance(node, ast.Constant) and node.value == value and not isinstance(node.value, bool)
