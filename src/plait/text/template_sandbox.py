"""A Jinja2 environment in which a chat template can neither reach the machine nor run or grow without bound.

Jinja's immutable sandbox keeps a template from object internals, and without a loader it opens no file. On top of that
every loop's turn, macro, block, call, filter and operator spends from a budget (`template_limits`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from plait.text.template_limits import (
    Budget,
    TemplateLimitError,
    binary_size,
    check_time_pattern,
    filter_size,
    size_of,
    string_method_size,
)

MAX_TEMPLATE_CHARS = 1 << 19
_KEPT_GLOBALS = ("range", "cycler", "joiner")
_MAKES_BYTES = ("encode", "to_bytes", "from_bytes")
_DROPPED_FILTERS = ("urlize", "xmlattr", "striptags", "random", "pprint", "filesizeformat")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with a budget; settings and helpers are those that transformers gives to chat templates."""

    intercepted_binops = frozenset(("**", "*", "/", "//", "%", "+", "-"))

    def __init__(self) -> None:
        self.budget = Budget()
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._measured
        )
        self.concat = self._bounded_concat  # type: ignore[method-assign]
        helpers: dict[str, Any] = {
            "dict": lambda *args, **kwargs: self._measured(dict(*args, **kwargs)),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.globals = {**{name: self.globals[name] for name in _KEPT_GLOBALS}, **helpers}
        kept = {name: function for name, function in self.filters.items() if name not in _DROPPED_FILTERS}
        kept["tojson"] = _tojson
        self.filters = {name: self._budgeted(name, function) for name, function in kept.items()}
        self.filters[_SPEND] = self._spend
        self.filters[_CONCAT] = self._concat_values
        self.filters[_MEASURE] = self._measured

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateLimitError(f"it has more than {MAX_TEMPLATE_CHARS} characters")
        template = _Metering().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # No template needs bytes, and what they can grow into is not metered.
        if attr in _MAKES_BYTES or isinstance(obj, bytes | bytearray | memoryview):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend(binary_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __function: Any, *args: Any, **kwargs: Any) -> Any:
        # The odd names leave every keyword free for the template, as in the method that this overrides.
        method = getattr(__function, "__wrapped__", __function)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        size = string_method_size(owner, method.__name__, [*args, *kwargs.values()]) if isinstance(owner, str) else 0
        __self.budget.spend(size)
        return super().call(__context, __function, *args, **kwargs)

    def _budgeted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Some filters get the context, its settings or the environment before the value.
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            value, *rest = args[first:]
            self.budget.spend(filter_size(name, value, [*rest, *kwargs.values()]))
            return function(*args, **kwargs)

        return run

    @pass_context  # a filter that wants the context is not folded into a constant at compile time
    def _spend(self, context: Any, value: str) -> str:
        self.budget.spend()
        return value

    def _measured(self, value: Any) -> Any:
        if isinstance(value, list | tuple | dict):
            self.budget.spend(size_of(value))
        return value

    def _concat_values(self, values: list[Any]) -> str:
        return self._bounded_concat(map(str, values))

    def _bounded_concat(self, parts: Iterable[str]) -> str:
        pieces = list(parts)
        self.budget.spend(sum(map(len, pieces)))
        return "".join(pieces)


# Names that no template can write.
_SPEND, _CONCAT, _MEASURE = " spend", " concat", " measure"


class _Metering(NodeTransformer):
    """Puts a step of the budget at the start of what can run again, and measures collections and `~`."""

    def _spend_first(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(""), _SPEND, node.lineno), lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = visit_FilterBlock = _spend_first

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT, node.lineno)

    def _measure(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":  # the targets of an assignment
            return node
        return _filtered(node, _MEASURE, node.lineno)

    visit_List = visit_Tuple = visit_Dict = _measure


def _filtered(node: nodes.Expr, name: str, lineno: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it just renders its body."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, and with a text of fixed size."""

    def __repr__(self) -> str:
        return "<namespace>"

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


def _strftime_now(pattern: str) -> str:
    check_time_pattern(pattern)
    return datetime.now().strftime(pattern)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model has seen in its tool descriptions.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
