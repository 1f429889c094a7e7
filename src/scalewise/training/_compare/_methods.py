"""The rows of a comparison: what each method does to the state and to the step."""

import dataclasses
import difflib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...autoscale import Recipe, Storage, autoscale, recipes, store
from ...formats import E4M3FN, FP16
from ._input import InputError
from ._program import Step, Tree


def same(x: Any) -> Any:
    """x."""
    return x


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to run a training step.

    Attributes:
        name: what the user calls it.
        prepare: the float32 initial state to the one that this method trains.
        transform: the user's step to this method's step.
        what: half a line for the report.
    """

    name: str
    prepare: Callable[[Tree], Tree] = same
    transform: Callable[[Step], Step] = same
    what: str = ""


def cast_floats(tree: Tree, dtype: Any) -> Tree:
    """Every float leaf in `dtype`; all others as they are."""

    def leaf(x):
        is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return jnp.asarray(x).astype(dtype) if is_float else x

    return jax.tree.map(leaf, tree)


def plain(name: str, dtype: Any, what: str) -> Method:
    """Everything in one dtype, as a cast of state and batch makes it."""

    def transform(step: Step) -> Step:
        return lambda state, batch: step(state, cast_floats(batch, dtype))

    return Method(name, lambda state: cast_floats(state, dtype), transform, what)


def scaled(name: str, recipe: Recipe, what: str) -> Method:
    """`autoscale` of the whole step; what the recipe stores narrow is so from the start."""
    # store's paths start at the state, the step's at (state, loss): `search` serves both
    return Method(
        name, lambda state: store(state, recipe), lambda step: autoscale(step, recipe), what
    )


NARROW_STATE = (  # but for biases and a norm's gains, half a percent of the example's parameters
    (re.escape("['params']"), Storage(FP16, smallest=2048)),
    (r"\.mu\b", Storage(E4M3FN, smallest=2048)),
    (r"\.nu\b", Storage(FP16, root=2, smallest=2048)),
)

METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method("float32", what="the program as it is"),
        plain("fp16-plain", jnp.float16, "all of it cast to FP16, nothing else done"),
        scaled("fp16", recipes.fp16, "autoscale, FP16 operands"),
        scaled("fp8", recipes.fp8, "autoscale, E4M3 forward, E5M2 backward"),
        scaled(
            "fp8-narrow-state",
            dataclasses.replace(recipes.fp8, state=NARROW_STATE),
            "fp8; FP16 weights, E4M3 first and FP16 root of second moment",
        ),
    )
}


def method(name: str | Method) -> Method:
    """The method of that name, or the method itself.

    Raises:
        InputError: no method has that name; says which there are, and which was meant.

    Example:
        >>> method("fp61")
        Traceback (most recent call last):
        ...
        scalewise...InputError: unknown recipe 'fp61': accepted are float32, fp16-plain, fp16, fp8,
        fp8-narrow-state; did you mean 'fp16'?
    """
    if isinstance(name, Method):
        return name
    if name in METHODS:
        return METHODS[name]
    close = difflib.get_close_matches(str(name).lower(), METHODS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise InputError(f"unknown recipe {name!r}: accepted are {', '.join(METHODS)}{hint}")
