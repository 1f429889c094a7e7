"""Functions traced once, to be run under interpretations that may thread a state."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .. import _jax
from .._jax import Jaxpr, ShapedArray, Tracer, jex
from .._types import PyTree, TreeDef
from ._equation import CALLBACKS, all_equations
from ._interpret import Argument, Body, Interpretation, State, body_of, interpret_body
from ._objects import Call, owner_of, pure_call, tracers_held
from ._wide import Value, is_float, with_items

PLAIN_KEYS = jax.tree_util.DictKey | jax.tree_util.SequenceKey


@dataclasses.dataclass(frozen=True)
class Program:
    """A function's jaxpr, with the arguments that it was traced for.

    Attributes:
        jaxpr: closed.
        arrays: the array leaves of the arguments, in the order of the jaxpr's inputs.
        arguments: the path of each (as ``jax.tree_util.keystr`` prints it).
        paths: the path of each output that is an array.
        out_tree: the structure of the outputs.
        static: the outputs that aren't arrays, by their index among all outputs.
        references: the mutable arrays that the function changes; their new values are the last
            arrays that the jaxpr returns.
    """

    jaxpr: Jaxpr
    arrays: Sequence[Argument]
    arguments: Sequence[str]
    paths: Sequence[str]
    out_tree: TreeDef
    static: Mapping[int, object] = dataclasses.field(default_factory=dict)
    references: Sequence[jax.Ref] = ()

    def outputs(self, arrays: Sequence[Argument]) -> PyTree:
        """Returns the function's result, with these arrays in it; updates the mutable arrays.

        JAX stores no differentiated value in a mutable array that isn't differentiated itself.
        """
        last = len(arrays) - len(self.references)
        for reference, array in zip(self.references, arrays[last:], strict=True):
            reference[...] = lax.stop_gradient(jnp.asarray(array, reference.dtype))
        rest = iter(arrays[:last])
        count = self.out_tree.num_leaves
        leaves = [self.static[i] if i in self.static else next(rest) for i in range(count)]
        return jax.tree.unflatten(self.out_tree, leaves)

    @property
    def in_avals(self) -> list[ShapedArray]:
        return _jax.avals_of(_jax.open_jaxpr(self.jaxpr)[0].invars)

    @property
    def out_avals(self) -> list[ShapedArray]:
        return _jax.avals_of(_jax.open_jaxpr(self.jaxpr)[0].outvars)

    @cached_property
    def body(self) -> Body:
        """The program's body, whose inner bodies are cached."""
        return body_of(_jax.open_jaxpr(self.jaxpr)[0], keep=True)

    @cached_property
    def equations(self) -> int:
        """The number of equations, those of nested bodies, calls and operations included."""
        return sum(1 for _ in all_equations(self.jaxpr, operations=True))

    @cached_property
    def results(self) -> int:
        """The number of results of all these equations."""
        return sum(len(e.outvars) for e in all_equations(self.jaxpr, operations=True))

    @property
    def calls_back(self) -> bool:
        """Whether the program calls functions on the host."""
        return any(e.primitive.name in CALLBACKS for e in all_equations(self.jaxpr))


def trace(
    f: Callable,
    interpretation: Interpretation,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    *,
    name: str,
    as_jit: bool = False,
) -> Program:
    """Traces ``f`` for its arguments; ``name`` is the transformation's, for error messages.

    Leaves that aren't arrays are passed on as they are, and so are outputs that aren't arrays: a
    Python number stays one. If ``f`` fails on the Python numbers among its arguments, it is
    traced again with arrays in their place, as ``jax.jit`` does, since code that only ever runs
    under ``jit`` may divide by a step number 0. With ``as_jit``, numbers within containers (a
    state's step) are arrays first, and numbers only if ``f`` fails on arrays.

    Raises:
        TypeError: ``f`` returns an object that isn't an array but holds some.
    """
    with pure_call(f, args, kwargs) as call:
        return _trace(call, interpretation, name, as_jit)


