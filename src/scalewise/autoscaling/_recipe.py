"""Recipes: which values are stored narrow, in which format, with which scale."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, Unpack

from .._check import CONVERTED, Accepts, Natural, Pattern, Words, checked
from .._repr import changed_fields
from .._resolve import as_format
from ..devices import MatrixUnits, device_for, matrix_units
from ..devices import device as device_
from ..formats import BF16, FP16, BlockFormat, BlockFormatLike, Format
from ..scaled import at_least, storable
from ._operand_settings import (
    CURRENT,
    ROLES,
    Operand,
    OperandPair,
    Products,
    ShortForm,
    operand_format,
    plain_operand,
    require_native,
    shown,
)
from ._overrides import Kept, Scope

KeptLike: TypeAlias = BlockFormatLike | Products | None  # what an argument ``keep`` may give
KeepLike: TypeAlias = Annotated[
    Mapping[Scope, KeptLike] | tuple[tuple[Scope, KeptLike], ...],
    Words("a dict from names to formats, keep={'head': 'fp32'}"),
]
HALF = Products.short(FP16, FP16)


@checked
@dataclasses.dataclass(frozen=True)
class Storage:
    """How one array of a training state is stored between two steps.

    Attributes:
        format: the narrow format of the data; or a block format of whole bytes (MXFP8), with a
            scale for each block along the last axis. An array without axes has one scale.
        root: 1 stores the array itself, 2 its square root, for non-negative arrays such as a second
            moment, whose exponents span twice the gradient's.
        axis: axes that keep a scale for each of their indices; None for one scale a tensor.
        min_size: arrays with fewer elements (biases, a norm's gains) aren't stored, since each
            stored array adds a few operations to trace, compile and run.
        nonzero: True to round a nonzero number that would become zero to the format's smallest
            number, for arrays that are divisors. Square roots are always stored so.
    """

    format: Annotated[Format | BlockFormat, CONVERTED]
    root: Literal[1, 2] = 1
    axis: int | tuple[int, ...] | None = None
    min_size: Natural = 0
    nonzero: bool = False

    def __post_init__(self):
        fmt = as_format(self.format, "Storage.format", blocks=True)
        storable(fmt.element)
        object.__setattr__(self, "format", fmt)


@checked
@dataclasses.dataclass(frozen=True)
class Results:
    """How each operation's result is rounded: the arithmetic of a machine without float32.

    Attributes:
        format: FP16 or BF16, with a scale for each result.
        rescale: where scales are found from the data. ``"max"``, ``"l1"``, ``"l2"`` and
            ``"least_squares"``: after each operation that can change the magnitude, by that
            measure, except that a product with a constant keeps a scale that was found from its
            operand. None: after contractions, sums, powers, quotients and functions without a rule,
            in an optimizer, and where a propagated scale could overflow the format; elsewhere
            scales are propagated, from scales that were found from the operands. In all of these
            no two roundings in succession are at propagated scales, so that a chain or loop of
            any length has the errors of its roundings alone. ``"never"``: all scales follow from
            those of the arguments (which are found for plain arrays) and from shapes, as
            :data:`scalewise.scaled.RULES` say, and data are never read to find one (but for
            :func:`rescale`); a constant multiplies the scale; functions without a rule have results
            of scale 1; data beyond the format's largest number saturate.
        arithmetic: the dtype in which contractions accumulate: ``"float32"``, ``"narrow"`` (the
            device's own product of that dtype, whose sums may overflow), or ``"auto"``, which
            chooses at run time the narrow dtype if the operands' magnitudes let no sum overflow,
            otherwise float32. That is for scales that leave data of unit size (propagated ones,
            ``rescale="l2"``); with ``"max"`` FP16's sums would overflow.
    """

    format: Annotated[Format, CONVERTED] = FP16
    rescale: Literal["max", "l1", "l2", "least_squares", "never"] | None = None
    arithmetic: Literal["float32", "narrow", "auto"] = "float32"

    def __post_init__(self):
        object.__setattr__(self, "format", as_format(self.format, "Results.format"))
        if self.format not in (FP16, BF16):
            raise ValueError(f"Results.format is {self.format.name}; expected 'fp16' or 'bf16'")

    def __repr__(self) -> str:
        return f"Results({', '.join(changed_fields(self, text=shown))})"


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
            most 8 bits.
        carry: format of a loop's carry between two iterations; None keeps the compute dtype, since
            a sum that a loop carries in a narrow format stagnates.
        collective: format in which a ``shard_map``'s all_gather and psum send their data, with a
            scale common to all devices; None sends the compute dtype.
        state: pairs of a regular expression and a :class:`Storage`; an output whose path (as
            ``jax.tree_util.keystr`` prints it) matches is returned stored so.
        min_size: residuals with fewer elements (for example the statistics of a norm) stay in the
            compute dtype, since a narrow copy saves less than its scale costs.
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
            rounded, also those between activations. The first match decides. With ``results`` they
            are computed and kept in FP32, FP16 or BF16.
        results: None rounds operands of products, residuals and stored outputs, and leaves values
            in flight in the dtype that ``flight`` says. :class:`Results` round each operation's
            result instead; ``products``, ``residuals`` and ``flight`` then say nothing.
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
        native_products: True to raise ValueError instead: every product of ``products`` has to run
            in units that multiply its formats.

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
    residuals: Annotated[Format | None, CONVERTED] = FP16
    carry: Annotated[Format | None, CONVERTED] = None
    collective: Annotated[Format | None, CONVERTED] = None
    state: Annotated[
        tuple[tuple[Pattern, Storage], ...],
        Words("pairs of a regular expression and a Storage, state=(('mu', sw.Storage('e4m3fn')),)"),
    ] = ()
    min_size: Natural = 8192
    features: Natural = 4
    flight: Literal["program", "float32"] = "program"
    keep: Annotated[tuple[tuple[Scope, Kept], ...], Accepts(KeepLike)] = ()
    results: Results | None = None
    device: str | None = None
    narrow: Literal["faster", "always"] = "faster"
    emulate: Annotated[MatrixUnits | None, CONVERTED] = None
    native_products: bool = False

    def __post_init__(self):
        pairs: Any = self.keep.items() if isinstance(self.keep, Mapping) else self.keep
        own: dict[str, object] = {
            "device": None if self.device is None else device_(self.device).name,
            "emulate": None if self.emulate is None else matrix_units(self.emulate),
            "keep": tuple(
                (n, x if isinstance(x, Products) else operand_format(x)) for n, x in pairs
            ),
        }
        for field in ("residuals", "carry", "collective"):
            fmt = getattr(self, field)
            if fmt is not None:
                own[field] = storable(as_format(fmt, f"Recipe.{field}"))
        for field, value in own.items():
            object.__setattr__(self, field, value)
        self._check_combinations()

    def __repr__(self) -> str:
        changed = [f"{n}={shown(x)}" for n, x in vars(self).items() if x != vars(DEFAULT)[n]]
        return f"Recipe({', '.join(changed)})"

    @property
    def is_delayed(self) -> bool:
        """Whether scales come from the steps before, see :class:`WithHistory`."""
        return self.products.scaling.source == "history"

    def setting(self, fmt: Format | BlockFormat) -> Operand:
        """Returns how operands are rounded to a format that ``products`` doesn't give them."""
        scaling = self.products.scaling
        current = scaling.for_blocks and isinstance(fmt, Format)
        return plain_operand(fmt, CURRENT if current else scaling, self.products.per)

    def _check_combinations(self) -> None:
        if self.native_products:
            require_native(self.products.formats(), device_for(self.device))
        if self.results is None:
            return
        for field in ("products", "residuals", "carry", "flight", "emulate"):
            if getattr(self, field) != vars(DEFAULT)[field]:
                raise ValueError(
                    f"Recipe.results rounds every result: Recipe.{field} would be ignored; leave "
                    "one of them out"
                )
        other = [f for _, f in self.keep if f not in (None, FP16, BF16)]
        if other:
            raise ValueError(
                "Recipe.results computes in fp16, bf16 or, where keep says so, fp32; "
                f"keep names {getattr(other[0], 'name', other[0])}"
            )

    def with_operands(self, **changes: Unpack[ShortForm]) -> Recipe:
        """Returns the recipe with changed arguments of :meth:`Products.short`.

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
        return dataclasses.replace(self, products=Products.short(**form | changes))

    def with_products(self, **changes: OperandPair | Literal["original", "forward"]) -> Recipe:
        """Returns the recipe with changed fields of its ``products``.

        Example:
            >>> import scalewise as sw
            >>> wide = sw.recipes.nvfp4.with_products(weight_gradient=(None, None))
            >>> wide.products.weight_gradient
            (None, None)
        """
        return dataclasses.replace(self, products=dataclasses.replace(self.products, **changes))

    def with_headroom(self, headroom: float = 17 / 16) -> Recipe:
        """Returns the recipe with a margin in the scales of blocks that are rounded stochastically.

        A block scale in E4M3 that is rounded down saturates its block's largest numbers, by up to
        1/17, which no random draw makes up for; a margin of 17/16 prevents that, so that these
        operands are unbiased. MS-EDEN's operands are rounded stochastically instead: its correction
        is unbiased in the limit of many dimensions alone.

        Example:
            >>> import scalewise as sw
            >>> sw.recipes.nvfp4.with_headroom().products.input_gradient[0].scaling
            Amax(power_of_two=False, headroom=1.0625)
        """
        pairs: dict[str, OperandPair] = {}
        for name in ROLES:
            a, b = (x and x.with_headroom(headroom) for x in self.products.pair(name))
            pairs[name] = a, b
        return self.with_products(**pairs)

    def state_storage(self, path: str, size: int) -> Storage | None:
        """Returns the storage of the first pattern found in a path; None for a smaller array."""
        found = next((s for pattern, s in self.state if re.search(pattern, path)), None)
        return found if found is not None and at_least(size, found.min_size) else None


DEFAULT = Recipe()
RecipeLike: TypeAlias = Recipe | str
"""A recipe, or the name of one (``"fp8"``)."""
