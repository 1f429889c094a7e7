"""One check of arguments at each public entrance, made from the annotations.

``@checked`` on a function or class raises a TypeError or ValueError that names the argument, its
value and what is expected, or the name that was meant, before anything else runs. An annotation
without a rule here (a pytree, a type that only type checkers import) accepts every value. Integers
may be NumPy's, numbers may be arrays without dimensions, traced ones too, and ``float`` stands for
a finite number.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import inspect
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    overload,
)

import numpy as np

T = TypeVar("T", bound=Callable)
Result = TypeVar("Result")
"""What a function that is transformed returns."""
P = ParamSpec("P")


@dataclasses.dataclass(frozen=True)
class Range:
    """The values of a type that an argument may have, and a phrase that describes them."""

    holds: Callable[[Any], bool]
    words: str


@dataclasses.dataclass(frozen=True)
class Words:
    """A phrase that describes a type to users, in place of the one made from the annotation."""

    words: str


Count = Annotated[int, Range(lambda n: 1 <= n < 2**31, "a positive integer")]
Natural = Annotated[int, Range(lambda n: n >= 0, "an integer of at least 0")]
Positive = Annotated[float, Range(lambda x: 0 < x < math.inf, "a positive finite number")]
NonNegative = Annotated[float, Range(lambda x: 0 <= x < math.inf, "a finite number of at least 0")]
Fraction = Annotated[float, Range(lambda x: 0 < x < 1, "a number between 0 and 1")]
ANYTHING = "any value"
CONVERTED = "__post_init__ converts the field, and checks it"  # Annotated[Format, CONVERTED]


class Accepts(NamedTuple):
    """The type of argument for a field that ``__post_init__`` converts: ``Annotated[T, ...]``."""

    hint: Any


Pattern = Annotated[str, Range(lambda text: _is_pattern(text), "a regular expression")]
AnyFloat = Annotated[float, Range(lambda x: True, "a number")]


class Rule(NamedTuple):
    """Whether a value is of a type, whether such a value is in range, and what is expected."""

    of_type: Callable[[Any], bool]
    words: str
    in_range: Callable[[Any], bool] = lambda value: True
    is_scalar: bool = False  # a Python number, which a scalar of NumPy becomes

    def checked(self, where: str, argument: str, value: Any) -> Any:
        """Returns the value of an argument of the function ``where``, or raises."""
        if not (self.of_type(value) and self.in_range(value)):
            kind = ValueError if self.of_type(value) else TypeError
            raise kind(f"{where}: {argument} is {shown(value)}; expected {self.words}")
        is_numpy = isinstance(value, np.generic | np.ndarray)
        return value.item() if self.is_scalar and is_numpy else value


def checked(entry: T) -> T:
    """Checks the arguments of a function, or of a class's ``__init__``, by their annotations.

    Scalars of NumPy become Python's where one is expected: they have other methods and overflow.
    """
    if not isinstance(entry, type):
        return _checked(entry, entry.__name__)
    return checked_names(entry, types=True)  # pyright: ignore


def checked_names(entry: T, types: bool = False) -> T:
    """Checks the names of a class's arguments, whose ``__init__`` checks the values."""
    init: Any = getattr(entry, "__init__")  # noqa: B009
    setattr(entry, "__init__", _checked(init, entry.__name__, types))  # noqa: B010
    return entry


def near(name: str, known: Iterable[str]) -> str:
    """Returns the question whether the names most like this one were meant, or nothing."""
    close = difflib.get_close_matches(name.lower(), list(known), n=2)
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""


def _instead(name: str, hints: dict[str, Any]) -> str:
    """Returns what to write instead of an unknown argument: the settings that have it, or names."""
    for parameter, hint in hints.items():
        for kind in (hint, *typing.get_args(hint)):
            for maker in _constructors(kind):
                if name in inspect.signature(maker).parameters:
                    return f"write {parameter}={maker.__qualname__}({name}=...)"
    return near(name, hints).rstrip() or f"expected one of {', '.join(hints)}"


