"""``Operand`` and ``Products``: how a recipe rounds each operand of each of the three products."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Literal, TypedDict

from .._check import Count, Natural, checked
from .._repr import changed_fields
from .._resolve import as_format
from .._types import Converted, kept
from ..formats import (
    E4M3FN,
    E5M2,
    E8M0,
    BlockFormat,
    BlockFormatLike,
    Format,
    RoundingMode,
)
from ..scaled import Amax, Fixed, Scaling, shown

Role = Literal["activation", "weight", "gradient"]
CURRENT = Amax()


@checked
@dataclasses.dataclass(frozen=True)
class Operand:
    """How one operand of a product is rounded.

    Attributes:
        format: a format, with one scale or one for each channel; or a block format, whose blocks
            lie along the contracted axis.
        scaling: how scales are chosen; :class:`Amax` of a block format means the format's own.
        per: ``"tensor"``: one scale for the operand; ``"channel"``: one for each index of the axes
            that aren't contracted. Not for block formats.
        rounding: of the numbers: ``"nearest_even"``, ``"stochastic"``, or another mode of
            :func:`scalewise.cast`. Stochastic rounding draws from a key, see
            :func:`scalewise.autoscale`.
        tile: how many rows of blocks share a scale, along the last axis longer than 1 that is
            neither contracted nor a batch axis. With blocks of as many elements, a matrix has the
            same scales in both orientations.
        hadamard: a power of two n: before it is rounded, the operand is multiplied along the
            contracted axis, n numbers at a time, by an orthogonal Hadamard matrix whose rows have
            random signs. Zeros fill up the last n. Both operands of the product need the same n and
            signs: in exact arithmetic the product is unchanged. 0 for no transform.
        signs: ``"fixed"``: the same signs in every product and step; ``"random"``: drawn anew for
            each product from its key.

    Raises:
        TypeError, ValueError: an unknown format or mode, or a contradictory combination.
    """

    format: Converted[Format | BlockFormat, BlockFormatLike] = kept()
    scaling: Scaling = CURRENT
    per: Literal["tensor", "channel"] = "tensor"
    rounding: RoundingMode = "nearest_even"
    tile: Count = 1
    hadamard: Natural = 0
    signs: Literal["fixed", "random"] = "fixed"

    def __post_init__(self):
        object.__setattr__(self, "format", as_format(self.format, "Operand.format", blocks=True))
        if self.hadamard & (self.hadamard - 1):
            raise ValueError(f"Operand.hadamard is {self.hadamard!r}; expected 0 or a power of two")
        self.scaling.check(self.format)
        if self.scaling.draws and (self.tile > 1 or self.rounding != "nearest_even"):
            raise ValueError(
                f"Operand: {self.scaling!r} corrects the scale of each block for rounding to "
                "nearest; leave tile and rounding out"
            )
        if isinstance(fmt := self.format, BlockFormat):
            if self.per != "tensor":
                raise ValueError(
                    f"Operand.per is {self.per!r}, but {fmt.name} has a scale for each block"
                )
            scaling = self.scaling.of_blocks()
            if fmt.scale == E8M0 and scaling is not None and not scaling.power_of_two:
                raise ValueError(
                    f"Operand: {fmt.name} has powers of two for scales, {scaling!r} has others"
                )
        elif self.tile > 1:
            raise ValueError(f"Operand.tile is for block formats; {self.format.name} has no blocks")
        elif not self.format.zero:
            raise ValueError(f"{self.format.name} has no zero: it is for scales, not for operands")

    def __repr__(self) -> str:
        changed = changed_fields(self, "format", text=shown)
        return f"Operand({', '.join([shown(self.format), *changed])})"

    @property
    def per_tensor(self) -> bool:
        """Whether the operand has one scale."""
        return isinstance(self.format, Format) and self.per == "tensor"

    @property
    def draws(self) -> bool:
        """Whether the rounding itself depends on a key."""
        return self.rounding == "stochastic" or self.scaling.draws

    @property
    def is_random(self) -> bool:
        """Whether the rounded numbers depend on a key."""
        return self.draws or (self.hadamard > 1 and self.signs == "random")


class ShortForm(TypedDict, total=False):
    """The arguments of :meth:`Products.short`."""

    forward: BlockFormatLike | None
    backward: BlockFormatLike | None
    scaling: Scaling
    per: Literal["tensor", "channel"]


OperandPair = Annotated[
    tuple[Operand | BlockFormatLike | None, Operand | BlockFormatLike | None],
    "a pair of formats, Operands or None, ('e4m3fn', 'e4m3fn')",
]


@checked
@dataclasses.dataclass(frozen=True)
class Products:
    """How the operands of the three products of a layer ``y = x @ w`` are rounded.

    Each of the fields is a pair of :class:`Operand`, formats or None, which leaves an operand in
    the dtype in flight. Operands that differ between the products are quantized for each of them
    from the original, which waits for the backward pass in ``Recipe.residuals``.

    The weight of a product is the operand that is an argument of the program, or part of an
    argument; if both operands are, or neither is and the product has no batch axes, the right
    operand (a convolution's kernel). A product of two computed arrays with batch axes (attention)
    multiplies two activations.

    Attributes:
        forward: of activation and weight, ``y = x @ w``.
        input_gradient: of gradient and weight, ``dx = dy @ w.T``.
        weight_gradient: of activation and gradient, ``dw = x.T @ dy``.
        backward_from: what activation and weight of the two backward products are rounded from:
            ``"original"``, or ``"forward"``: the numbers that the forward product multiplied. These
            are computed once more from the original, and, with None for both operands, not rounded
            again (TransformerEngine's ``backward_override="dequantized"``). Convolutions round from
            the original.

    Raises:
        TypeError, ValueError: no pair; an unknown format; a Hadamard transform of one operand
            alone; scales that need a history or another operand; random numbers in the forward
            product, which couldn't be computed again.
    """

    forward: OperandPair
    input_gradient: OperandPair
    weight_gradient: OperandPair
    backward_from: Literal["original", "forward"] = "original"

    def __post_init__(self):
        for field in ROLES:
            given = getattr(self, field)
            try:
                pair = tuple(map(_as_operand, given))
            except (TypeError, ValueError) as error:
                raise type(error)(f"Products.{field} is {given!r}: {error}") from None
            object.__setattr__(self, field, pair)
            if len({_transform(x) for x in pair}) > 1:
                raise ValueError(
                    f"Products.{field}: both operands need the same hadamard and signs, "
                    f"not {_transform(pair[0])} and {_transform(pair[1])}"
                )
            for operand in filter(None, pair):
                alike = self.short_form is not None and operand.per_tensor
                if operand.scaling.source == "history" and not alike:
                    raise ValueError(
                        f"Products.{field}: {operand.scaling!r} needs a scale from before; expected"
                        " a scaling that reads the operand or its shape, or, of Delayed, one scale "
                        "for an operand and Products.short"
                    )
        forward = [self.operand("forward", role) for role in ROLES["forward"]]
        if self.backward_from == "forward" and any(x and x.is_random for x in forward):
            raise ValueError(
                "Products.backward_from is 'forward', but the forward product's operands are "
                "random; round them to nearest, with fixed signs"
            )

    def __repr__(self) -> str:
        form = self.short_form
        if form is None:
            return f"Products({', '.join(changed_fields(self, text=shown))})"
        default = {"scaling": CURRENT, "per": "tensor"}
        changed = [f"{n}={shown(form[n])}" for n, x in default.items() if form[n] != x]
        return f"Products.short({', '.join([*map(shown, list(form.values())[:2]), *changed])})"

    @classmethod
    def short(
        cls,
        forward: BlockFormatLike | None = "fp16",
        backward: BlockFormatLike | None = "fp16",
        scaling: Scaling = CURRENT,
        per: Literal["tensor", "channel"] = "tensor",
    ) -> Products:
        """Returns products whose operands from the forward pass are rounded alike, and gradients.

        Args:
            forward: format, or block format, of operands that come from the forward pass (weights,
                activations); None leaves them in the dtype in flight. Blocks lie along the
                contracted axis.
            backward: format of operands that carry a gradient.
            scaling: how an operand's scale is chosen, see :func:`scalewise.quantize`. By default
                its largest magnitude (current scaling), so that nothing saturates. :class:`Mx`
                chooses the scales of blocks; operands in ``Recipe.residuals`` keep current scaling.
                :class:`Unit` predicts the scale from shapes, without reading the data;
                :class:`Delayed` derives it from the steps before (see :class:`WithHistory`).
            per: ``"tensor"``: one scale for an operand; ``"channel"``: one for each index of the
                axes that aren't contracted; blocks have scales of their own.
        """
        formats = (operand_format(f, "Products.short") for f in (forward, backward))
        x, gradient = (f and plain_operand(f, scaling, per) for f in formats)
        return cls((x, x), (gradient, x), (x, gradient))

    @functools.cached_property
    def short_form(self) -> ShortForm | None:
        """The arguments with which :meth:`short` makes these products; None if it can't."""
        x, gradient = self.pair("forward")[0], self.pair("input_gradient")[0]
        pairs = [self.pair(name) for name in ROLES]
        alike = pairs == [(x, x), (gradient, x), (x, gradient)]
        if not alike or self.backward_from != "original":
            return None
        own = [operand for operand in (x, gradient) if operand is not None]
        scaling = own[0].scaling if own else CURRENT
        per = "channel" if any(operand.per == "channel" for operand in own) else "tensor"
        if any(operand != plain_operand(operand.format, scaling, per) for operand in own):
            return None
        forward, backward = x and x.format, gradient and gradient.format
        return {"forward": forward, "backward": backward, "scaling": scaling, "per": per}

    @property
    def scaling(self) -> Scaling:
        """How the scales of all operands of a short form, or of operands in other formats, are
        chosen.
        """
        return (self.short_form or {}).get("scaling", CURRENT)

    @property
    def per(self) -> Literal["tensor", "channel"]:
        """The parts of such operands that have a scale each."""
        return (self.short_form or {}).get("per", "tensor")

    @property
    def is_random(self) -> bool:
        """Whether the products depend on a key."""
        return any(x is not None and x.is_random for name in ROLES for x in self.pair(name))

    def formats(self) -> list[tuple[Format | BlockFormat | None, ...]]:
        """Returns the formats of the operands of each product."""
        return [tuple(x and x.format for x in self.pair(name)) for name in ROLES]

    def pair(self, product: str) -> tuple[Operand | None, Operand | None]:
        """Returns the operands of a product, a field's name."""
        return getattr(self, product)

    def operand(self, product: str, role: Role) -> Operand | None:
        """Returns how an operand of a role is rounded in a product, a field's name."""
        roles = ROLES[product]
        return self.pair(product)[roles.index(role) if role in roles else 0]


@checked
@dataclasses.dataclass(frozen=True, repr=False)
class Attention:
    """How the operands of attention's products are rounded, forward and backward.

    These are all products of two computed arrays with batch axes. Scales may be those of cuDNN's
    FP8 attention (one for a tensor, from its largest magnitude now or in the steps before), or of
    FlashAttention-3 (arXiv 2407.08608): ``operands=Operand(blocks, tile=n, hadamard=64)`` with a
    block format has one scale for n rows, and rotates queries and keys ("incoherent processing").
    A Hadamard transform is left out of products of which another operand has none.

    A call of cuDNN's attention (``implementation="cudnn"``) is computed by its FP8 kernel where a
    program is lowered for an H100, H200 or B200, and emulated elsewhere. It takes E4M3 with one
    scale for a tensor, and gradients in E4M3 with scales from a history; with other ``gradients``
    its backward pass has 16 bits. Where it can't be called, the program's own is, with a warning.

    Each field is an :class:`Operand` or a format.

    Attributes:
        operands: of queries, keys and values, and of all that isn't known to be one of the others.
        probabilities: of a softmax's results: exponentials divided by their sum, and these masked,
            moved or cast. They are at most 1, so that the default is a constant scale of 2^-8,
            with which E4M3 holds 1.75 and less. Where a loop divides at its end (online softmax),
            its exponentials have the setting of ``operands``.
        gradients: of operands that carry a gradient (of the attention's result, and of the scores);
            None leaves the backward products as ``Recipe.residuals`` says.

    Raises:
        TypeError, ValueError: an unknown format, or a contradictory combination.

    Example:
        >>> import dataclasses, scalewise as sw
        >>> e4m3 = sw.Attention(gradients="e4m3fn")
        >>> dataclasses.replace(sw.recipes.fp8, attention=e4m3).attention
        Attention(gradients=Operand('e4m3fn'))
    """

    operands: Operand | BlockFormatLike = Operand(E4M3FN)
    probabilities: Operand | BlockFormatLike = Operand(E4M3FN, Fixed(-8))
    gradients: Operand | BlockFormatLike | None = Operand(E5M2)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            try:
                object.__setattr__(self, field.name, _as_operand(given))
            except (TypeError, ValueError) as error:
                raise type(error)(f"Attention.{field.name} is {given!r}: {error}") from None

    def __repr__(self) -> str:
        return f"Attention({', '.join(changed_fields(self, text=shown))})"

    def operand(self, origin: str, role: str) -> Operand | None:
        """Returns how an operand is rounded, by its origin and its role in a softmax."""
        operands, probabilities, gradients = self.settings()
        if origin == "backward":
            return gradients
        return probabilities if role == "probabilities" else operands

    def current(self) -> Attention:
        """Returns the settings with scales from the arrays themselves in place of a history."""
        changed = {
            f.name: dataclasses.replace(x, scaling=Amax(x.scaling.power_of_two))
            for f, x in zip(dataclasses.fields(self), self.settings(), strict=True)
            if x and x.scaling.source == "history"
        }
        return dataclasses.replace(self, **changed)

    def settings(self) -> tuple[Operand | None, ...]:
        """Returns the settings of all fields."""
        return self.operands, self.probabilities, self.gradients  # pyright: ignore[reportReturnType]


ROLES: dict[str, tuple[Role, Role]] = {
    "forward": ("activation", "weight"),
    "input_gradient": ("gradient", "weight"),
    "weight_gradient": ("activation", "gradient"),
}


GRADIENT: tuple[str, Literal["gradient"]] = "input_gradient", "gradient"


def _as_operand(given: Operand | BlockFormatLike | None) -> Operand | None:
    if given is None or isinstance(given, Operand):
        return given
    return Operand(as_format(given, "Operand", blocks=True))


def operand_format(
    fmt: BlockFormatLike | None, where: str = "Recipe"
) -> Format | BlockFormat | None:
    """Returns a format of operands; None if the compute dtype holds it."""
    if fmt is None:
        return None
    fmt = as_format(fmt, where, blocks=True)
    if isinstance(fmt, BlockFormat):
        return fmt
    if not fmt.zero:
        raise ValueError(f"{where}: {fmt.name} has no zero: it is for scales, not for operands")
    return None if fmt.mantissa_bits >= 23 and fmt.exponent_bits >= 8 else fmt


@functools.cache
def plain_operand(
    fmt: Format | BlockFormat, scaling: Scaling, per: Literal["tensor", "channel"]
) -> Operand:
    return Operand(fmt, scaling, "tensor" if isinstance(fmt, BlockFormat) else per)


def _transform(operand: Operand | None) -> tuple[int, str]:
    if operand is None or operand.hadamard < 2:
        return 0, "fixed"
    return operand.hadamard, operand.signs
