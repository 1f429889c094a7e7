"""The interpretation behind ``store="boundaries"``: float32 in flight, narrow where stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import BlockFormat, Format
from ..interpret import Boundary, Equation, Interpretation
from ..rounding import encode
from ..scaled import Amax, Delayed, ScaledArray, Scaling, Unit, at_least, quantize
from ._keep import OPAQUE, Exceptions, refuse_opaque
from ._narrow import AtRest, abstract, at_rest, has_exponent, is_stored, put
from ._predict import of_argument, predict
from ._products import Product, carried, multiplied
from ._recipe import Recipe
from ._rules import RULES, Family, features
from ._value import InFlight, at_exponent, common_exponent, normalised, per_slice, settle

# Families whose results leave the range that their operands have.
MULTIPLY = (Family.PRODUCT, Family.POWER, Family.CONTRACTION)


HELD = 4096  # elements of a sum of gradients from which it is made once: see `_held`


def compute_dtype(aval: Any) -> Any:
    """What a float is computed in: float64 stays, all else is float32."""
    return jnp.float64 if aval.dtype == jnp.float64 else jnp.float32


@dataclasses.dataclass(frozen=True)
class Boundaries(Interpretation):
    """Values in flight keep the compute dtype; what is stored is rounded as the recipe says.

    Attributes:
        recipe: the formats.
        traced: an argument came with an integer exponent, so exponents are numbers at run time.
        exceptions: the recipe's ``keep``, and what of it has been met.
    """

    recipe: Recipe
    traced: bool = False
    exceptions: Exceptions = dataclasses.field(default_factory=lambda: Exceptions(()))

    # -- in and out ------------------------------------------------------------------------------

    def is_argument(self, leaf: Any) -> bool:
        return is_stored(leaf)

    def abstract(self, leaf: Any) -> Any:
        return abstract(leaf) if is_stored(leaf) else leaf

    def lift(self, x: Any, aval: Any) -> InFlight:
        dtype = compute_dtype(aval)
        if self.traced and has_exponent(x):
            return normalised(InFlight(x.data.astype(dtype), x.scale))
        plain = jnp.asarray(x.value() if is_stored(x) else x).astype(dtype)
        return InFlight(plain, spread=of_argument(aval.shape))

    def constant(self, x: np.ndarray, aval: Any) -> InFlight:
        dtype = compute_dtype(aval)
        data = jnp.asarray(np.asarray(x, dtype))
        return InFlight(data, uniform=float(x) if x.size == 1 else None)

    def lower(self, value: Any, aval: Any) -> jax.Array:
        return settle(awake(value)).astype(aval.dtype)

    def emit(self, value: Any, aval: Any, path: str) -> Any:
        value = awake(value)
        storage = self.recipe.stored_as(path, value.data.size)
        if storage is not None:
            return put(settle(value), storage)
        if not isinstance(value.exponent, int) and value.exponent.ndim == 0:
            return ScaledArray(value.data, value.exponent)
        return self.lower(value, aval)

    def cotangent(self, argument: Any, gradient: jax.Array) -> Any:
        if not is_stored(argument):
            return gradient
        # by the chain rule, to data and scale; the dtype is that of the data, as JAX has it
        return jax.vjp(lambda a: a.value(), argument)[1](gradient)[0]

    # -- where control flow meets ----------------------------------------------------------------

    def canonical(
        self, value: Any, aval: Any, boundary: Boundary, equation: Equation
    ) -> InFlight | AtRest:
        side = "backward" if equation.direction == "backward" else "forward"
        storage = self.recipe.storage
        value = made(value)
        if boundary == "stacked" and storage and equation.direction == "forward" and aval.shape:
            return value if isinstance(value, AtRest) else at_rest(value, storage)
        value = awake(value)
        if boundary == "carry" and self.recipe.carry is not None and aval.shape:
            value = at_rest(value, self.recipe.carry).wake()
        if not self.traced or boundary == "mapped":  # devices may have different exponents
            return InFlight(settle(value), 0, side)
        exponent = 0 if value.uniform is not None or per_slice(value) else value.exponent
        return InFlight(at_exponent(value, exponent), jnp.asarray(exponent, jnp.int32), side)

    def select(self, predicate: jax.Array, on_true: Any, on_false: Any) -> InFlight:
        exponent = common_exponent([on_true, on_false])
        data = lax.select(
            predicate, at_exponent(on_true, exponent), at_exponent(on_false, exponent)
        )
        return dataclasses.replace(on_true, data=data, exponent=exponent, memo={})

    def spread(self, value: Any, aval: Any) -> InFlight | AtRest:
        def rows(exponent):  # one exponent for each index of the axis that the scan walks
            if isinstance(exponent, int) or exponent.ndim:
                return exponent
            return jnp.broadcast_to(exponent, aval.shape[:1])

        value = made(value)
        if isinstance(value, AtRest):
            return dataclasses.replace(value, scale=rows(value.scale), own=rows(value.own))
        if value.uniform is not None:
            return InFlight(settle(value), 0, value.side)
        return dataclasses.replace(value, exponent=rows(value.exponent), memo={})

    def invariant(self, value: Any, readers: Set[str], equation: Equation) -> Any:
        """Weights that each turn of a loop multiplies by are rounded before it."""
        value = made(value)
        if not isinstance(value, InFlight) or "dot_general" not in readers or per_slice(value):
            return value
        fmt = self.recipe.backward if value.side == "backward" else self.recipe.forward
        if isinstance(fmt, Format) and self.recipe.per == "tensor" and value.uniform is None:
            self._rounded(value, fmt, (), "")
        return value

    def inside(self, value: Any) -> Any:
        if not isinstance(value, InFlight):
            return super().inside(value)
        return dataclasses.replace(value, memo=dict(value.memo))

    def residual(self, value: Any, aval: Any) -> InFlight | AtRest:
        """What waits for the backward pass: narrow, and back in float32 only when it is read."""
        value = made(value)
        return self._stored(value, self.recipe.storage) if isinstance(value, InFlight) else value

    # -- rounding --------------------------------------------------------------------------------

    def _stored(self, value: InFlight, fmt: Format | None) -> InFlight | AtRest:
        """The value as the backward pass finds it in memory."""
        small = not at_least(value.data.size, self.recipe.smallest)
        if fmt is None or value.side != "forward" or value.uniform is not None or small:
            return value
        return at_rest(value, fmt)

    def operand(
        self, value: InFlight, equation: Equation, contracted: tuple[int, ...], position: int
    ) -> tuple[jax.Array, int | jax.Array, jax.Array | None]:
        """A contraction's operand: data rounded to the recipe's format, and its two exponents.

        Args:
            value: the operand.
            equation: the contraction.
            contracted: the operand's axes that are contracted.
            position: which operand it is.

        Returns:
            Data in the format's own dtype, or in one that holds its values; the value's own
            exponent; the rounding's scale, a power of two in the compute dtype (None: 1).
        """
        fmt = self.recipe.backward if value.side == "backward" else self.recipe.forward
        if fmt and self.recipe.storage and not at_least(features(equation), self.recipe.features):
            fmt = self.recipe.storage
        fmt = self.exceptions.find(equation, fmt)
        if fmt is None:
            return value.data, value.exponent, None
        plain = isinstance(fmt, Format) and self.recipe.per == "tensor"
        again = equation.direction == "backward" and value.side == "forward"
        site = f"{'.'.join(map(str, equation.order))}/{position}"
        if plain and again and isinstance(self.recipe.scaling, Amax | Delayed):
            self._rounded(value, fmt, contracted, site)
            copy = at_rest(value, fmt)
            return _bare(copy.data, value), value.exponent, copy.scale
        if again:
            value = awake(self._stored(value, self.recipe.storage))
        copy = self._rounded(value, fmt, contracted, site)
        if not plain:
            return carried(copy, fmt, value.data.dtype), value.exponent, None
        assert isinstance(copy.scale, jax.Array)
        return _bare(copy.data, value), value.exponent, copy.scale

    def product(self, equation: Equation, a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
        """A contraction of two operands, added up in ``dtype``."""
        return multiplied(equation, a, b, dtype)

    def _rounded(
        self, value: InFlight, fmt: Format | BlockFormat, contracted: tuple[int, ...], site: str
    ) -> ScaledArray:
        """A narrow copy, made once for each way to make it."""
        scaling, key = self.recipe.scaling, (fmt, contracted)
        if isinstance(fmt, Format) and self.recipe.per == "tensor":
            key = fmt
        if key not in value.memo:
            if isinstance(scaling, Unit):
                scaling = Unit(scaling.terms * 4.0**value.spread)
            if isinstance(fmt, BlockFormat):
                axis = max(contracted, default=value.data.ndim - 1)
                scaling = None if isinstance(scaling, Amax) else scaling
                copy = quantize(value.data, fmt, scaling=scaling, axis=axis)
            elif self.recipe.per == "channel":
                kept = tuple(a for a in range(value.data.ndim) if a not in contracted)
                copy = quantize(value.data, fmt, scaling=scaling, axis=kept)
            else:
                copy = self.copied(value.data, fmt, scaling, site)
            value.memo[key] = copy
        return value.memo[key]

    def copied(self, x: jax.Array, fmt: Format, scaling: Scaling, site: str) -> ScaledArray:
        """A narrow copy of the operand at ``site`` behind one scale."""
        return quantize(x, fmt, scaling=scaling)

    def gathered(self, value: InFlight, axis_name: Any, equation: Equation) -> ScaledArray | None:
        """What a collective sends: narrow, behind a scale that all devices agreed upon."""
        fmt = self.exceptions.find(equation, self.recipe.collective)
        if fmt is None or not isinstance(fmt, Format):
            return None
        scale, _ = Amax().scale(value.data, fmt, range(value.data.ndim))
        scale = lax.pmax(scale, axis_name)
        return ScaledArray(encode(value.data * (1 / scale), fmt), scale)

    # -- equations -------------------------------------------------------------------------------

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        turned = _turned(equation, inputs)
        if turned is not None:
            return state, [turned]
        if equation.name in OPAQUE and self.exceptions.find(equation, "rounded") is not None:
            refuse_opaque(equation)
        rule = RULES[equation.name]
        inputs = [awake(x) for x in inputs]
        side = _side(equation, inputs, rule.family)
        if equation.direction == "backward" and rule.family is not Family.CONTRACTION:
            fmt = self.exceptions.find(equation, self.recipe.storage)
            fmt = fmt if isinstance(fmt, Format) else None
            inputs = [awake(self._stored(x, fmt)) if isinstance(x, InFlight) else x for x in inputs]
        outs = rule.rule(self, equation, inputs)
        if equation.name == "add_any" and at_least(outs[0].data.size, HELD):
            outs = [dataclasses.replace(outs[0], data=_held(outs[0].data, inputs[0].data), memo={})]
        if self.traced and rule.family in MULTIPLY:
            outs = [normalised(awake(y)) if isinstance(y, InFlight | Product) else y for y in outs]
        spread = 0.0
        if isinstance(self.recipe.scaling, Unit):
            spread = predict(equation, rule.family, inputs)
        return state, [
            dataclasses.replace(y, side=side, spread=spread)
            if isinstance(y, InFlight | Product)
            else y
            for y in outs
        ]


def _bare(data: Any, value: InFlight) -> jax.Array:
    """Data as an array of their own dtype; of the compute dtype where they are packed codes."""
    return data if isinstance(data, jax.Array) else data.astype(value.data.dtype)


def awake(x: Any) -> Any:
    return x.wake() if isinstance(x, AtRest | Product) else x


def made(x: Any) -> Any:
    """A value whose product has been made; what lies at rest stays there."""
    return x.wake() if isinstance(x, Product) else x


def _held(total: jax.Array, part: jax.Array) -> jax.Array:
    """A sum with NaN where its part has it, which is the sum: made once, however many read it.

    What is made of one array, all else broadcast, XLA on CPU makes anew for each reader, and what
    led there too. A norm's gradient ends so, in a mean that is added to all; and the gradient of a
    residual stream became in each layer the sum, done again, of what all layers behind it add. Of
    two arrays it is made once, and written, if a library reads it: the search for the largest.
    """
    return lax.select(lax.ne(part, part), part, total)


def _turned(equation: Equation, inputs: Sequence[Any]) -> InFlight | None:
    """A transposed product, where it takes no transposition; None for all other equations."""
    if equation.name != "transpose" or not isinstance(inputs[0], Product):
        return None
    backward = equation.direction == "backward"
    if backward != (inputs[0].side == "backward"):  # of the forward pass: at rest in between
        return None
    return inputs[0].turned(equation.params["permutation"])


def _side(equation: Equation, inputs: Sequence[Any], family: Family):
    """Where a result came from, which decides the format in which it will be an operand."""
    known = [x for x in inputs if isinstance(x, InFlight)]
    moved = family is Family.STRUCTURAL and any(x.uniform is None for x in known)
    if moved and all(x.side == "stored" for x in known):
        return "stored"
    # all else that a backward pass computes is linear in a cotangent, its first one a constant
    return "backward" if equation.direction == "backward" else "forward"