def _constructors(kind: Any) -> Iterator[Callable]:
    """Yields the class methods that make settings of a class of ours, and the class itself."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield from (getattr(kind, k) for k, x in vars(kind).items() if isinstance(x, classmethod))
        yield kind


class Decorator(Protocol[P]):
    """A transformation that takes the function now, or only its options and the function later."""

    __name__: str

    @overload
    def __call__(
        self, f: Callable[..., Result], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[..., Result]: ...

    @overload
    def __call__(
        self, **options: Any
    ) -> Callable[[Callable[..., Result]], Callable[..., Result]]: ...


def as_decorator(transformation: Callable[Concatenate[Callable, P], Callable]) -> Decorator[P]:
    """Lets a transformation be written above a function: ``@autoscale(recipe="fp8")``.

    Args:
        transformation: its first parameter is ``f``, the function. Called without ``f``, it returns
            a function that takes ``f``.
    """

    @functools.wraps(transformation)
    def call(*args: Any, **kwargs: Any) -> Callable:
        if args and not callable(args[0]):
            name, option = (
                transformation.__name__,
                [*inspect.signature(transformation).parameters][1],
            )
            raise TypeError(
                f"{name}: f is {args[0]!r}; expected a function. A decorator takes options by "
                f"name: @{name}({option}={args[0]!r})"
            )
        if args or "f" in kwargs:
            return transformation(*args, **kwargs)
        return functools.partial(call, **kwargs)

    return cast(Any, call)


def _checked(function: Any, name: str, types: bool = True) -> Any:
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    names = getattr(inspect.unwrap(function), "__globals__")  # noqa: B009

    @functools.cache
    def hints() -> dict[str, Any]:
        return {p.name: _evaluated(p.annotation, names) for p in named}

    @functools.cache
    def rules() -> dict[str, Rule]:
        return {key: rule_of(hint) for key, hint in hints().items() if _has_rule(hint)}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        known = rules() if types else {}
        other = next((k for k in kwargs if k not in hints()), None)
        if other is not None and not takes_all:
            instead = _instead(other, {k: h for k, h in hints().items() if k != "self"})
            raise TypeError(f"{name}: unexpected keyword argument {other!r}; {instead}")

        def accepted(argument: str, value: Any) -> Any:
            return (
                value if argument not in known else known[argument].checked(name, argument, value)
            )

        named = [accepted(p, x) for p, x in zip(positional, args, strict=False)]
        options = {p: accepted(p, x) for p, x in kwargs.items()}
        return function(*named, *args[len(named) :], **options)

    return call


def _has_rule(hint: Any) -> bool:
    plain = hint in (None, Any, object, inspect.Parameter.empty)
    return not plain and CONVERTED not in getattr(hint, "__metadata__", ())


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    """Returns an annotation's type; None if only type checkers import it."""
    try:
        return eval(annotation, names) if isinstance(annotation, str) else annotation
    except (NameError, AttributeError, TypeError):
        return None


