"""One check of arguments at each public entrance, made from the annotations.

``@checked`` on a function or class raises a TypeError or ValueError that names the argument, its
value and what is expected, or the name that was meant, before anything else runs. An annotation
without a rule here (a pytree, a type that only type checkers import) accepts every value. Integers
may be NumPy's, numbers may be arrays without dimensions, traced ones too, and ``float`` stands for
a finite number. ``Annotated`` adds a :class:`Range`, a phrase that describes the type to users, or
the type that is checked when a program runs, where type checkers know more of it.
"""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import inspect
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np

from ._resolve import near
from ._types import Converted

T = TypeVar("T", bound=Callable)


class Range(NamedTuple):
    """The values of a type that an argument may have, and a phrase that describes them."""

    holds: Callable[[Any], bool]
    words: str


def _is_pattern(text: str) -> bool:
    with contextlib.suppress(re.error):
        return re.compile(text) is not None
    return False


Count = Annotated[int, Range(lambda n: 1 <= n < 2**31, "a positive integer")]
Natural = Annotated[int, Range(lambda n: n >= 0, "an integer of at least 0")]
Positive = Annotated[float, Range(lambda x: x > 0 and is_finite(x), "a positive finite number")]
NonNegative = Annotated[
    float, Range(lambda x: x >= 0 and is_finite(x), "a finite number of at least 0")
]
Fraction = Annotated[float, Range(lambda x: 0 < x < 1, "a number between 0 and 1")]
AnyFloat = Annotated[float, Range(lambda x: True, "a number")]
Pattern = Annotated[str, Range(_is_pattern, "a regular expression")]
ANYTHING = "any value"


def checked(entry: T) -> T:
    """Checks the arguments of a function, or of a class's ``__init__``, by their annotations.

    Scalars of NumPy become Python's where one is expected: they have other methods and overflow.
    """
    if not isinstance(entry, type):
        return _checked(entry, entry.__name__)
    init: Any = getattr(entry, "__init__")  # noqa: B009
    setattr(entry, "__init__", _checked(init, entry.__name__))  # noqa: B010
    return entry  # pyright: ignore


def _checked(function: Any, name: str) -> Any:
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = getattr(inspect.unwrap(function), "__globals__")  # noqa: B009

    @functools.cache
    def rules() -> dict[str, Check]:
        return {p.name: rule_of(_evaluated(p.annotation, names)) for p in named}

    def accepted(argument: str, value: Any) -> Any:
        rule = rules().get(argument, FREE)
        if (kind := rule.error(value)) is not None:
            raise kind(f"{name}: {argument} is {shown(value)}; expected {rule.words}")
        is_numpy = isinstance(value, np.generic | np.ndarray)
        return value.item() if rule.is_scalar and is_numpy else value

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        other = next((k for k in kwargs if k not in rules()), None)
        if other is not None and not takes_all:
            known = [k for k in rules() if k != "self"]
            instead = near(other, known).rstrip() or f"expected one of {', '.join(known)}"
            raise TypeError(f"{name}: unexpected keyword argument {other!r}; {instead}")
        left = [p for p in named[len(args) :] if p.default is p.empty and p.name not in kwargs]
        if left:
            words = rules()[left[0].name].words
            raise TypeError(f"{name}: {left[0].name} is missing; expected {words}")
        given = map(accepted, positional, args)
        options = {p: accepted(p, x) for p, x in kwargs.items()}
        try:
            return function(*given, *args[len(positional) :], **options)
        except OverflowError as error:  # JAX's of a Python number: its dtype follows from x64
            raise ValueError(f"{name}: {error}") from error

    return call


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    """Returns an annotation's type; None if only type checkers import it."""
    try:
        return eval(annotation, names) if isinstance(annotation, str) else annotation
    except (NameError, AttributeError, TypeError):
        return None


class Check(NamedTuple):
    """The values that an argument may have: of a type, and of that type those that hold."""

    accepts: Callable[[Any], bool]
    words: str
    holds: Callable[[Any], bool] = lambda x: True
    is_scalar: bool = False  # a Python number, which a scalar of NumPy becomes

    def error(self, value: Any) -> type[Exception] | None:
        """Returns the class of the error that a value raises, if any."""
        if not self.accepts(value):
            return TypeError
        jax = sys.modules.get("jax")
        traced = jax is not None and isinstance(value, jax.core.Tracer)
        return None if traced or self.holds(value) else ValueError


FREE = Check(lambda x: True, ANYTHING)


