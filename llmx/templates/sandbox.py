"""The Jinja2 environment that chat templates run in: what transformers offers them, and bounds."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, TypeVar, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

MAX_OUTPUT = 8 << 20  # characters of what a template renders, and of any one text on the way
MAX_MADE = 1 << 28  # characters of all texts on the way together, and elements of lists
MAX_SECONDS = 2.0  # of processor time for one rendering
MAX_RANGE = 100_000
MAX_WIDTH = 10_000  # spaces and the like that one operation may fill in
METER = "_meter"  # where a rendering's meter is among the template's variables

_T = TypeVar("_T")


class Refusal(jinja2.TemplateError):
    """The template itself called `raise_exception`: it does not take these messages."""


class TooMuch(jinja2.TemplateError):
    """A bound on time or size was reached."""


class Meter:
    """The bounds of one rendering, looked at in every turn of a loop, at every call and for every text that is made."""

    def __init__(self) -> None:
        self._deadline = time.thread_time() + MAX_SECONDS
        self._ticks = 0
        self._made = 0

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % 64 == 0 and time.thread_time() > self._deadline:
            raise TooMuch(f"it took over {MAX_SECONDS:g} s")

    def output(self, size: int) -> None:
        """`size`: characters rendered so far."""
        self.tick()
        if size > MAX_OUTPUT:
            raise TooMuch(f"it makes over {MAX_OUTPUT} characters")

    def made(self, value: _T) -> _T:
        """Counts a value that the template made, and returns it."""
        if isinstance(value, str | list | tuple):
            self._made += len(value)
            if len(value) > MAX_OUTPUT or self._made > MAX_MADE:
                raise TooMuch(f"it makes texts or lists of over {MAX_OUTPUT} each or {MAX_MADE} together")
        return value


class Environment(ImmutableSandboxedEnvironment):
    """What transformers renders chat templates with (utils/chat_template_utils.py), and bounds."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        filters = {**self.filters, "tojson": _tojson}
        self.filters = {name: _bounded(name, function) for name, function in filters.items()}
        self.filters |= {"_each": _each, "_made": _made}
        self.globals = {
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: datetime.now().strftime(format),
            "range": _range,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": TemplateNamespace,
            "cycler": Cycler,
            "joiner": Joiner,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Bounds().visit(source), *args, **kwargs)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call that a template makes: a macro, a method, a global. (A keyword may well be named `self`.)"""
        meter = _meter(__context)
        meter.tick()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_text(getattr(method, "__name__", ""), owner, [*args, *kwargs.values()])
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter(context)
        meter.tick()
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, Sequence) and isinstance(times, int) and len(many) * times > MAX_OUTPUT:
                    raise TooMuch(f"it makes over {MAX_OUTPUT} characters")
        elif operator == "**" and isinstance(right, int) and right > 64:
            raise TooMuch("its numbers grow too large")
        elif operator == "%" and isinstance(left, str):
            _check_format(left, "%", right if isinstance(right, tuple) else [right])
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > 1 << 16:
            raise TooMuch("its numbers grow too large")
        return meter.made(result)


class _Bounds(NodeTransformer):
    """Puts the meter into loops and into each way to write text that is neither a call nor a filter."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_each")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_made")

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        plain = nodes.TemplateData
        node.nodes = [part if isinstance(part, plain) else _filtered(part, "_made") for part in node.nodes]
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(
        cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno, environment=node.environment
    )


def _meter(context: Context) -> Meter:
    meter = context.parent[METER]  # not context[METER]: a template may have set that
    assert isinstance(meter, Meter)
    return meter


@jinja2.pass_context
def _each(context: Context, items: Iterable[_T]) -> Iterator[_T]:
    meter = _meter(context)
    for item in items:
        meter.tick()
        yield item


@jinja2.pass_context
def _made(context: Context, value: _T) -> _T:
    return _meter(context).made(value)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with the meter. It takes the context, so none is run when the template is compiled."""
    passed = getattr(function, "jinja_pass_arg", None)  # what Jinja2's own filters want in front of their value

    @jinja2.pass_context
    @wraps(function, updated=())
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        meter.tick()
        given = [*args, *kwargs.values()]
        if name == "join" and isinstance(value, list | tuple):
            _check_text("join", str(given[0]) if given else "", [value])
        elif name == "format":
            _check_format(str(value), "%", given)
        else:
            _check_text(name, value if isinstance(value, str) else "", given)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        front = [first[passed.name]] if passed is not None else []
        return meter.made(function(*front, value, *args, **kwargs))

    return bounded


_WIDTHS = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "tojson"}
)


def _check_text(name: str, text: str, given: Sequence[Any]) -> None:
    """Refuses a method of a text, or a filter, that would make a huge one, before it does."""
    size = 0
    if name in _WIDTHS and any(isinstance(width, int) and width > MAX_WIDTH for width in given):
        raise TooMuch(f"it fills up to a width of over {MAX_WIDTH}")
    if name == "replace" and len(given) >= 2 and isinstance(given[0], str) and isinstance(given[1], str):
        size = text.count(given[0]) * len(given[1])
    elif name == "join" and given and isinstance(given[0], list | tuple):
        size = len(text) * len(given[0]) + sum(len(item) for item in given[0] if isinstance(item, str))
    elif name in ("format", "format_map"):
        _check_format(text, "{", given)
    if size > MAX_OUTPUT:
        raise TooMuch(f"it makes over {MAX_OUTPUT} characters")


def _check_format(pattern: str, mark: str, given: Sequence[Any]) -> None:
    longest = max((len(value) for value in given if isinstance(value, str)), default=0)
    if pattern.count(mark) * longest > MAX_OUTPUT or re.search(r"\d{5}", pattern) or "*" in pattern:
        raise TooMuch("it formats over-long texts")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is: Jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise Refusal(str(message))


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise TooMuch(f"it counts over {MAX_RANGE} numbers")
    return numbers


class TemplateNamespace(Namespace):
    """Refuses names that begin with an underscore: they lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that `namespace(self=1)` works
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it sets {name!r} in a namespace")


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; it renders as what is inside."""

    tags = {"generation"}  # noqa: RUF012 -- as Jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)