def rule_of(hint: Any) -> Rule:
    """Returns the rule of an annotation."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        if isinstance(args[1], Accepts):
            return rule_of(args[1].hint)
        allowed, base = args[1], rule_of(args[0])
        if isinstance(allowed, Words):
            return base._replace(words=allowed.words)
        in_range = lambda x: _is_traced(x) or allowed.holds(x)  # noqa: E731
        return Rule(base.of_type, allowed.words, in_range, base.is_scalar)
    if origin in (typing.Union, types.UnionType):
        return _union(args)
    if origin is Literal:
        kinds, words = tuple({type(x) for x in args}), ", ".join(map(repr, args))
        words = f"one of {words}" if len(args) > 1 else words
        one_of = lambda x: any(type(x) is type(y) and x == y for y in args)  # noqa: E731
        return Rule(lambda x: isinstance(x, kinds), words, one_of)
    if origin is tuple and Ellipsis not in args:
        parts = [rule_of(x) for x in args]
        words = f"a tuple of {', '.join(part.words for part in parts)}"
        return Rule(
            lambda x: isinstance(x, tuple) and len(x) == len(parts),
            words,
            lambda x: all(p.of_type(y) and p.in_range(y) for p, y in zip(parts, x, strict=True)),
        )
    if origin in COLLECTIONS:
        item = rule_of(args[0])

        def all_of(x: Any) -> bool:
            items = x if isinstance(x, tuple | list | set | frozenset) else ()
            return all(item.of_type(y) and item.in_range(y) for y in items)

        words = f"a {COLLECTIONS[origin]}"
        words += f" of items that are each {item.words}" if item.words != ANYTHING else ""
        text = (str, bytes)
        return Rule(lambda x: isinstance(x, origin) and not isinstance(x, text), words, all_of)
    if origin in (dict, collections.abc.Mapping):
        return _mapping(args)
    return _plain(origin or hint)


COLLECTIONS = {
    tuple: "tuple", frozenset: "frozenset", collections.abc.Set: "set",
    collections.abc.Sequence: "sequence", collections.abc.Iterable: "collection",
}  # fmt: skip


def _mapping(args: tuple[Any, ...]) -> Rule:
    key, value = map(rule_of, args)

    def entries(x: Any) -> bool:
        pairs = [(key, k) for k in x] + [(value, v) for v in x.values()]
        return all(rule.of_type(y) and rule.in_range(y) for rule, y in pairs)

    words = f"a dict from {key.words} to {value.words}"
    return Rule(lambda x: isinstance(x, collections.abc.Mapping), words, entries)


def _union(args: tuple[Any, ...]) -> Rule:
    """Returns the rule of a union, in which the parts of ArrayLike and DTypeLike are one each."""
    rules, rest = [], [x for x in args if x is not type(None)]
    if np.ndarray in args:
        rules.append(Rule(is_array, "an array of numbers"))
        rest = [x for x in rest if not _is_part_of_array(x)]
    if np.dtype in args:
        rules.append(Rule(_is_dtype, "a dtype"))
        rest = [x for x in rest if typing.get_origin(x) is not type and x is not np.dtype]
        rest = [x for x in rest if getattr(x, "__name__", "") != "SupportsDType"]
        if rest == [str]:  # of a format, say, a string is a name, which its reader looks up
            rest = []
    rules += [rule_of(x) for x in rest]
    if type(None) in args:
        rules.append(Rule(lambda x: x is None, "None"))
    words = " or ".join(dict.fromkeys(rule.words.removesuffix(" or None") for rule in rules))
    if "None" not in words.split(" or ") and any(r.words.endswith(" or None") for r in rules):
        words += " or None"
    return Rule(
        lambda x: any(r.of_type(x) for r in rules),
        words,
        lambda x: any(r.of_type(x) and r.in_range(x) for r in rules),
        any(r.is_scalar for r in rules) and np.ndarray not in args,
    )


def _plain(kind: Any) -> Rule:
    """Returns the rule of a class."""
    if kind in PLAIN:
        return PLAIN[kind]
    if kind in (Any, object) or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return Rule(lambda x: True, ANYTHING)
    if kind.__name__.endswith("Array") and kind.__module__.startswith("jax"):
        return Rule(lambda x: isinstance(x, kind | np.ndarray) and is_array(x), "an array")
    name = f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"
    return Rule(lambda x: isinstance(x, kind), name)


def is_integer(value: Any) -> bool:
    """Returns whether a value is an integer, and no bool."""
    try:
        return not isinstance(value, bool) and isinstance(operator.index(value), int)
    except TypeError:
        return False


def _is_number(value: Any) -> bool:
    if isinstance(value, int | float):
        return not isinstance(value, bool)
    kind = getattr(value, "dtype", None) if hasattr(value, "shape") else None
    return kind is not None and np.ndim(value) == 0 and (kind.kind in "iuf" or "float" in str(kind))


def checked_axes(name: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """Returns axes (None: all) from 0 on, sorted; a ValueError if they aren't different axes."""
    given = range(ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    axes = sorted({a % ndim for a in map(operator.index, given) if -ndim <= a < ndim})
    if len(axes) != len(given):
        raise ValueError(f"{name}: axis is {axis!r}; expected different axes of {ndim} dimensions")
    return tuple(axes)


def is_array(value: Any) -> bool:
    """Returns whether JAX makes an array of a value: of lists of numbers, if of one shape, too."""
    if isinstance(value, bool | int | float | complex):
        return not isinstance(value, int) or -(2**63) <= value < 2**64
    if isinstance(value, list | tuple):
        return all(map(is_array, value)) and len(set(map(np.shape, value))) < 2
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return hasattr(value, "__jax_array__")
    return hasattr(value, "shape") and getattr(dtype, "kind", "f") not in "OSUMm"  # keys have none


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _is_part_of_array(hint: Any) -> bool:
    name = getattr(hint, "__name__", "").rpartition(".")[2]
    parts = (np.ndarray, np.bool_, np.number, bool, int, float, complex)
    return hint in parts or name in ("Array", "TypedNdArray", "LiteralArray")


def _is_dtype(value: Any) -> bool:
    if value is None or isinstance(value, list | tuple | dict):  # np.dtype takes them all
        return False
    try:
        return np.dtype(value).kind not in "OSUMm"
    except (TypeError, ValueError):
        return False


def _is_traced(value: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


PLAIN: dict[Any, Rule] = {
    int: Rule(is_integer, "an integer", is_scalar=True),
    float: Rule(
        _is_number, "a finite number", lambda x: _is_traced(x) or math.isfinite(x), is_scalar=True
    ),
    bool: Rule(lambda x: isinstance(x, bool | np.bool_), "True or False", is_scalar=True),
    str: Rule(lambda x: isinstance(x, str), "a string"),
    type(None): Rule(lambda x: x is None, "None"),
    collections.abc.Callable: Rule(callable, "a function"),
}


def shown(value: Any) -> str:
    """Returns a value as an error message shows it."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None and shape:
        return f"an array of dtype {dtype} and shape {shape}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."
