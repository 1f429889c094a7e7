"""``autoscale``: runs any JAX function on (data, scale) pairs, as a recipe says, or a schedule."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._check import Accepts, Count, Words, checked, is_array, shown
from .._decorator import Result, as_decorator
from .._jax import Tracer
from .._types import PyTree
from ..devices import MatrixUnitsLike
from ..interpret import pure_call, transform
from ..scaled import ScaledArray
from ._boundaries import Boundaries
from ._delayed import WithHistory
from ._every_op import EveryOp, Outputs
from ._history import OperandAmaxes
from ._narrow import has_exponent, is_stored
from ._operands import Operands
from ._overrides import FormatOverrides
from ._recipe import Recipe, RecipeLike
from ._setup import Setup
from .recipes import fp16
from .recipes import recipe as recipe_

Phases = Annotated[
    Mapping[int | float, RecipeLike] | tuple[tuple[int | float, RecipeLike], ...],
    Words("a dict from first steps to recipes, {0: 'bf16', 1000: 'fp8'}"),
]


@checked
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Recipes that follow each other: a warm-up in a wider one, BF16 for the last 10 % of steps.

    Attributes:
        phases: ``{first step: recipe or name}``, or pairs; the first at step 0. A float is a
            fraction of ``steps``, rounded up to a step. The last phase has no end.
        steps: how many steps the run has; for fractions, and to check that every phase begins.

    Raises:
        TypeError, ValueError: no phases, no step 0, steps that don't increase, a fraction without
            ``steps``, a phase that begins after the last step, a recipe with delayed scaling, or
            recipes that store different parts of the state.

    Example:
        >>> import scalewise as sw
        >>> schedule = sw.Schedule({0: "bf16", 100: "nvfp4", 0.9: "bf16"}, steps=2000)
        >>> schedule.starts, schedule.recipe(1799) == sw.recipes.nvfp4
        ((0, 100, 1800), True)
    """

    phases: Annotated[tuple[tuple[int, Recipe], ...], Accepts(Phases)]
    steps: Count | None = None

    def __post_init__(self):
        given: Any = self.phases
        given = given.items() if isinstance(given, Mapping) else given
        phases = tuple((self._step(start), recipe_(r)) for start, r in given)
        object.__setattr__(self, "phases", phases)
        if not phases or phases[0][0] != 0:
            raise ValueError(f"Schedule.phases begin at {self.starts[:1]}; expected step 0")
        for (start, _), (after, _) in itertools.pairwise(phases):
            if after <= start:
                raise ValueError(
                    f"Schedule.phases begin at the steps {', '.join(map(str, self.starts))}; "
                    "expected increasing ones"
                )
            if self.steps is not None and after >= self.steps:
                raise ValueError(
                    f"Schedule: the phase that begins at step {start} never ends: the next begins "
                    f"at step {after}, and the run has {self.steps} steps"
                )
        for _, recipe in phases:
            if recipe.is_delayed:
                raise ValueError(
                    "Schedule: delayed scaling needs the history of every step; use it without a "
                    "schedule, or fp8_current here"
                )
            if recipe.state != phases[0][1].state:
                raise ValueError(
                    "Schedule: the recipes store different parts of the state, whose type would "
                    "change within a run; give all of them the same Recipe.state"
                )

    @property
    def starts(self) -> tuple[int, ...]:
        """The first step of each phase."""
        return tuple(start for start, _ in self.phases)

    def recipe(self, step: int) -> Recipe:
        """Returns the recipe of a step."""
        if step < 0:
            raise ValueError(f"Schedule.recipe: step is {step}; expected 0, 1, ...")
        return next(recipe for start, recipe in reversed(self.phases) if start <= step)

    def apply(self, transform: Callable[[Recipe], Callable]) -> Callable:
        """Returns a function ``(step, *args)`` that calls ``transform(recipe)`` of the step.

        A traced step compiles the programs of all phases; a Python integer only its own.
        """
        functions = [transform(recipe) for _, recipe in self.phases]

        def scheduled(step: int | jax.Array, *args: PyTree, **kwargs: PyTree) -> PyTree:
            number = is_array(step) and not np.ndim(step)
            if not number or not jnp.issubdtype(jnp.result_type(step), jnp.integer):
                raise TypeError(
                    "autoscale: with a Schedule the first argument is the step, an integer, not "
                    f"{shown(step)}"
                )
            if not isinstance(step, Tracer):
                self.recipe(int(step))  # fails for a step before the first
                return functions[bisect.bisect(self.starts, int(step)) - 1](*args, **kwargs)
            starts = np.asarray(self.starts, np.int32)
            phase = jnp.sum(step.astype(jnp.int32) >= starts, dtype=jnp.int32) - 1
            now = functions[0]
            with pure_call(lambda *args, **kwargs: now(*args, **kwargs), args, kwargs) as call:

                def branch(f: Callable) -> PyTree:
                    nonlocal now
                    now = f
                    return call.whole(call.f(*call.args, **call.kwargs))

                branches = [functools.partial(branch, f) for f in functions]
                return call.finish(lax.switch(phase, branches))

        return scheduled

    def _step(self, start: object) -> int:
        if isinstance(start, int | np.integer) and not isinstance(start, bool):
            return int(start)
        if not isinstance(start, float) or not 0 <= start < 1:
            raise ValueError(
                f"Schedule: a phase begins at {start!r}; expected a step, or a fraction of the "
                "steps from 0.0 to below 1.0"
            )
        if self.steps is None:
            raise ValueError(
                f"Schedule: a phase begins at the fraction {start}; expected steps, the number of "
                "steps of the run"
            )
        return int(np.ceil(round(start * self.steps, 6)))


