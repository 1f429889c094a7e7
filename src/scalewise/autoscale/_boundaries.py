"""The interpretation behind ``store="boundaries"``: narrow where stored, wider in flight."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..devices import Device, device_for
from ..formats import BlockFormat, Format
from ..interpret import Boundary, Equation, Interpretation, outlined, with_common_axes
from ..primitives import params
from ..rounding import encode
from ..scaled import (
    Amax,
    ScaledArray,
    Scaling,
    at_least,
    quantize,
    quantize_measured,
)
from ._layout import loaded_after, stored_copy
from ._narrow import StoredValue, abstract, has_exponent, holds, is_stored, store_array, store_value
from ._overrides import OPAQUE, FormatOverrides, refuse_opaque
from ._predict import of_argument, predict
from ._products import Blocks, DeferredProduct, Operand, multiply
from ._recipe import Recipe
from ._recompute import Copy, is_statistic, lineage, separate_copy
from ._rules import RULES, Family, compute_dtype, features
from ._units import MissingUnits
from ._value import (
    ScaledValue,
    at_exponent,
    common_exponent,
    materialize,
    normalised,
    per_slice,
    wide_dtype,
)

# Families whose results leave the range that their operands have.
MULTIPLY = (Family.PRODUCT, Family.POWER, Family.CONTRACTION)


FOR_SCALE, FOR_BACKWARD = (
    0,
    1,
)  # what a value is computed apart for: its scale, or the backward pass
STORED = "stored"  # in a value's memo: a product has read it as it is, so that it is in memory
NARROWED = "narrowed"  # in a value's memo: a product of narrow operands has read it
MATERIALIZED_SIZE = (
    4096  # elements of a sum of gradients from which it is made once: see `force_materialize`
)


@dataclasses.dataclass(frozen=True)
class Boundaries(Interpretation):
    """Values in flight keep their flight dtype; what is stored is rounded as the recipe says.

    Attributes:
        recipe: the formats.
        traced: an argument came with an integer exponent, so exponents are numbers at run time.
        overrides: the recipe's ``keep``, and what of it has been met.
        record: called with each decision on a format, by ``explain``; see ``_explain._Recorder``.
        missing_units: what has been said of formats that the device's units don't multiply.
    """

    recipe: Recipe
    traced: bool = False
    overrides: FormatOverrides = dataclasses.field(default_factory=lambda: FormatOverrides(()))
    record: Callable[..., None] | None = None
    missing_units: MissingUnits = dataclasses.field(default_factory=MissingUnits)

    @functools.cached_property
    def device(self) -> Device | None:
        """The device that products are written for, where the recipe or JAX tells it."""
        return device_for(self.recipe.device)

    def flight_dtype(self, aval: Any) -> Any:
        """What a float of the program is computed in, as ``recipe.flight`` says."""
        kept = self.recipe.flight == "program" and not self.traced
        return aval.dtype if kept and aval.dtype == jnp.bfloat16 else compute_dtype(aval)

    # -- in and out ------------------------------------------------------------------------------

    def is_argument(self, leaf: Any) -> bool:
        return is_stored(leaf)

    def abstract(self, leaf: Any) -> Any:
        return abstract(leaf) if is_stored(leaf) else leaf

    def lift(self, x: Any, aval: Any) -> ScaledValue:
        dtype = self.flight_dtype(aval)
        if self.traced and has_exponent(x):
            return normalised(ScaledValue(x.data.astype(dtype), x.exponent))
        plain = jnp.asarray(x.value() if is_stored(x) else x).astype(dtype)
        return ScaledValue(plain, log2_std=of_argument(aval.shape))

    def constant(self, x: np.ndarray, aval: Any) -> ScaledValue:
        dtype = self.flight_dtype(aval)
        data = jnp.asarray(np.asarray(x, dtype))
        return ScaledValue(data, constant_value=float(x) if x.size == 1 else None)

    def lower(self, value: Any, aval: Any) -> jax.Array:
        return materialize(load(value)).astype(aval.dtype)

    def emit(self, value: Any, aval: Any, path: str) -> Any:
        value = load(value)
        storage = self.recipe.stored_as(path, value.data.size)
        if self.record is not None:
            self.record("output", path, value.shape, [storage.format if storage else aval.dtype])
        if storage is not None:
            return store_array(materialize(value), storage)
        if not isinstance(value.exponent, int) and value.exponent.ndim == 0:
            return ScaledArray.from_exponent(value.data, value.exponent)
        return self.lower(value, aval)

    def cotangent(self, argument: Any, gradient: jax.Array) -> Any:
        if not is_stored(argument):
            return gradient
        # by the chain rule, to data and scale; the dtype is that of the data, as JAX has it
        return jax.vjp(lambda a: a.value(), argument)[1](gradient)[0]

    # -- where control flow meets ----------------------------------------------------------------

    def canonical(
        self, value: Any, aval: Any, boundary: Boundary, equation: Equation
    ) -> ScaledValue | StoredValue:
        origin = "backward" if equation.direction == "backward" else "forward"
        storage = self.recipe.storage
        value = load_product(value)
        waits = boundary == "stacked" and equation.direction == "forward" and aval.shape
        if (
            waits
            and storage
            and not (isinstance(value, ScaledValue) and holds(value.data.dtype, storage))
        ):
            self._recorded(boundary, equation, value, storage)
            return value if isinstance(value, StoredValue) else store_value(_marked(value), storage)
        value = load(value)
        carry = self.recipe.carry if boundary == "carry" and aval.shape else None
        if boundary in ("carry", "stacked"):
            self._recorded(boundary, equation, value, carry)
        if carry is not None:
            value = store_value(value, carry).load()
        if not self.traced or boundary == "mapped":  # devices may have different exponents
            narrowed = boundary == "stacked" and _is_narrowed(value)
            return ScaledValue(materialize(value), 0, origin, narrowed=narrowed)
        exponent = 0 if value.constant_value is not None or per_slice(value) else value.exponent
        return ScaledValue(at_exponent(value, exponent), jnp.asarray(exponent, jnp.int32), origin)

    def select(self, predicate: jax.Array, on_true: Any, on_false: Any) -> ScaledValue:
        exponent = common_exponent([on_true, on_false])
        data = lax.select(
            predicate, at_exponent(on_true, exponent), at_exponent(on_false, exponent)
        )
        return dataclasses.replace(on_true, data=data, exponent=exponent, memo={})

    def unstack(self, value: Any, aval: Any) -> ScaledValue | StoredValue:
        def rows(exponent):  # one exponent for each index of the axis that the scan walks
            if isinstance(exponent, int) or exponent.ndim:
                return exponent
            return jnp.broadcast_to(exponent, aval.shape[:1])

        value = load_product(value)
        if isinstance(value, StoredValue):
            return dataclasses.replace(value, scale=rows(value.scale), own=rows(value.own))
        if value.constant_value is not None:
            return ScaledValue(materialize(value), 0, value.origin)
        return dataclasses.replace(value, exponent=rows(value.exponent), memo={})

    def invariant(self, value: Any, readers: Set[str], equation: Equation) -> Any:
        """Weights that each turn of a loop multiplies by are rounded before it."""
        value = load_product(value)
        if not isinstance(value, ScaledValue) or "dot_general" not in readers or per_slice(value):
            return value
        fmt = self.recipe.backward if value.origin == "backward" else self.recipe.forward
        if isinstance(fmt, Format) and self.recipe.per == "tensor" and value.constant_value is None:
            self._rounded(value, fmt, (), "")
        return value

    def inside(self, value: Any) -> Any:
        if not isinstance(value, ScaledValue):
            return super().inside(value)
        return dataclasses.replace(value, memo=dict(value.memo), lineage=None, base=None)

    def residual(self, value: Any, aval: Any) -> ScaledValue | StoredValue:
        """What waits for the backward pass: narrow, and widened only when it is read."""
        value = load_product(value)
        if not isinstance(value, ScaledValue):
            return value
        return self._stored(_marked(value), self.recipe.storage)

    # -- rounding --------------------------------------------------------------------------------

    def _stays_wide(self, value: ScaledValue, fmt: Format | None) -> bool:
        """Whether a value waits for the backward pass as it is."""
        small = value.is_statistic or not at_least(value.data.size, self.recipe.min_size)
        known = value.origin != "forward" or value.constant_value is not None
        return fmt is None or known or small or holds(value.data.dtype, fmt)

    def _for_backward(self, value: Any, fmt: Format | None) -> Any:
        """A value as the backward pass finds it: loaded from memory, or computed again."""
        if not isinstance(value, ScaledValue):
            return value
        if value.origin != "forward" or value.constant_value is not None:
            return value
        small = value.is_statistic or not at_least(value.data.size, self.recipe.min_size)
        how = value.lineage
        source = value if how is None else how.source
        if source is None or (source is value and small):
            return value
        # the compiler's own choice: it has kernels for a softmax or a norm, and what a product has
        # read is in memory
        chosen = STORED in value.memo or (how is not None and how.normalises)
        if chosen and self._stays_wide(value, fmt) and self._stays_wide(source, fmt):
            return value
        if fmt in value.memo and not self._stays_wide(value, fmt):
            return load(self._stored(value, fmt))
        if ("late", fmt) not in source.memo:
            kept = self._stays_wide(source, fmt)
            copy = (
                self._separate_copy(source, FOR_BACKWARD)
                if kept
                else load(self._stored(source, fmt))
            )
            source.memo["late", fmt] = Copy(source, copy)
        return source.memo["late", fmt].value(value, self._apply_rule)

    def _separate_copy(self, value: ScaledValue, purpose: int) -> ScaledValue:
        if value.base is None:
            data = separate_copy(value.data, purpose)
        else:  # a scaled product isn't stored, but scaled where it is read
            data = value.base.value(separate_copy(value.base.raw, purpose))
        return dataclasses.replace(value, data=data, lineage=None, base=None, memo={})

    def _apply_rule(self, equation: Equation, inputs: Sequence[Any]) -> list[Any]:
        return RULES[equation.name].rule(self, equation, inputs)

    def _measured(self, value: ScaledValue, *, arguments: bool = True) -> jax.Array:
        """The numbers that a scale is found from: the value's own, computed for that alone.

        A device reads an argument, or the source of a costly function, once to find the scale and
        once to round; else its compiler would store a wide result between the two.
        """
        source = value if value.lineage is None else value.lineage.source
        if source is None or not at_least(value.data.size, self.recipe.min_size):
            return value.data
        costly = value.lineage is not None and value.lineage.costly
        if not costly and not (arguments and source.origin == "stored"):
            return value.data
        if "measured" not in source.memo:
            source.memo["measured"] = Copy(source, self._separate_copy(source, FOR_SCALE))
        return source.memo["measured"].value(value, self._apply_rule).data

    def _stored(self, value: ScaledValue, fmt: Format | None) -> ScaledValue | StoredValue:
        """The value as the backward pass finds it in memory."""
        return value if fmt is None or self._stays_wide(value, fmt) else store_value(value, fmt)

    def operands(
        self, equation: Equation, values: Sequence[ScaledValue]
    ) -> tuple[tuple[Operand, Operand], Any]:
        """A contraction's operands, rounded to the recipe's formats, and the result's exponent."""
        axes, formats = params.contracted_axes(equation), self.formats(equation, values)
        self.missing_units.check(equation, formats, self.device)
        if self.record is not None:
            pairs = zip(values, formats, strict=True)
            given = [value.data.dtype if fmt is None else fmt for value, fmt in pairs]
            self.record("contraction", equation, equation.out_avals[0].shape, given)
        made: dict[int, Operand] = {}
        for i in sorted(range(2), key=lambda i: _is_reread(values[i], equation)):
            other = _scales(made.get(1 - i))
            made[i] = self._operand(values[i], equation, formats[i], axes[i], i, other)
        a, b = made[0], made[1]
        return (a, b), values[0].exponent + values[1].exponent

    def formats(
        self, equation: Equation, values: Sequence[ScaledValue]
    ) -> list[Format | BlockFormat | None]:
        """The formats that a contraction's operands are rounded to; None for the flight dtype."""
        attention = _between_activations(equation, values)
        few = bool(self.recipe.storage) and not at_least(features(equation), self.recipe.features)
        chosen = []
        for value in values:
            backward = value.origin == "backward"
            fmt = self.recipe.backward if backward else self.recipe.forward
            if fmt is not None and (few or (attention and _bits(fmt) <= 8)):
                fmt = self.recipe.storage
            fmt = self.overrides.find(equation, fmt)
            as_it_is = isinstance(fmt, Format) and holds(value.data.dtype, fmt)
            chosen.append(None if as_it_is else fmt)
        if not attention:
            for value in values:
                value.memo[NARROWED] = True
        return chosen

    def _operand(
        self,
        value: ScaledValue,
        equation: Equation,
        fmt: Format | BlockFormat | None,
        contracted: tuple[int, ...],
        position: int,
        other: Any,
    ) -> Operand:
        """One operand: numbers in the format's own dtype, or in one that holds them, and a scale.

        The scale is a power of two in the compute dtype; None for 1. An operand that the forward
        pass has stored is loaded once ``other`` is there, the scales of the other operand.
        """
        if fmt is None:
            value.memo[STORED] = True
            return value.data, None
        plain = isinstance(fmt, Format) and self.recipe.per == "tensor"
        reread = _is_reread(value, equation)
        operand_id = f"{'.'.join(map(str, equation.order))}/{position}"
        if reread and not (plain and self.recipe.scaling.reuses_copy):
            stored = self._stored(value, self.recipe.storage)
            value = load(loaded_after(stored, other) if isinstance(stored, StoredValue) else stored)
            reread = False
        copy = self._rounded(value, fmt, contracted, operand_id)
        if not plain:
            return Blocks(copy, fmt, value.data.dtype), None
        assert isinstance(copy.scale, jax.Array)
        data = copy.data if isinstance(copy.data, jax.Array) else copy.data.astype(jnp.float32)
        data = stored_copy(data)
        return loaded_after(data, other) if reread else data, copy.scale

    def product(self, equation: Equation, operands: Sequence[Operand], dtype: Any) -> jax.Array:
        """A contraction of two operands, added up in float32 at least, in ``dtype``."""
        return multiply(equation, operands, dtype, device=self.device).value()

    def _rounded(
        self,
        value: ScaledValue,
        fmt: Format | BlockFormat,
        contracted: tuple[int, ...],
        operand_id: str,
    ) -> ScaledArray:
        """A narrow copy, made once for each way to make it."""
        scaling, key = self.recipe.scaling, (fmt, contracted)
        if isinstance(fmt, Format) and self.recipe.per == "tensor":
            key = fmt
        if key not in value.memo:
            scaling = scaling.predicted(value.log2_std)
            if isinstance(fmt, BlockFormat):
                axis = max(contracted, default=value.data.ndim - 1)
                copy = outlined(_in_blocks, (fmt, scaling.of_blocks(), axis), value.data)
            elif self.recipe.per == "channel":
                kept = tuple(a for a in range(value.data.ndim) if a not in contracted)
                copy = quantize(value.data, fmt, scaling=scaling, axis=kept)
            else:
                copy = self.copied(value, fmt, scaling, operand_id)
            value.memo[key] = copy
        return value.memo[key]

    def copied(
        self, value: ScaledValue, fmt: Format, scaling: Scaling, operand_id: str
    ) -> ScaledArray:
        """A narrow copy of the operand at ``operand_id`` behind one scale."""
        return quantize_measured(value.data, self._measured(value), fmt, scaling)

    def to_send(self, value: ScaledValue, axis_name: Any, equation: Equation) -> ScaledArray | None:
        """What a collective sends: narrow, behind a scale that all devices agreed upon."""
        fmt = self.overrides.find(equation, self.recipe.collective)
        narrow = isinstance(fmt, Format) and not holds(value.data.dtype, fmt)
        self._recorded("collective", equation, value, fmt if narrow else None)
        if not narrow:
            return None
        x = value.data.astype(wide_dtype(value.data.dtype))
        scale, _ = Amax().scale(x, fmt, range(x.ndim))
        scale = lax.pmax(scale, axis_name)
        return ScaledArray(encode(x * (1 / scale), fmt), scale)

    # -- what `explain` is told ------------------------------------------------------------------

    def _recorded(self, kind: str, equation: Equation, value: Any, fmt: Format | None) -> None:
        if self.record is not None and getattr(value, "constant_value", None) is None:
            self.record(kind, equation, value.data.shape, [fmt or value.data.dtype])

    def _record_residual(self, equation: Equation, value: Any, fmt: Format | None) -> None:
        """Reads off a value's memo how it was stored for a backward equation."""
        if (
            not isinstance(value, ScaledValue)
            or value.origin != "forward"
            or value.constant_value is not None
        ):
            return
        source = value if value.lineage is None else value.lineage.source or value
        narrow = [x for x in (value, source) if ("rest", fmt) in x.memo]
        stored = narrow[0] if narrow else source
        if "recorded" not in stored.memo:
            stored.memo["recorded"] = True
            self._recorded("residual", equation, stored, fmt if narrow else None)

    # -- equations -------------------------------------------------------------------------------

    def apply(
        self, state: Any, equation: Equation, inputs: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        transposed = _transposed_product(equation, inputs)
        if transposed is not None:
            return state, [transposed]
        if equation.name in OPAQUE and self.overrides.find(equation, "rounded") is not None:
            refuse_opaque(equation)
        rule = RULES[equation.name]
        inputs = [load(x) for x in inputs]
        origin = _origin(equation, inputs, rule.family)
        if equation.direction == "backward" and rule.family is not Family.CONTRACTION:
            fmt = self.overrides.find(equation, self.recipe.storage)
            fmt = fmt if isinstance(fmt, Format) else None
            late = [self._for_backward(x, fmt) for x in inputs]
            if self.record is not None:
                for x in inputs:
                    self._record_residual(equation, x, fmt)
            inputs = late
        outs = rule.rule(self, equation, inputs)
        if equation.name == "add_any" and at_least(outs[0].data.size, MATERIALIZED_SIZE):
            data = force_materialize(outs[0].data, inputs[0].data)
            outs = [dataclasses.replace(outs[0], data=data, memo={})]
        if self.traced and rule.family in MULTIPLY:
            outs = [
                normalised(load(y)) if isinstance(y, ScaledValue | DeferredProduct) else y
                for y in outs
            ]
        fields: dict[str, Any] = {"origin": origin}
        if self.recipe.scaling.source == "shapes":
            fields["log2_std"] = predict(equation, rule.family, inputs)
        outs = [
            dataclasses.replace(y, **fields) if isinstance(y, ScaledValue | DeferredProduct) else y
            for y in outs
        ]
        if equation.direction == "forward" and not self.traced and isinstance(outs[0], ScaledValue):
            kept = functools.partial(self._stays_wide, fmt=self.recipe.storage)
            how = lineage(equation, inputs, self.recipe.min_size, kept)
            statistic = is_statistic(equation, inputs)
            if how is not None or statistic:
                outs = [
                    dataclasses.replace(outs[0], lineage=how, is_statistic=statistic),
                    *outs[1:],
                ]
        return state, outs


def _in_blocks(options: tuple, x: jax.Array) -> ScaledArray:
    fmt, scaling, axis = options
    # given twice: XLA on a GPU chooses a layout for the maxima and one for the numbers
    return quantize_measured(x, x, fmt, scaling, axis)


def load(x: Any) -> Any:
    return x.load() if isinstance(x, StoredValue | DeferredProduct) else x


def load_product(x: Any) -> Any:
    """A value whose product has been made; what lies at rest stays there."""
    return x.load() if isinstance(x, DeferredProduct) else x


def force_materialize(total: jax.Array, part: jax.Array) -> jax.Array:
    """A sum with NaN where its part has it, which is the sum: made once, however many read it.

    What is made of one array, all else broadcast, XLA on CPU makes anew for each reader, and what
    led there too. A norm's gradient ends so, in a mean that is added to all; and the gradient of a
    residual stream became in each layer the sum, done again, of what all layers behind it add. Of
    two arrays it is made once, and written, if a library reads it: the search for the largest.
    Other platforms get the sum itself.
    """

    def selected(total: jax.Array, part: jax.Array) -> jax.Array:
        return lax.select(lax.ne(part, part), part, total)

    arrays = with_common_axes((total, part))
    return lax.platform_dependent(*arrays, cpu=selected, default=lambda total, _: total)


def _is_reread(value: ScaledValue, equation: Equation) -> bool:
    """Whether a backward product reads a value of the forward pass."""
    return equation.direction == "backward" and value.origin == "forward"


def _scales(operand: Operand | None) -> Any:
    """The scales of an operand; of one without any, its numbers; None for no operand."""
    if operand is None:
        return None
    numbers, scale = operand
    if isinstance(numbers, Blocks):
        return numbers.copy.scale
    return numbers if scale is None else scale


def _transposed_product(equation: Equation, inputs: Sequence[Any]) -> ScaledValue | None:
    """A transposed product, where it takes no transposition; None for all other equations."""
    if equation.name != "transpose" or not isinstance(inputs[0], DeferredProduct):
        return None
    backward = equation.direction == "backward"
    if backward != (inputs[0].origin == "backward"):  # of the forward pass: at rest in between
        return None
    return inputs[0].transposed(params.permutation(equation))


def _origin(equation: Equation, inputs: Sequence[Any], family: Family):
    """Where a result came from, which decides the format in which it will be an operand."""
    known = [x for x in inputs if isinstance(x, ScaledValue)]
    moved = family is Family.STRUCTURAL and any(x.constant_value is None for x in known)
    if moved and all(x.origin in ("stored", "residual") for x in known):
        return "stored" if all(x.origin == "stored" for x in known) else "residual"
    # all else that a backward pass computes is linear in a cotangent, its first one a constant
    return "backward" if equation.direction == "backward" else "forward"


def _between_activations(equation: Equation, values: Sequence[ScaledValue]) -> bool:
    """Whether a product multiplies two computed arrays slice by slice, as attention does.

    Its operands are no weights, and it has batch axes. A backward product is of that kind if the
    forward product was: else that one has rounded the operand which the two share.
    """
    if equation.name != "dot_general" or not params.dot_dimensions(equation)[1][0]:
        return False
    if any(x.origin == "stored" for x in values):
        return False
    return equation.direction != "backward" or not any(map(_is_narrowed, values))


def _is_narrowed(value: ScaledValue) -> bool:
    return value.narrowed or NARROWED in value.memo


def _marked(value: ScaledValue) -> ScaledValue:
    """The value, which says of itself where it goes on whether it has been narrowed here."""
    return dataclasses.replace(value, narrowed=_is_narrowed(value))


def _bits(fmt: Format | BlockFormat) -> int:
    return fmt.element.bits if isinstance(fmt, BlockFormat) else fmt.bits