def rule_of(hint: Any) -> Check:
    """Returns the rule of an annotation."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        if isinstance(args[1], str):
            return rule_of(args[0])._replace(words=args[1])
        is_range = isinstance(args[1], Range)
        return rule_of(args[0])._replace(**args[1]._asdict()) if is_range else rule_of(args[1])
    if origin is Converted:
        return rule_of(args[1])
    if origin in (typing.Union, types.UnionType):
        return _union(args)
    if origin is Literal:
        kinds, words = tuple(map(type, args)), ", ".join(map(repr, args))
        words = f"one of {words}" if len(args) > 1 else words
        same = lambda x: any(type(x) is type(y) and x == y for y in args)  # noqa: E731
        return Check(lambda x: isinstance(x, kinds), words, same)
    if origin is tuple and Ellipsis not in args:
        parts = [rule_of(x) for x in args]
        words = f"a tuple of {', '.join(part.words for part in parts)}"
        fits = lambda x: isinstance(x, tuple) and len(x) == len(parts)  # noqa: E731
        return Check(fits, words, lambda x: not any(p.error(y) for p, y in zip(parts, x)))  # noqa: B905
    if origin in COLLECTIONS:
        item = rule_of(args[0])
        words = f"a {COLLECTIONS[origin]}"
        words += f" of items that are each {item.words}" if item.words != ANYTHING else ""
        of_type = lambda x: isinstance(x, origin) and not isinstance(x, str | bytes)  # noqa: E731
        listed = tuple | list | set | frozenset  # an iterator is read once, by the function
        holds = lambda x: not isinstance(x, listed) or not any(map(item.error, x))  # noqa: E731
        return Check(of_type, words, holds)
    if origin in (dict, Mapping):
        key, value = map(rule_of, args)
        words = f"a dict from {key.words} to {value.words}"
        holds = lambda x: not any((*map(key.error, x), *map(value.error, x.values())))  # noqa: E731
        return Check(lambda x: isinstance(x, Mapping), words, holds)
    kind = origin or hint
    if kind in PLAIN:
        return PLAIN[kind]
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return FREE
    if kind.__name__.endswith("Array") and kind.__module__.startswith("jax"):
        return Check(lambda x: isinstance(x, kind | np.ndarray) and is_array(x), "an array")
    name = f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"
    return Check(lambda x: isinstance(x, kind), name)


COLLECTIONS = {
    tuple: "tuple", frozenset: "frozenset", collections.abc.Set: "set",
    collections.abc.Sequence: "sequence", Iterable: "collection",
}  # fmt: skip


def _union(args: tuple[Any, ...]) -> Check:
    """Returns the rule of a union, in which the parts of ArrayLike and DTypeLike are one each."""
    rules, rest = [], list(args)
    for kind, rule, parts in WHOLE:
        if kind in args:
            rules.append(rule)
            rest = [x for x in rest if getattr(x, "__name__", "").rpartition(".")[2] not in parts]
    if np.dtype in args and set(rest) <= {str, type(None)}:
        rest = [x for x in rest if x is not str]  # of a format it is a name, which is looked up
    rules += map(rule_of, rest)
    words = dict.fromkeys(w for rule in rules for w in rule.words.split(" or "))
    return Check(
        lambda x: any(rule.accepts(x) for rule in rules),
        " or ".join(sorted(words, key="None".__eq__)),
        lambda x: any(rule.error(x) is None for rule in rules),
        any(rule.is_scalar for rule in rules) and np.ndarray not in args,
    )


def is_integer(value: Any) -> bool:
    """Returns whether a value is an integer, and no bool."""
    with contextlib.suppress(TypeError):
        return not isinstance(value, bool) and isinstance(operator.index(value), int)
    return False


def _is_number(value: Any) -> bool:
    if isinstance(value, int | float):
        return not isinstance(value, bool)
    kind = getattr(value, "dtype", None) if hasattr(value, "shape") else None
    return kind is not None and np.ndim(value) == 0 and (kind.kind in "iuf" or "float" in str(kind))


def is_finite(value: Any) -> bool:
    with contextlib.suppress(OverflowError):  # of an integer beyond every float
        return math.isfinite(value)
    return False


def checked_axes(name: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """Returns axes (None: all) from 0 on, sorted; a ValueError if they aren't different axes."""
    given = range(ndim) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    axes = sorted({int(a) % ndim for a in given if is_integer(a) and -ndim <= a < ndim})
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


def _is_dtype(value: Any) -> bool:
    if value is None or isinstance(value, list | tuple | dict):  # np.dtype takes them all
        return False
    with contextlib.suppress(TypeError, ValueError):
        return np.dtype(value).kind not in "OSUMm"
    return False


# What a union has of ArrayLike and of DTypeLike: a type that shows it, the rule, the parts' names.
WHOLE = (
    (np.ndarray, Check(is_array, "an array of numbers"), {
        "ndarray", "Array", "TypedNdArray", "LiteralArray", "number", "bool", "int", "float",
        "complex",
    }),
    (np.dtype, Check(_is_dtype, "a dtype"), {"dtype", "type", "SupportsDType"}),
)  # fmt: skip
PLAIN: dict[Any, Check] = {
    **dict.fromkeys((Any, object, inspect.Parameter.empty), FREE),
    int: Check(is_integer, "an integer", lambda n: -(2**63) <= n < 2**64, True),
    float: Check(_is_number, "a finite number", is_finite, True),
    bool: Check(lambda x: isinstance(x, bool | np.bool_), "True or False", is_scalar=True),
    str: Check(lambda x: isinstance(x, str), "a string"),
    type(None): Check(lambda x: x is None, "None"),
    Callable: Check(callable, "a function"),
}


def shown(value: Any) -> str:
    """Returns a value as an error message shows it."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None and shape:
        return f"an array of dtype {dtype} and shape {shape}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."