@as_decorator
@checked
def autoscale(
    f: Callable[..., Result],
    recipe: RecipeLike | Schedule = fp16,
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
        recipe: a :class:`Recipe`, or the name of one (``"fp16"``, ``"bf16"``, ``"fp8"``); or a
            :class:`Schedule` of them, for a function that takes the step, an integer, before
            ``f``'s arguments.
        keyed: True for a function that takes a JAX random key before ``f``'s arguments (behind the
            step), for recipes that round stochastically or draw signs (``"nvfp4"``). Each operand's
            key is folded from it, from the operand's place in the program and from its bits, so
            that steps and iterations differ. False takes the key of seed 0 in place of that key:
            equal arguments then give equal results. Save the key with a training state, and split
            it each step, for a run that other seeds repeat and that continues where it stopped.
        emulate: in place of ``Recipe.emulate``: the device whose matrix units' arithmetic products
            have on every platform, bit for bit: ``"h100"``.

    Returns:
        The transformed function. It composes with ``jit``, ``vmap`` and derivatives of every
        mode and order. Float outputs have ``f``'s own dtypes, with two exceptions.
        Outputs that ``recipe.state`` names are ScaledArrays (or SqrtStored). If an argument is a
        ScaledArray with one exponent, outputs are ScaledArrays whose exponents follow it, and whose
        largest magnitudes of data are from 1 to 2. With ``Recipe.results`` (``"scalify"``) and
        no ``state``, any ScaledArray among the arguments makes all outputs ScaledArrays: narrow
        data near 1, and scales that were propagated or found.
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

        As a decorator:

        >>> @sw.autoscale(recipe="fp8")
        ... def scaled_loss(w, x):
        ...     return jnp.mean(jnp.square(x @ w))
    """
    if isinstance(recipe, Schedule):
        if emulate is not None:
            raise ValueError("autoscale: emulate is for one recipe; set it in each of a schedule")
        scheduled = recipe.apply(functools.partial(_in_phase, f, keyed))
        return _behind(["step", "key"] if keyed else ["step"], f, functools.wraps(f)(scheduled))
    recipe = recipe_(recipe)
    if emulate is not None:
        recipe = dataclasses.replace(recipe, emulate=emulate)
    if keyed and not recipe.products.is_random:
        raise ValueError("autoscale: keyed is True, but this recipe draws no random numbers")
    if recipe.is_delayed:
        return WithHistory(f, recipe)

    @functools.wraps(f)
    def scaled(*args, **kwargs):
        key = None
        if keyed:
            key, *args = _with_key(args)
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_stored)
        traced = any(has_exponent(x) for x in leaves)
        outputs = _outputs(recipe, leaves, traced)
        chosen = interpretation(recipe, traced=traced, key=key, outputs=outputs)
        outs = transform(f, chosen, name="autoscale")(*args, **kwargs)
        chosen.overrides.check("autoscale")
        return outs

    return _behind(["key"], f, scaled) if keyed else scaled


def _behind(names: Sequence[str], f: Callable, scaled: Callable) -> Callable:
    """Returns ``scaled`` with the signature of ``f`` behind arguments of these names.

    ``jax.jit`` reads it to find static and donated arguments.
    """
    vars(scaled).pop("__wrapped__", None)  # it has other arguments
    with suppress(TypeError, ValueError):  # of some callables Python knows no signature
        own = inspect.signature(f)
        names = [f"{name}_" if name in own.parameters else name for name in names]
        first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
        own = own.replace(parameters=[*first, *own.parameters.values()])
        vars(scaled)["__signature__"] = own
    return scaled


def _outputs(recipe: Recipe, leaves: list[object], traced: bool) -> Outputs:
    scaled = any(isinstance(x, ScaledArray) for x in leaves)
    if recipe.results is None or recipe.state or not scaled:
        return "arrays"
    return "exponents" if traced else "scales"


def _in_phase(f: Callable, keyed: bool, recipe: Recipe) -> Callable:
    if not keyed or recipe.products.is_random:
        return autoscale(f, recipe, keyed=keyed)
    plain = autoscale(f, recipe)
    return lambda *args, **kwargs: plain(*_with_key(args)[1:], **kwargs)


def _with_key(args: tuple) -> tuple:
    kind = getattr(args[0], "dtype", None) if args else None
    if kind is None or not (jnp.issubdtype(kind, jax.dtypes.prng_key) or kind == np.uint32):
        raise TypeError(
            "autoscale: with keyed=True the first argument is a JAX random key (jax.random.key(0))"
            + (f", not {type(args[0]).__name__}" if args else "")
        )
    return args


def interpretation(
    recipe: Recipe,
    *,
    traced: bool = False,
    key: jax.Array | None = None,
    outputs: Outputs = "arrays",
    amaxes: OperandAmaxes | None = None,
    overrides: FormatOverrides | None = None,
    record: Callable[..., None] | None = None,
) -> Boundaries | EveryOp:
    """Returns the interpretation that :func:`autoscale` applies to a function.

    Args:
        recipe: with ``results`` or without.
        traced: whether an argument has an integer exponent of its own.
        key: for recipes that draw random numbers; None for the key of seed 0.
        amaxes: for delayed scaling: those of earlier steps, and a record of this one's.
        overrides: of the recipe; None for new ones.
        record: called with each decision on a format.
        outputs: with ``Recipe.results``: plain arrays, or ScaledArrays with scales or exponents.
    """
    overrides = FormatOverrides(recipe.keep) if overrides is None else overrides
    if recipe.results is None:
        setup = Setup(recipe, traced, overrides, record)
        return Boundaries(Operands(setup, key, amaxes))
    return EveryOp(recipe, outputs=outputs, overrides=overrides, record=record)
