"""``autoscale``: runs any JAX function on (data, scale) pairs, as a recipe says.

Current scaling reads an operand twice, to find the scale and to round. Delayed scaling reads it
once: a step rounds with the scale that it was given, and records the magnitudes for the next step
in an :class:`AmaxHistory`, explicit state that goes into a step and comes out of it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MethodType
from typing import Generic, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from .._check import checked
from .._decorator import Params, Result
from ..devices import MatrixUnitsLike
from ..interpret import is_float, mark, pure_call, run, trace, transform
from ..scaled import Amax, Delayed, is_stored
from ..scalifying import Scalify, scalified
from ._boundaries import Boundaries, interpretation
from ._history import AmaxHistory, OperandAmaxes, foreign_history
from ._recipe import Recipe, RecipeLike
from .recipes import fp16
from .recipes import recipe as recipe_

NAME = "autoscale"


@overload
def autoscale(
    f: Callable[Params, Result],
    recipe: Literal["fp8_delayed"],
    *,
    emulate: MatrixUnitsLike | None = None,
) -> WithHistory[Params, Result]: ...


@overload
def autoscale(
    f: Callable[Params, Result],
    recipe: RecipeLike = fp16,
    *,
    keyed: Literal[False] = False,
    emulate: MatrixUnitsLike | None = None,
) -> Callable[Params, Result]: ...


@overload  # a key comes before the function's own arguments
def autoscale(
    f: Callable[..., Result],
    recipe: RecipeLike = fp16,
    *,
    keyed: bool = False,
    emulate: MatrixUnitsLike | None = None,
) -> Callable[..., Result]: ...


@checked
def autoscale(
    f: Callable[..., Result],
    recipe: RecipeLike = fp16,
    *,
    keyed: bool = False,
    emulate: MatrixUnitsLike | None = None,
) -> Callable[..., Result]:
    """Returns a function of the same signature that computes with narrow formats.

    Wrap the whole training step, with forward pass, backward pass and optimizer. Values in flight
    keep a wide dtype (``Recipe.flight``). Stored values (operands of contractions, values that the
    backward pass reads, the parts of the state that the recipe names) are rounded to their narrow
    format with a power-of-two scale found from the tensor itself, so that nothing overflows or
    saturates.

    Args:
        f: any function of pytrees made of JAX primitives. Float leaves of arguments may be plain
            arrays of any float dtype or ScaledArrays; leaves that aren't arrays are passed on.
        recipe: a :class:`Recipe`, or the name of one (``"fp16"``, ``"bf16"``, ``"fp8"``).
        keyed: True for a function that takes a JAX random key before ``f``'s arguments, for
            recipes that round stochastically or draw signs (``"nvfp4"``). Each operand's
            key is folded from it, from the operand's place in the program and from its bits, so
            that steps and iterations differ. False takes the key of seed 0: equal arguments
            then give equal results. Save the key with a training state, and split it each step:
            then a run can be repeated with other seeds, and continues where it stopped.
        emulate: in place of ``Recipe.emulate``: the device whose matrix units' arithmetic products
            have on every platform, bit for bit: ``"h100"``.

    Returns:
        The transformed function. It composes with ``jit``, ``vmap`` and derivatives of every
        mode and order. Float outputs have ``f``'s own dtypes, but outputs that
        ``recipe.state`` names are ScaledArrays (or SqrtStored). Settings of :func:`scalify` return
        what that function does.
        With delayed scaling (``recipes.fp8_delayed``) it is a :class:`WithHistory`, whose ``init``
        and ``step`` take the history as an argument.

    Raises:
        TypeError: ``f`` isn't callable, or returns an object that hides arrays (no pytree);
            ``recipe`` isn't a recipe.
        ValueError: no recipe has that name.

    Example:
        >>> import jax, jax.numpy as jnp, scalewise as sw
        >>> def loss(w, x):
        ...     return jnp.mean(jnp.square(x @ w))
        >>> w, x = jnp.full((4, 4), 256.0), jnp.full((8, 4), 1e3)
        >>> float(loss(w.astype(jnp.float16), x.astype(jnp.float16)))
        inf
        >>> float(sw.autoscale(loss, sw.recipes.fp16)(w, x))
        1048576000000.0
    """
    warn_of_second(f, NAME, stacklevel=4)
    scaled = _autoscaled(f, recipe, keyed, emulate)
    vars(scaled)["_is_autoscaled"] = True
    return scaled


def warn_of_second(f: Callable, name: str, stacklevel: int) -> None:
    """Warns if a function that is to be run under a recipe is a result of ``autoscale``."""
    if getattr(f, "_is_autoscaled", False):
        warnings.warn(
            f"{name}: {getattr(f, '__name__', f)} is a result of autoscale already, so that its "
            "products are rounded twice; pass the function itself",
            stacklevel=stacklevel,
        )


def _autoscaled(
    f: Callable, recipe: RecipeLike, keyed: bool, emulate: MatrixUnitsLike | None
) -> Callable:
    recipe = recipe_(recipe)
    if keyed and not recipe.is_random:
        raise ValueError("autoscale: keyed is True, but this recipe draws no random numbers")
    if isinstance(recipe, Scalify):
        if emulate is not None:
            raise ValueError(f"autoscale: emulate is for recipes of products, not for {recipe}")
        return scalified(f, recipe, "autoscale")
    if emulate is not None:
        recipe = dataclasses.replace(recipe, emulate=emulate)
    if recipe.is_delayed:
        return WithHistory(f, recipe)

    @functools.wraps(f)
    def scaled(*args, **kwargs):
        key = None
        if keyed:
            key, *args = _with_key(args)
        chosen = interpretation(recipe, key=key)
        outs = transform(f, chosen, name="autoscale")(*args, **kwargs)
        chosen.overrides.check("autoscale")
        return outs

    if keyed:
        return _behind_key(f, scaled)
    mark(scaled, f, interpretation(recipe))
    return scaled


def _behind_key(f: Callable, scaled: Callable) -> Callable:
    """Returns ``scaled`` with the signature of ``f`` behind a key.

    ``jax.jit`` reads it to find static and donated arguments.
    """
    vars(scaled).pop("__wrapped__", None)  # it has other arguments
    with suppress(TypeError, ValueError):  # of some callables Python knows no signature
        own = inspect.signature(f)
        name = "key_" if "key" in own.parameters else "key"
        first = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
        own = own.replace(parameters=[first, *own.parameters.values()])
        vars(scaled)["__signature__"] = own
    return scaled


def _with_key(args: tuple) -> tuple:
    kind = getattr(args[0], "dtype", None) if args else None
    if kind is None or not (jnp.issubdtype(kind, jax.dtypes.prng_key) or kind == np.uint32):
        raise TypeError(
            "autoscale: with keyed=True the first argument is a JAX random key (jax.random.key(0))"
            + (f", not {type(args[0]).__name__}" if args else "")
        )
    return args


# -- delayed scaling -------------------------------------------------------------------------------


class WithHistory(Generic[Params, Result]):
    """A function under a recipe with delayed scaling; the result of ``autoscale``.

    Called like the function itself it uses no history: each array determines its own scale.
    ``init`` and ``step`` use one, and are pure functions, to be jitted, saved and restored like any
    others:

        scaled = sw.autoscale(train_step, "fp8_delayed")
        history = scaled.init(params, batch)
        (params, loss), history = jax.jit(scaled.step)(history, params, batch)

    A step can't be differentiated from outside: wrap the training step, gradient and all.
    """

    def __init__(self, f: Callable[Params, Result], recipe: Recipe):
        scaling = recipe.products.scaling
        assert isinstance(scaling, Delayed)
        self.recipe = recipe
        self.steps = scaling.history
        self.current = recipe.with_operands(scaling=Amax(scaling.power_of_two))
        self.f = f
        functools.update_wrapper(self, f, updated=())  # leaves a callable object's attributes alone
        mark(self, f, Boundaries.of(self.current))

    def __get__(self, instance: object, owner: type | None = None) -> WithHistory:
        """Returns the method of an instance, for a function that is a class's attribute."""
        return self if instance is None else WithHistory(MethodType(self.f, instance), self.recipe)

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        return _autoscaled(self.f, self.current, False, None)(*args, **kwargs)

    def init(self, *args: Params.args, **kwargs: Params.kwargs) -> AmaxHistory:
        """Returns the history after one step on these arguments; the step's outputs are dropped."""
        program, boundaries = self._program(self.f, args, kwargs, as_jit=True)
        operand_ids: dict[str, jax.Array] = {}
        counting = boundaries.with_amaxes(OperandAmaxes(newest=operand_ids))
        jax.eval_shape(lambda arrays: run(program, counting, (), arrays)[0], program.arrays)
        state = dict.fromkeys(operand_ids, jnp.float32(0))
        # under jit: outside of it, JAX can't place a loop's counter on a mesh with explicit axes
        newest = jax.jit(lambda arrays: run(program, boundaries, state, arrays)[0])(program.arrays)
        empty = AmaxHistory(
            jnp.zeros((len(operand_ids), self.steps), jnp.float32), tuple(sorted(operand_ids))
        )
        return empty.after(_column(empty.operand_ids, newest))

    def step(
        self, history: AmaxHistory, *args: Params.args, **kwargs: Params.kwargs
    ) -> tuple[Result, AmaxHistory]:
        """Returns the function's outputs, and the history for the next call.

        Raises:
            TypeError, ValueError: as :meth:`observe`.
        """
        outs, newest = self.observe(history, *args, **kwargs)
        return outs, history.after(newest)

    def observe(
        self, history: AmaxHistory, *args: Params.args, **kwargs: Params.kwargs
    ) -> tuple[Result, jax.Array]:
        """Returns the function's outputs, and each operand's largest magnitude in this call.

        For a step that consists of several calls, on microbatches or devices, which all round with
        one history: pass the largest of their magnitudes to ``history.after``.

        Raises:
            TypeError: ``history`` isn't an :class:`AmaxHistory`, or the call is differentiated.
            ValueError: the history was made for another program.
        """
        if not isinstance(history, AmaxHistory):
            raise TypeError(
                f"{NAME}: step(history, ...) takes the AmaxHistory that init made, "
                f"not a {type(history).__name__}"
            )
        with pure_call(self.f, args, kwargs, is_stored) as call:
            program, boundaries = self._program(call.f, call.args, call.kwargs)
            arrays = _undifferentiated(list(program.arrays))
            earlier = dict(zip(history.operand_ids, jnp.max(history.amaxes, axis=1), strict=True))
            amaxes = OperandAmaxes(earlier)
            here = boundaries.with_amaxes(amaxes)
            state = dict.fromkeys(history.operand_ids, jnp.zeros((), jnp.float32))
            newest, values = run(program, here, state, arrays)
            boundaries.overrides.check(NAME)
            others = sorted(set(history.operand_ids) - amaxes.seen)
            if others:
                raise foreign_history(f"has an operand {others[0]}, which this program has not")
            outs = [
                here.emit(v, a, path) if is_float(a) else v
                for v, a, path in zip(values, program.out_avals, program.paths, strict=True)
            ]
            return call.finish(program.outputs(outs)), _column(history.operand_ids, newest)

    def _program(self, f: Callable, args, kwargs, as_jit: bool = False):
        boundaries = Boundaries.of(self.recipe).with_amaxes(OperandAmaxes())
        return trace(f, boundaries, args, kwargs, name=NAME, as_jit=as_jit), boundaries


def _column(operand_ids: Sequence[str], newest: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.stack([newest[s] for s in operand_ids]) if operand_ids else jnp.zeros(0)


@jax.custom_jvp
def _undifferentiated(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays


@_undifferentiated.defjvp
def _(primals, tangents):
    raise TypeError(
        f"{NAME}: step(history, ...) can't be differentiated from outside; wrap the training step, "
        "gradient and all"
    )
