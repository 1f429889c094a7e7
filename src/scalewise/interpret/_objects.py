"""Objects that a function updates in place: Flax NNX's go in and come out as pytrees.

A function may update an NNX object in place: a model's parameters, an optimizer's state, the
counters of random streams. Flax's own protocol takes the objects apart outside of a transformation,
puts them together inside, and does both again in the other direction after the call. Flax isn't
imported here: a caller that passes one of its objects has imported it. Updates of other objects are
found (:func:`tracers_held`), so that they can be refused and undone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from .._jax import Tracer
from .._types import PyTree

# whose attributes aren't searched
OPAQUE = (
    str, bytes, int, float, complex, type(None), type, FunctionType, BuiltinFunctionType,
    ModuleType, np.ndarray, jax.Array,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Call:
    """A call without side effects: ``call.finish(call.f(*call.args, **call.kwargs))``.

    Attributes:
        f: a function of pytrees. Arrays of objects that it didn't change are left out of its
            results.
        args, kwargs: its arguments.
        whole: returns the results of ``f`` with the arrays that were left out.
        finish: updates the caller's objects from the results of ``f``; returns the caller's result.
    """

    f: Callable
    args: Sequence[PyTree]
    kwargs: Mapping[str, PyTree]
    whole: Callable[[PyTree], PyTree] = lambda outs: outs
    finish: Callable[[PyTree], PyTree] = lambda outs: outs


@contextlib.contextmanager
def pure_call(
    f: Callable,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    is_leaf: Callable[[object], bool] | None = None,
) -> Iterator[Call]:
    """Yields a call whose arguments and results are pytrees, for one that may have NNX objects.

    A method or a callable object of NNX counts as an argument, too. Arrays that the function
    leaves as they were keep their bits: they aren't among the results, so that no transformation
    rounds them. ``is_leaf`` returns whether a node stands for one array in ``f`` (a
    ScaledArray).
    """
    nnx, given = sys.modules.get("flax.nnx"), (f, args, kwargs)
    if nnx is not None:
        f, args, kwargs = _unbound(nnx, f, args, kwargs)
    if nnx is None or not any(_is_object(nnx, x) for x in _flatten(nnx, (args, kwargs))[0]):
        yield Call(*given)  # arrays of a partial stay numbers
        return
    tag = object()

    @functools.wraps(f, updated=())
    def pure(*args: PyTree, **kwargs: PyTree) -> _Results:
        before = {id(x): _Kept(i) for i, x in enumerate(jax.tree.leaves((args, kwargs)))}
        given = nnx.from_tree((args, kwargs), ctxtag=tag, is_inner=True)
        out = f(*given[0], **given[1])
        leaves, _ = _flatten(nnx, given)
        objects = [x for x in leaves if _is_object(nnx, x)]
        objects, out = nnx.to_tree((objects, out), ctxtag=tag)
        return _Results(out, jax.tree.map(lambda x: before.get(id(x), x), objects))

    with nnx.update_context(tag):
        leaves, tree = _flatten(nnx, (args, kwargs))
        where = [i for i, x in enumerate(leaves) if _is_object(nnx, x)]
        for i, x in zip(where, nnx.to_tree([leaves[i] for i in where], ctxtag=tag), strict=True):
            leaves[i] = x
        args, kwargs = jax.tree.unflatten(tree, leaves)
        arrays = jax.tree.leaves((args, kwargs), is_leaf=is_leaf)

        def whole(outs: _Results) -> _Results:
            def leaf(x: PyTree) -> PyTree:
                return arrays[x.index] if isinstance(x, _Kept) else x

            return _Results(outs.out, jax.tree.map(leaf, outs.objects))

        def finish(outs: _Results) -> PyTree:
            outs = whole(outs)
            results = (outs.objects, outs.out)
            return nnx.from_tree(results, ctxtag=tag, is_inner=False)[1]

        yield Call(pure, args, kwargs, whole, finish)


def has_objects(tree: PyTree) -> bool:
    """Returns whether a pytree holds a Flax NNX object (a module, a metric, random streams)."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and any(_is_object(nnx, x) for x in _flatten(nnx, tree)[0])


