"""The interpretation of recipes without ``results``: stored values are narrow, others wider."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax import ShapedArray
from .._types import AxisName, PyTree
from ..formats import Format
from ..interpret import (
    KERNELS,
    Applied,
    Argument,
    Boundary,
    Equation,
    Readers,
    RoundedOperand,
    State,
    Value,
    is_carry,
    is_float,
)
from ..primitives import Family, having, params
from ..scaled import amax, at_least, is_stored, storage_of, store_array
from ..scalifying import (
    MULTIPLIES,
    RULES,
    EveryOp,
    FormatOverrides,
    Memo,
    PairInterpretation,
    ScaledValue,
    Scalify,
    materialize,
    per_slice,
    wide_dtype,
)
from ._fused_attention import FUSED, attention_results
from ._history import OperandAmaxes
from ._layout import force_materialize
from ._operand_settings import GRADIENT, Operand
from ._operands import Operands, batch_axes
from ._predict import (
    has_rows,
    largest_constant,
    may_be_mask,
    of_argument,
    predict,
    role_of,
    softmax_role,
)
from ._products import DeferredProduct
from ._quantized import QuantizedValue, assigned, moved, quantized_argument
from ._recipe import Recipe
from ._residuals import load, load_product
from ._sending import sending_results
from ._setup import Setup
from ._value import StoredValue, holds, may_be_masked, store_value

PERMUTES = having("same_order") | {"convert_element_type", "transpose"}
# cuDNN's attention has a rule of its own: see ``_fused_attention``
OPAQUE = frozenset(name for name in KERNELS if not name.startswith("dot_product_attention"))
MASKS = having("masks")
COUNTED = MULTIPLIES | frozenset(FUSED)  # whose operands have histories
# Sums of gradients with at least this many elements are computed once: see `force_materialize`.
MATERIALIZED_SIZE = 4096


@dataclasses.dataclass(frozen=True)
class Boundaries(PairInterpretation):
    """Rounds stored values as the recipe says; values in flight keep their flight dtype.

    Attributes:
        operands: the policy for operands of contractions; it has those for residuals, and what all
            have in common.
    """

    operands: Operands

    @classmethod
    def of(cls, recipe: Recipe) -> Boundaries:
        """Returns the interpretation of a recipe."""
        return cls(Operands(Setup(recipe)))

    @property
    def setup(self) -> Setup:
        return self.operands.setup

    @property
    def recipe(self) -> Recipe:
        return self.setup.recipe

    @property
    def overrides(self) -> FormatOverrides:  # pyright: ignore
        return self.setup.overrides

    @property
    def amaxes(self) -> OperandAmaxes | None:
        """Those of delayed scaling; None for scales of other strategies."""
        return self.operands.amaxes

    def with_amaxes(self, amaxes: OperandAmaxes) -> Boundaries:
        return dataclasses.replace(self, operands=dataclasses.replace(self.operands, amaxes=amaxes))

    # -- in and out ------------------------------------------------------------------------------

    def lift(self, x: Argument, aval: ShapedArray) -> ScaledValue | QuantizedValue:
        dtype = self.setup.flight(aval)
        if (quantized := quantized_argument(x, dtype)) is not None:
            return quantized
        plain = jnp.asarray(x.value() if is_stored(x) else x).astype(dtype)
        return ScaledValue(
            plain, log2_std=of_argument(aval.shape), may_be_mask=has_rows(aval.shape)
        )

    def constant(self, x: np.ndarray, aval: ShapedArray) -> ScaledValue:
        dtype = self.setup.flight(aval)
        data = jnp.asarray(np.asarray(x, dtype))
        return ScaledValue(data, constant_value=float(x) if x.size == 1 else None)

    def lower(self, value: Value, aval: ShapedArray) -> jax.Array:
        return materialize(load(value)).astype(aval.dtype)

    def emit(self, value: Value, aval: ShapedArray, path: str) -> PyTree:
        if isinstance(value, QuantizedValue) and value.argument is not None:
            return value.argument
        value = load(value)
        storage = storage_of(self.recipe.state, path, value.data.size)
        if self.setup.record is not None:
            self.setup.record(
                "output", path, value.shape, [storage.format if storage else aval.dtype]
            )
        if storage is not None:
            return store_array(materialize(value), storage, aval.dtype)
        return self.lower(value, aval)

    # -- where control flow meets ----------------------------------------------------------------

    def canonical(
        self, value: Value, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> ScaledValue | StoredValue:
        origin = "backward" if equation.direction == "backward" else "forward"
        fmt = self.recipe.residuals
        value = load_product(value)
        waits = boundary == "stacked" and equation.direction == "forward" and aval.shape
        wide = (
            fmt
            and isinstance(value, ScaledValue)
            and (holds(value.data.dtype, fmt) or may_be_masked(value, fmt))
        )
        if waits and fmt and not wide:
            self.setup.recorded(boundary, equation, value, fmt)
            return value if isinstance(value, StoredValue) else store_value(value.marked(), fmt)
        value = load(value)
        if boundary in ("carry", "stacked"):
            self.setup.recorded(boundary, equation, value, None)
        plain = ScaledValue(materialize(value), 0, origin)
        if boundary != "stacked":
            return plain
        known = value.marked()
        return dataclasses.replace(plain, narrowed=known.narrowed, role=known.role)

    def select(
        self, predicate: jax.Array, on_true: ScaledValue, on_false: ScaledValue
    ) -> ScaledValue:
        data = lax.select(predicate, on_true.data, on_false.data)
        return dataclasses.replace(on_true, data=data, memo=Memo())

    def unstack(self, value: Value, aval: ShapedArray) -> Value:
        value = load_product(value)
        if isinstance(value, StoredValue):
            return value.unstacked(aval.shape[0])
        if isinstance(value, QuantizedValue):
            return value.unstacked()
        if value.constant_value is not None:
            return ScaledValue(materialize(value), 0, value.origin)
        mask = value.may_be_mask and has_rows(aval.shape[1:])
        x, setting = value.data, self.recipe.products.operand("forward", "weight")
        scaling = setting.scaling if setting is not None and setting.per_tensor else None
        measured = scaling is not None and scaling.source in ("amax", "history")
        if value.origin != "stored" or not measured or x.ndim < 3:
            return dataclasses.replace(value, memo=Memo(), may_be_mask=mask)
        if value.memo.extreme is None:  # of an argument's slices, once for all loops
            wide = x.astype(wide_dtype(x.dtype))
            value.memo.extreme = amax(wide, range(1, x.ndim), True)
        memo = Memo(extreme=value.memo.extreme)
        return dataclasses.replace(value, memo=memo, may_be_mask=mask)

    def invariant(self, value: Value, readers: Readers, equation: Equation) -> Value:
        """Rounds weights that each iteration of a loop multiplies by once, before the loop."""
        value = load_product(value)
        if not isinstance(value, ScaledValue) or per_slice(value):
            return value
        if self.amaxes is not None:  # each operand has a history of its own
            return value
        for reader, position in readers:
            setting = self._setting_of_weight(value, reader)
            if setting is not None and not setting.is_random and setting.hadamard < 2:
                contracted = params.contracted_axes(reader)[position]
                batch = batch_axes(reader, position, setting)
                self.operands.rounded(value, setting, contracted, "", batch)
        return value

    def _setting_of_weight(self, value: ScaledValue, reader: Equation) -> Operand | None:
        """Returns how a product rounds a loop's constant, whatever its other operand, or None."""
        if RULES[reader.name].family is not Family.CONTRACTION or value.constant_value is not None:
            return None
        products, backward = self.recipe.products, reader.direction == "backward"
        if value.origin == "backward":
            setting = products.operand(*GRADIENT)
            known = products.short_form is not None
        else:
            setting = products.operand("input_gradient" if backward else "forward", "weight")
            known = products.short_form is not None or value.origin == "stored"
        if setting is None or not known or (backward and products.backward_from != "original"):
            return None
        fmt = self.overrides.find(reader, setting.format)
        narrower = not isinstance(fmt, Format) or not holds(value.data.dtype, fmt)
        return setting if fmt == setting.format and narrower else None

    def repeated(self, equation: Equation, inputs: Sequence[Value | None]) -> Value | None:
        """Casts and moves arguments before a loop, in whose body they are found again."""
        return self._moved(equation, [load_product(x) for x in inputs])

    def _moved(self, equation: Equation, inputs: Sequence[Value | None]) -> Value | None:
        """Returns an argument after a cast or move, the same for equal equations, or None."""
        if len(inputs) != 1 or not isinstance(x := inputs[0], ScaledValue) or x.origin != "stored":
            return None
        if RULES[equation.name].family is not Family.STRUCTURAL or per_slice(x):
            return None
        out = equation.out_avals[0]
        if not is_float(out) or math.prod(out.shape) != x.data.size:
            return None

        def moved() -> ScaledValue:
            (made,) = self.computed(equation, [x])
            assert isinstance(made, ScaledValue)
            if x.memo.extreme is not None and equation.name in PERMUTES:
                extreme = x.memo.extreme.astype(made.data.dtype).reshape((1,) * made.data.ndim)
                made.memo.extreme = extreme
            return made

        options = equation.name, str(out), repr(sorted(equation.params.items()))
        return x.memo.once(("changed", *options), moved)

    def behind(self, value: Value, barrier: Value) -> Value:
        """Keeps the narrow copies of arguments, which aren't made again.

        An argument of which nothing was made needs no barrier, behind which it would be copied.
        """
        if not isinstance(value, ScaledValue) or value.origin != "stored":
            return barrier
        if not value.memo.made:
            return value
        return dataclasses.replace(barrier, memo=value.memo)

    def merge(self, state: State, axes: AxisName) -> State:
        return jax.tree.map(lambda newest: lax.pmax(newest, axes), state)

    def inside(self, value: Value) -> Value:
        return value.inside() if isinstance(value, ScaledValue) else super().inside(value)

    def rounded_operands(
        self, equation: Equation, inputs: Sequence[Value]
    ) -> Sequence[RoundedOperand]:
        return self.operands.rounded_operands(equation, inputs)

    def magnitudes(self, inputs: Sequence[Value]) -> jax.Array:
        return self.operands.magnitudes(inputs)

    def residual(self, value: Value, aval: ShapedArray) -> ScaledValue | StoredValue:
        """Returns a value narrow, if the recipe says so, until the backward pass reads it."""
        value = load_product(value)
        if not isinstance(value, ScaledValue):
            return value
        return self.operands.residuals.stored(value.marked(), self.recipe.residuals)

    # -- equations -------------------------------------------------------------------------------

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        """Runs one equation; with delayed scaling the state is each operand's largest magnitude."""
        by, newest = self, dict[str, jax.Array]()
        if self.amaxes is not None and state and equation.name in COUNTED:
            by = self.with_amaxes(dataclasses.replace(self.amaxes, newest=newest))
        outs = by._applied(equation, inputs)
        if newest:
            state = state | {i: jnp.maximum(state[i], amax) for i, amax in newest.items()}
        return state, outs

    def _applied(self, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        backward = equation.direction == "backward"
        x = inputs[0] if equation.name == "transpose" else None
        # not of a product that is stored between the passes
        if isinstance(x, DeferredProduct) and backward == (x.origin == "backward"):
            transposed = x.transposed(params.permutation(equation))
            if transposed is not None:
                return [transposed]
        if equation.name in OPAQUE:
            self.overrides.warn(equation)
        for same in (moved, assigned, self._moved):
            if (found := same(equation, inputs)) is not None:
                return [found]
        return self.computed(
            equation, [load(x) for x in self.operands.multiplied(equation, inputs)]
        )

    def computed(self, equation: Equation, inputs: Sequence[Value]) -> list[Value]:
        rule = RULES[equation.name]
        if equation.name in ("add", "add_any"):
            inputs = [_added(equation, i, x) for i, x in enumerate(inputs)]
        origin = _origin(equation, inputs, rule.family)
        # a kernel gets the numbers that the forward one has returned
        as_they_are = rule.family is Family.CONTRACTION or equation.name in KERNELS
        if equation.direction == "backward" and not as_they_are:
            inputs = self.operands.residuals.read_late(equation, inputs)
        outs = sending_results(self.setup, equation, inputs)
        if outs is None:
            outs = attention_results(self.operands, equation, inputs)
        if outs is None:
            flight, multiply = self.setup.flight, self.operands.multiply
            outs = self.by_rule(rule, flight, multiply, equation, inputs)
        if not outs:  # a debugging callback
            return outs
        if equation.name == "add_any" and at_least(outs[0].data.size, MATERIALIZED_SIZE):
            data = force_materialize(outs[0].data, inputs[0].data)
            outs = [dataclasses.replace(outs[0], data=data, memo=Memo())]
        if equation.name == "convert_element_type":
            x, y = inputs[0], outs[0]
            if isinstance(x, ScaledValue) and isinstance(y, ScaledValue):
                y.memo.in_float32 = x.memo.in_float32
        fields: dict[str, object] = {"origin": origin}
        if rule.family is Family.STRUCTURAL and (
            self.recipe.products.short_form is None or self.overrides.have_settings
        ):
            roles = {role_of(x) for x in inputs if isinstance(x, ScaledValue)}
            fields["role"] = roles.pop() if len(roles) == 1 else ""
        if self.recipe.attention is not None and (
            role := softmax_role(equation, rule.family, inputs)
        ):
            fields["role"] = role
        if self.recipe.products.scaling.source == "shapes":
            fields["log2_std"] = predict(equation, rule.family, inputs)
        if size := largest_constant(rule.family, inputs):  # never of a product
            fields["largest_constant"] = size
        if may_be_mask(rule.family, inputs):
            fields["may_be_mask"] = True
        outs = [
            dataclasses.replace(y, **fields) if isinstance(y, ScaledValue | DeferredProduct) else y
            for y in outs
        ]
        if equation.name in MASKS:
            self.operands.residuals.masked(inputs[0])
        if equation.direction == "forward" and isinstance(outs[0], ScaledValue):
            outs[0] = self.operands.residuals.with_lineage(equation, inputs, outs[0])
        return outs


def _added(equation: Equation, position: int, x: Value) -> Value:
    """Returns an addend; a product that a loop adds to its float32 carry isn't rounded before."""
    if not isinstance(x, ScaledValue) or x.memo.in_float32 is None or x.data.dtype != jnp.float32:
        return x
    if not is_carry(equation, 1 - position):
        return x
    return dataclasses.replace(x, data=x.memo.in_float32(), lineage=None, memo=Memo())


def _origin(equation: Equation, inputs: Sequence[Value], family: Family):
    known = [x for x in inputs if isinstance(x, ScaledValue)]
    moved = family is Family.STRUCTURAL and any(x.constant_value is None for x in known)
    if moved and all(x.origin in ("stored", "residual") for x in known):
        return "stored" if all(x.origin == "stored" for x in known) else "residual"
    # everything else in a backward pass is linear in a cotangent, the first of which is a constant
    return "backward" if equation.direction == "backward" else "forward"


def interpretation(
    recipe: Recipe | Scalify,
    *,
    key: jax.Array | None = None,
    amaxes: OperandAmaxes | None = None,
    record: Callable[..., None] | None = None,
) -> Boundaries | EveryOp:
    """Returns the interpretation that :func:`autoscale` applies to a function.

    Args:
        recipe: of products, or the settings of ``scalify``, for which two arguments are nothing.
        key: for recipes that draw random numbers; None for the key of seed 0.
        amaxes: for delayed scaling: those of earlier steps, and a record of this one's.
        record: called with each decision on a format.
    """
    if isinstance(recipe, Scalify):
        return EveryOp(recipe, record=record)
    return Boundaries(Operands(Setup(recipe, record), key, amaxes))
