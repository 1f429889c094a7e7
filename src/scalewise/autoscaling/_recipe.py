"""Recipes: which values are stored narrow, in which format, with which scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, Unpack

from .._check import Natural, checked
from .._repr import changed_fields
from .._resolve import as_format
from .._types import Converted, kept
from ..devices import MatrixUnits, MatrixUnitsLike, matrix_units
from ..devices import device as device_
from ..formats import FP16, BlockFormat, BlockFormatLike, Format, FormatLike
from ..scaled import State, shown, storable
from ..scalifying import Scalify, Scope
from ._operand_settings import (
    CURRENT,
    Attention,
    Operand,
    OperandPair,
    Products,
    ShortForm,
    operand_format,
    plain_operand,
)

Kept: TypeAlias = Format | BlockFormat | Products | None
KeptLike: TypeAlias = BlockFormatLike | Products | None  # what an argument ``keep`` may give
KeepLike: TypeAlias = Annotated[
    Mapping[Scope, KeptLike] | tuple[tuple[Scope, KeptLike], ...],
    "a dict from names to formats, keep={'head': 'fp32'}",
]
HALF = Products.short(FP16, FP16)


@checked
@dataclasses.dataclass(frozen=True, repr=False)
class Recipe:
    """The formats and scales by which :func:`autoscale` rounds.

    A recipe is how each operand of the three products of a layer (forward, input gradient, weight
    gradient) is rounded, and what holds for the whole program. Published ones have names
    (:mod:`scalewise.recipes`: ``"fp8"``, ``"mxfp8"``, ``"nvfp4"``), and ``dataclasses.replace``
    derives others from them.

    Attributes:
        products: how each operand of each of the three products is rounded;
            :meth:`Products.short` makes those that round all operands from the forward pass alike,
            and all that carry a gradient. Operands that ``residuals`` or ``keep`` give another
            format have the scaling of a short form, else one scale, their largest magnitude's.
        residuals: format of all other values of the forward pass that the backward pass reads or
            computes its inputs from; also of attention's operands if the other operands have at
            most 8 bits and ``attention`` is None. Each array has one scale. An array among whose
            numbers a large constant of the program may be (a mask's) has a second one for the
            numbers above a gap in its magnitudes, if that is wider than the format's normal numbers
            reach.
        attention: how the operands of attention's products are rounded, see :class:`Attention`;
            None: in ``residuals``.
        collective: format in which a ``shard_map``'s all_gather, all_to_all, ppermute and psum send
            their data, with a scale common to all devices; None sends the compute dtype. A psum is
            a gather and a sum; one over so many devices that this sends more bytes than a ring's
            sum is left alone (in 8 bits: over more than 4 of bfloat16, 8 of float32).
        state: pairs of a regular expression and a :class:`Storage`; an output whose path (as
            ``jax.tree_util.keystr`` prints it) matches is returned stored so.
        min_size: residuals and messages with fewer elements (for example the statistics of a norm,
            a loss) stay in the compute dtype, since a narrow copy saves less than its scale costs.
        features: a contraction of fewer features (an image's one or three channels, a convolution
            that makes one, a depthwise convolution) has operands in ``residuals``: no hardware
            multiplies so few in FP8, and the whole input or output of a network passes through
            them.
        flight: dtype of values in flight. ``"program"``: bfloat16 where the program computes in
            bfloat16, float32 for all other floats of at most 32 bits; a value in flight that takes
            no more memory than a 16-bit storage or operand format isn't rounded. ``"float32"``:
            float32 throughout. float64 stays float64.
        keep: exceptions, ``{name: format}``: equations of that primitive, or in that scope (a
            ``jax.named_scope``, a Flax module; ``"block_0/attention"`` for one within another), or
            whose scope holds a pattern (``re.compile("^block_(0|11)/")``, of the names joined by
            ``/``), or on a line (``"model.py:12"``; ``"block_0 model.py:12#2"`` for the second
            contraction of that line within a scope), have operands and residuals in that format;
            FP32 leaves them unrounded. :class:`Products` in place of a format say how operands are
            rounded, also those between activations. The first match decides.
        device: a name of :data:`scalewise.devices.DEVICES`, for whose matrix units products are
            compiled unless the program is lowered for a CPU. None: the device of JAX's default
            backend, or an H100 if that isn't in the table. Name a device to compile ahead of time
            for it. Operands that its units don't multiply are widened, with a warning.
        narrow: ``"faster"``: for a known device other than a CPU, a product whose narrow operands
            would make it slower is left as the program has it: convolutions and formats without
            units, small products, products whose operands take longer to convert than they save, by
            the device's operations and bytes a second. A CPU rounds all of them, to show what the
            formats do. ``"always"``: on every device.
        emulate: a device's name or :class:`~scalewise.devices.MatrixUnits`: products of rounded
            operands are added on every platform as these units add them, bit for bit, where they
            multiply the formats, which takes much longer than the platform's own product. None: as
            the platform adds them.

    Raises:
        ValueError: an unknown format or name, or a contradictory combination.

    Example:
        >>> import dataclasses, scalewise as sw
        >>> sw.Recipe(sw.Products.short("e4m3fn", "e5m2")) == sw.recipes.fp8
        True
        >>> dataclasses.replace(sw.recipes.fp8, keep={"head": "bf16"})
        Recipe(products=Products.short('e4m3fn', 'e5m2'), keep=(('head', 'bf16'),))
    """

    products: Products = HALF
    residuals: Converted[Format | None, FormatLike | None] = kept(FP16)
    attention: Attention | None = None
    collective: Converted[Format | None, FormatLike | None] = kept(None)
    state: State = ()
    min_size: Natural = 8192
    features: Natural = 4
    flight: Literal["program", "float32"] = "program"
    keep: Converted[tuple[tuple[Scope, Kept], ...], KeepLike] = kept(())
    device: str | None = None
    narrow: Literal["faster", "always"] = "faster"
    emulate: Converted[MatrixUnits | None, MatrixUnitsLike | None] = kept(None)

    def __post_init__(self):
        pairs: Any = self.keep.items() if isinstance(self.keep, Mapping) else self.keep
        own: dict[str, object] = {
            "device": None if self.device is None else device_(self.device).name,
            "emulate": None if self.emulate is None else matrix_units(self.emulate),
            "keep": tuple(
                (n, x if isinstance(x, Products) else operand_format(x)) for n, x in pairs
            ),
        }
        for field in ("residuals", "collective"):
            fmt = getattr(self, field)
            if fmt is not None:
                own[field] = storable(as_format(fmt, f"Recipe.{field}"))
        settings = () if self.attention is None else self.attention.settings()
        if not self.is_delayed and any(x and x.scaling.source == "history" for x in settings):
            raise ValueError(
                "Recipe.attention has delayed scaling, products has not; use it for both, as "
                "dataclasses.replace(recipes.fp8_delayed, attention=...) does"
            )
        for field, value in own.items():
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        return f"Recipe({', '.join(changed_fields(self, text=shown))})"

    @property
    def is_delayed(self) -> bool:
        """Whether scales come from the steps before, see :class:`WithHistory`."""
        return self.products.scaling.source == "history"

    @property
    def is_random(self) -> bool:
        """Whether operands are rounded or transformed by random numbers."""
        own = () if self.attention is None else self.attention.settings()
        return self.products.is_random or any(x is not None and x.is_random for x in own)

    def setting(self, fmt: Format | BlockFormat) -> Operand:
        """Returns how operands are rounded to a format that ``products`` doesn't give them."""
        scaling = self.products.scaling
        current = scaling.for_blocks and isinstance(fmt, Format)
        return plain_operand(fmt, CURRENT if current else scaling, self.products.per)

    def with_operands(self, **changes: Unpack[ShortForm]) -> Recipe:
        """Returns the recipe with changed arguments of :meth:`Products.short`.

        Without delayed scaling ``attention`` has none either.

        Raises:
            ValueError: its products have operands of more than two kinds.

        Example:
            >>> import scalewise as sw
            >>> sw.recipes.fp8.with_operands(backward="e4m3fn").products
            Products.short('e4m3fn', 'e4m3fn')
        """
        form = self.products.short_form
        if form is None:
            raise ValueError(
                "Recipe.with_operands: the products have operands of more than two kinds; change "
                "them by with_products"
            )
        products, attention = Products.short(**form | changes), self.attention
        if attention is not None and products.scaling.source != "history":
            attention = attention.current()
        return dataclasses.replace(self, products=products, attention=attention)

    def with_products(self, **changes: OperandPair | Literal["original", "forward"]) -> Recipe:
        """Returns the recipe with changed fields of its ``products``.

        Example:
            >>> import scalewise as sw
            >>> wide = sw.recipes.nvfp4.with_products(weight_gradient=(None, None))
            >>> wide.products.weight_gradient
            (None, None)
        """
        return dataclasses.replace(self, products=dataclasses.replace(self.products, **changes))


RecipeName: TypeAlias = Annotated[
    Literal[
        "fp16", "bf16", "fp8", "fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_rowwise_gw_hp",
        "fp8_blockwise", "mxfp8", "mxfp8_hybrid", "mxfp8_floor", "mxfp4_forward", "nvfp4",
        "fp4_all_the_way", "mxfp4", "quartet2", "quartet", "tetrajet2", "unit_scaling", "mu_s",
        "fp16_every_op", "scalify",
    ],
    str,
]  # fmt: skip
"""The name of a recipe. For a name in a variable of type str, call :func:`recipes.recipe`."""

RecipeLike: TypeAlias = Recipe | Scalify | RecipeName
"""A recipe, the settings of ``scalify``, or the name of either (``"fp8"``, ``"scalify"``)."""