def _trace(call: Call, interpretation: Interpretation, name: str, as_jit: bool) -> Program:
    where, tree = jax.tree_util.tree_flatten_with_path(
        (tuple(call.args), dict(call.kwargs)), is_leaf=interpretation.is_argument
    )
    leaves = [leaf for _, leaf in where]
    arrays = [
        i
        for i, x in enumerate(leaves)
        if is_array(x) or _jax.is_reference(x) or interpretation.is_argument(x)
    ]
    numbers = [i for i, leaf in enumerate(leaves) if _is_number(leaf)]
    within = [i for i in numbers if len(where[i][0]) > 2]
    ways = [within, []] if as_jit and within else [[], numbers] if numbers else [[]]
    first: Exception | None = None
    for way in ways:
        try:
            return _traced(call.f, interpretation, where, tree, sorted([*arrays, *way]), name)
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def _traced(
    f: Callable,
    interpretation: Interpretation,
    where: Sequence[tuple[jax.tree_util.KeyPath, PyTree]],
    tree: TreeDef,
    traced: Sequence[int],
    name: str,
) -> Program:
    skeleton = with_items([leaf for _, leaf in where], traced, [None] * len(traced))
    found: list[tuple[TreeDef, dict[int, object], list[str]]] = []
    others = [where[i] for i in sorted(set(range(len(where))) - set(traced))]
    objects = {f"argument {_argument(path)}": leaf for path, leaf in others}
    objects["own object"] = owner_of(f)

    def flat(*arrays):
        a, k = jax.tree.unflatten(tree, with_items(skeleton, traced, arrays))
        before, (held, put_back) = jax.tree.leaves((a, k)), tracers_held(objects)
        outs, out_tree = jax.tree_util.tree_flatten_with_path(f(*a, **k))
        check_updates((a, k), [*before, *(leaf for _, leaf in outs)], f, name)
        for path, tracer in tracers_held(objects)[0].items():
            if tracer is not held.get(path):
                put_back()
                raise _lost_update(f, name, path)
        static = {i: leaf for i, (_, leaf) in enumerate(outs) if not is_array(leaf)}
        for i, leaf in static.items():
            _check_static(leaf, outs[i][0], f, name)
        paths = [jax.tree_util.keystr(p) for p, leaf in outs if is_array(leaf)]
        found[:] = [(out_tree, static, paths)]
        return [jnp.asarray(leaf) for _, leaf in outs if is_array(leaf)]

    arrays = [jnp.asarray(x) if _is_number(x) else x for x in (where[i][1] for i in traced)]
    jaxpr = jax.make_jaxpr(flat)(*[interpretation.abstract(x) for x in arrays])
    ((out_tree, static, paths),) = found
    arguments = [_argument(where[i][0]) for i in traced]
    return _without_references(Program(jaxpr, arrays, arguments, paths, out_tree, static))


def _without_references(program: Program) -> Program:
    closed, held, changed = _jax.without_references(program.jaxpr)
    arrays = [*program.arrays, *held]
    arguments = [*program.arguments, *("a closed-over mutable array" for _ in held)]
    body, consts = _jax.open_jaxpr(closed)
    n = len(body.outvars) - len(changed)
    last = list(zip(body.outvars[n:], changed, strict=True))
    last = [(v, i) for v, i in last if v is not body.invars[i]]
    if changed:
        body = body.replace(
            outvars=[*body.outvars[:n], *(v for v, _ in last)],
            debug_info=body.debug_info.with_unknown_names(),
        )
        closed = jex.ClosedJaxpr(body, consts)
    return dataclasses.replace(
        program,
        jaxpr=closed,
        arrays=[x[...] if _jax.is_reference(x) else x for x in arrays],
        arguments=arguments,
        paths=[*program.paths, *(f"argument{arguments[i]}" for _, i in last)],
        references=[arrays[i] for _, i in last],
    )


def run(
    program: Program,
    interpretation: Interpretation,
    state: State,
    arrays: Sequence[Argument] | None = None,
    *,
    values: Sequence[Value] | None = None,
) -> tuple[State, list[Value]]:
    """Runs a program under an interpretation with a state, without a custom derivative.

    Args:
        program: made by :func:`trace`.
        interpretation: its rules read and write the state.
        state: a pytree of fixed shape.
        arrays: other arguments of the same types; None for those that the program was traced for.
        values: instead of ``arrays``, the interpretation's own values of all arguments.

    Returns:
        The state after the last equation, and the interpretation's value of each output.

    Example:
        >>> import jax.numpy as jnp
        >>> class Count(Interpretation):
        ...     def apply(self, state, equation, inputs):
        ...         return state + 1, equation.bind(*inputs)
        >>> def f(x):
        ...     return jax.lax.fori_loop(0, 5, lambda i, c: jnp.sin(c) * 2, x)
        >>> count = Count()
        >>> program = trace(f, count, (1.0 * jnp.ones(()),), {}, name="count")
        >>> int(run(program, count, 0)[0])
        10
    """
    with interpretation.context():
        if values is None:
            arrays = program.arrays if arrays is None else arrays
            values = lifted(program, interpretation, arrays)
        consts = _jax.open_jaxpr(program.jaxpr)[1]
        return interpret_body(interpretation, program.body, consts, state, values)


