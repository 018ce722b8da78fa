"""The jinja2 sandbox that renders chat templates within a budget of time, steps and output.

Set up as transformers does (trim_blocks, lstrip_blocks, loop controls, `tojson` without escaping, `raise_exception`,
`strftime_now`). Templates come with a model and are not trusted: no access to Python internals, and neither a loop nor
a string operation may run away. Rendering happens in a worker thread, which cannot be killed, hence the budget inside.
"""

from __future__ import annotations

import datetime as dt
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, cast

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from proa.chat.template_lists import LIST_METHODS, PlainNamespace, TemplateLists
from proa.core.errors import UserError

__all__ = ["RenderBudget", "TemplateSandbox"]

_BUILTIN_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


class RenderBudget:
    """What one rendering may use: `seconds`, `steps` (loop iterations and calls) and `characters` of any one string."""

    def __init__(self, *, seconds: float, steps: int, characters: int) -> None:
        self._deadline = time.monotonic() + seconds
        self._steps = steps
        self._characters = characters
        self.lists = TemplateLists(self.size)

    def step(self) -> None:
        """Count one loop iteration or call."""
        self._steps -= 1
        if self._steps < 0:
            raise _over_budget("loop iterations")
        if self._steps % 64 == 0 and time.monotonic() > self._deadline:
            raise _over_budget("time")

    def size(self, characters: float) -> None:
        """Check the length of a string that is about to be, or was, built."""
        if characters > self._characters:
            raise _over_budget("output")


def _over_budget(what: str) -> UserError:
    return UserError(
        "messages", f"a chat template that renders within its {what} budget", "more", code="template_error"
    )


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, which marks assistant text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain set

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles and renders templates. One `render` per thread at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
            autoescape=False,
        )
        self._thread = threading.local()
        self.filters["tojson"] = _tojson
        self.filters["format"] = self._format
        for name in ("batch", "center", "indent", "slice", "wordwrap"):
            self.filters[name] = self._with_sized_arguments(self.filters[name])
        self.filters["_budgeted"] = self._budgeted
        self.filters["_made"] = self._made
        del self.globals["lipsum"]
        self.globals["namespace"] = PlainNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def render(self, template: jinja2.Template, variables: dict[str, Any], budget: RenderBudget) -> str:
        """The rendered text.

        Raises:
            UserError: over budget, an unsafe operation, `raise_exception`, or any error inside the template.
        """
        self._thread.budget = budget
        pieces: list[str] = []
        length = 0
        try:
            for piece in template.generate(variables):
                length += len(piece)
                budget.size(length)
                pieces.append(piece)
        except UserError:
            raise
        except jinja2.exceptions.SecurityError as error:
            raise _template_error(f"an unsafe operation ({error})") from error
        except jinja2.TemplateError as error:
            raise _template_error(str(error)) from error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise _template_error(f"{type(error).__name__}: {error}") from error
        finally:
            self._thread.budget = None
        return "".join(pieces)

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        # Each `for` draws its items through the budget, each `~` and each literal reports its length.
        for loop in source.find_all(jinja2.nodes.For):
            loop.iter = _filtered(loop.iter, "_budgeted")
        for parent in [source, *list(source.find_all(jinja2.nodes.Node))]:
            _wrap(parent)
        return super()._generate(source, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Lists may grow: `call` sees to how far."""
        return (type(obj) is list and attr in LIST_METHODS) or super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        if (budget := __self._budget()) is not None:
            budget.step()
            if getattr(__obj, "__name__", "") in _BUILTIN_PADDING:
                budget.size(max((width for width in args if isinstance(width, int)), default=0))
            if type(target := getattr(__obj, "__self__", None)) is list and __obj.__name__ in LIST_METHODS:
                given = [list(__self._budgeted(args[0]))] if __obj.__name__ == "extend" and args else args
                return budget.lists.change(target, __obj.__name__, tuple(given))
        return __self._made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if (budget := self._budget()) is not None:
            budget.size(_result_size(operator, left, right))
        return self._made(super().call_binop(context, operator, left, right))

    # pass_context keeps jinja2 from folding constants through these while it compiles, outside any budget.
    @jinja2.pass_context
    def _format(self, context: Any, text: str, *args: Any, **kwargs: Any) -> str:  # noqa: ARG002
        """The `format` filter, through the same check as the `%` operator."""
        if (budget := self._budget()) is not None:
            budget.size(_result_size("%", text, None))
        return str(text) % (kwargs or args)

    def _with_sized_arguments(self, filter_: Callable[..., Any]) -> Callable[..., Any]:
        @jinja2.pass_context
        def checked(context: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
            if (budget := self._budget()) is not None:
                budget.size(max((size for size in (*args, *kwargs.values()) if isinstance(size, int)), default=0))
            return filter_(*args, **kwargs)

        return checked

    def _budget(self) -> RenderBudget | None:
        return getattr(self._thread, "budget", None)

    def _budgeted(self, items: Iterable[Any]) -> Iterator[Any]:
        budget = self._budget()
        for item in items:
            if budget is not None:
                budget.step()
            yield item

    def _sized(self, value: Any) -> Any:
        if isinstance(value, str) and (budget := self._budget()) is not None:
            budget.size(len(value))
        return value

    def _made(self, value: Any) -> Any:
        if isinstance(value, list | tuple | dict) and (budget := self._budget()) is not None:
            budget.lists.made(value)
        return self._sized(value)


def _result_size(operator: str, left: Any, right: Any) -> float:
    """A bound on the size of `left operator right` that is known before it is computed."""
    if operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                return len(sequence) * float(max(count, 0))
        if isinstance(left, int) and isinstance(right, int):
            return (left.bit_length() + right.bit_length()) / 3
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * float(max(right, 0)) / 3
    if operator == "%" and isinstance(left, str):
        # A width such as %1000000d can only be as large as its digits say.
        digits = "".join(character if character.isdigit() else " " for character in left).split()
        return float(sum(min(int(number[:12]), 10**12) for number in digits))
    return 0


def _filtered(node: jinja2.nodes.Node, name: str) -> jinja2.nodes.Expr:
    return jinja2.nodes.Filter(cast("jinja2.nodes.Expr", node), name, [], [], None, None, lineno=node.lineno)


def _wrap(parent: jinja2.nodes.Node) -> None:
    if isinstance(parent, jinja2.nodes.Filter) and parent.name == "_made":
        return
    for field, value in list(parent.iter_fields()):
        if _is_measured(value):
            setattr(parent, field, _filtered(value, "_made"))
        elif isinstance(value, list):
            value[:] = [_filtered(item, "_made") if _is_measured(item) else item for item in value]


def _is_measured(node: Any) -> bool:
    """Whether `node` makes a text or a container of parts that are not written in the template itself."""
    if isinstance(node, jinja2.nodes.Tuple) and node.ctx != "load":
        return False
    if isinstance(node, jinja2.nodes.List | jinja2.nodes.Tuple):
        return not all(isinstance(item, jinja2.nodes.Const) for item in node.items)
    return isinstance(node, jinja2.nodes.Concat | jinja2.nodes.Dict)


def _template_error(got: str) -> UserError:
    return UserError(
        "messages",
        "messages the model's chat template can render",
        got[:500],
        "see the template of the model",
        code="template_error",
    )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - name used by templates
    # Local time without a zone, as the templates' authors saw it.
    return dt.datetime.now().strftime(format)  # noqa: DTZ005