def with_state(f: Callable, args: Sequence[PyTree]) -> tuple[Callable, Sequence[PyTree]]:
    """Returns a function of a state, and its arguments, if the first of ``f`` are NNX objects.

    The state, a pytree of the objects' arrays, replaces them as the first argument; the function
    returns the state after the call and what ``f`` returns. Others are returned as they are.

    Raises:
        TypeError: another object stands behind other arguments.
    """
    count = next((i for i, x in enumerate(args) if not has_objects(x)), len(args))
    if has_objects(args[count:]):
        raise TypeError(
            "a Flax NNX object stands behind other arguments; expected all objects first, so that "
            "their updates can be carried from step to step"
        )
    if not count:
        return f, args
    nnx = sys.modules["flax.nnx"]
    structure, first = nnx.split(tuple(args[:count]))
    tree = jax.tree.structure(first)

    @functools.wraps(f, updated=())
    def pure(state: PyTree, *rest: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        objects = nnx.merge(structure, jax.tree.unflatten(tree, jax.tree.leaves(state)))
        out = f(*objects, *rest, **kwargs)
        return nnx.to_pure_dict(nnx.split(objects)[1]), out

    del pure.__wrapped__  # it has other arguments
    return pure, (nnx.to_pure_dict(first), *args[count:])


def owner_of(f: Callable) -> object:
    """Returns the object that a method is bound to, or a callable object; None for scalewise's."""
    while isinstance(f, functools.partial) or hasattr(f, "__wrapped__"):
        f = f.func if isinstance(f, functools.partial) else f.__wrapped__  # pyright: ignore
    owner = getattr(f, "__self__", f)
    own = type(owner).__module__.partition(".")[0] == __name__.partition(".")[0]
    return None if own else owner


def tracers_held(objects: Mapping[str, object]) -> tuple[dict[str, Tracer], Callable[[], None]]:
    """Returns the tracers among attributes of objects that aren't pytrees, by their paths.

    Also of those of their attributes, and of lists and dictionaries there. With a function that
    puts everything back as it is now.
    """
    found: dict[str, Tracer] = {}
    copies: list[tuple[Any, Any]] = []
    rest, seen = list(objects.items()), set()
    while rest:
        path, x = rest.pop()
        if isinstance(x, Tracer):
            found[path] = x
        elif isinstance(x, OPAQUE) or id(x) in seen:
            continue
        elif isinstance(x, dict):
            copies.append((x, dict(x)))
            rest += [(f"{path}[{key!r}]", value) for key, value in x.items()]
        elif isinstance(x, list | tuple | set | frozenset):
            copies.append((x, list(x)))
            rest += [(f"{path}[{i}]", value) for i, value in enumerate(x)]
        else:
            copies.append((x, _attributes(x)))
            rest += [(f"{path}.{name}", value) for name, value in copies[-1][1].items()]
        seen.add(id(x))

    def put_back() -> None:
        for x, copy in copies:
            if isinstance(x, list):
                x[:] = copy
            elif isinstance(x, dict | set):
                x.clear()
                x.update(copy)
            elif not isinstance(x, tuple | frozenset):
                now = _attributes(x)
                for name in now.keys() - copy.keys():
                    object.__delattr__(x, name)
                for name in (n for n in copy if now.get(n) is not copy[n]):
                    object.__setattr__(x, name, copy[name])

    return found, put_back


def _attributes(x: object) -> dict[str, Any]:
    slots = [s for kind in type(x).__mro__ for s in getattr(kind, "__slots__", ())]
    return {s: getattr(x, s) for s in slots if hasattr(x, s)} | getattr(x, "__dict__", {})


def _is_object(nnx: Any, x: object) -> bool:
    return isinstance(x, nnx.Pytree)


def _flatten(nnx: Any, tree: PyTree):
    """Flattens a pytree down to its objects; objects that are pytrees already count as leaves."""
    kinds = nnx.Pytree | nnx.NodeStates
    return jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, kinds))


def _unbound(nnx: Any, f: Callable, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]):
    while isinstance(f, functools.partial):
        f, args, kwargs = f.func, (*f.args, *args), {**f.keywords, **kwargs}
    if isinstance(f, MethodType) and _is_object(nnx, f.__self__):
        return f.__func__, (f.__self__, *args), kwargs
    if _is_object(nnx, f):
        return type(f).__call__, (f, *args), kwargs
    return f, args, kwargs


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class _Results:
    out: PyTree
    objects: PyTree

    def tree_flatten_with_keys(self):
        return ((_Key(""), self.out), (_Key("argument"), self.objects)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[PyTree, PyTree]):
        return cls(*children)


@dataclasses.dataclass(frozen=True)
class _Key:
    """A key of a pytree that ``jax.tree_util.keystr`` prints as this word."""

    word: str

    def __str__(self) -> str:
        return self.word


@dataclasses.dataclass(frozen=True)
class _Kept:
    index: int