def lifted(
    program: Program, interpretation: Interpretation, arrays: Sequence[Argument]
) -> list[Value]:
    """Returns the interpretation's values of a program's arguments."""
    with interpretation.context():
        return [
            interpretation.lift(x if is_float(a) else _as_traced(x, a), a)
            if interpretation.lifts(a)
            else _as_traced(x, a)
            for x, a in zip(arrays, program.in_avals, strict=True)
        ]


def _as_traced(x: ArrayLike, aval: ShapedArray) -> jax.Array | np.ndarray:
    return x if isinstance(x, jax.Array) else np.asarray(x).astype(aval.dtype)


def check_callable(f: Any, name: str) -> None:
    """Raises TypeError, with the transformation's name, if ``f`` isn't callable.

    Modules of Linen and Haiku's pairs of functions aren't: their ``apply`` is.
    """
    linen = sys.modules.get("flax.linen")
    unbound = linen is not None and isinstance(f, linen.Module) and f.scope is None
    if not callable(f) or unbound:
        hint = "; pass its method apply, and the parameters as the first argument"
        hint = hint if callable(getattr(f, "apply", None)) else ""
        raise TypeError(f"{name}(f, ...) takes a function, not {_describe(f)}{hint}")


def _argument(path: jax.tree_util.KeyPath) -> str:
    """Returns a leaf's path: ``[0]['w']`` for positional and ``['name']`` for keyword arguments."""
    return jax.tree_util.keystr(tuple(path[1:]))


def is_array(leaf: object) -> bool:
    """Returns whether a leaf is an array that JAX can hold: one of text or of objects is not."""
    if not isinstance(leaf, np.ndarray | np.generic):
        return isinstance(leaf, jax.Array)
    return leaf.dtype.kind not in "OSUMm" and leaf.dtype.names is None


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)


def check_updates(arguments: PyTree, known: Sequence[object], f: Callable, name: str) -> None:
    """Raises TypeError if a function puts arrays into an object of its arguments, unreturned.

    The function gets copies, as under ``jax.jit``, so that the caller's objects stay unchanged.
    Dictionaries and lists don't count, since functions use them for arrays of their own. The
    leaves of the copies before the call, and of the function's result, are ``known``.
    """
    ids = set(map(id, known))
    leaves, again = jax.tree_util.tree_leaves_with_path(arguments), jax.tree.leaves(arguments)
    for (path, leaf), same in zip(leaves, again, strict=True):
        own = all(isinstance(key, PLAIN_KEYS) for key in path)
        # another one each time is made by the node's flattening: a ScaledArray's scale, with axes
        made = leaf is not same
        if own or made or not isinstance(leaf, Tracer) or id(leaf) in ids:
            continue
        raise _lost_update(f, name, f"argument {_argument(path)}")


def _lost_update(f: Callable, name: str, what: str) -> TypeError:
    return TypeError(
        f"{name}: {getattr(f, '__name__', f)} updates its {what} in place and doesn't return it, "
        "so that the update would be lost, as under jax.jit. Return the updated object. (Flax NNX "
        "objects and mutable arrays, jax.new_ref, are updated.)"
    )


def _check_static(leaf: object, path: jax.tree_util.KeyPath, f: Callable, name: str) -> None:
    if _jax.is_reference(leaf):
        raise TypeError(
            f"{name}: output{jax.tree_util.keystr(tuple(path))} of {getattr(f, '__name__', f)} is "
            "a mutable array; return its value, x[...]"
        )
    if isinstance(leaf, Iterator | Awaitable):
        raise TypeError(
            f"{name}: output{jax.tree_util.keystr(tuple(path))} of {getattr(f, '__name__', f)} is "
            f"{_describe(leaf)}; it would compute after the function has returned: a function "
            "under a transformation returns arrays in pytrees"
        )
    inner = [getattr(leaf, "__dict__", None)]
    inner += [cell.cell_contents for cell in getattr(leaf, "__closure__", None) or ()]
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(inner)):
        raise TypeError(
            f"{name}: output{jax.tree_util.keystr(tuple(path))} of {getattr(f, '__name__', f)} is "
            f"{_describe(leaf)}; it holds arrays, but it is no pytree: a function under a "
            "transformation returns arrays in pytrees"
        )


def _describe(x: object) -> str:
    text = " ".join(repr(x).split())
    return f"a {type(x).__name__}: {text if len(text) < 60 else text[:57] + '...'}"
