"""``explain``: lists the format and the scale of each contraction and stored value of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax

from .._check import checked
from .._decorator import Params, Pending
from .._output import Printed, one_output, place, print_rows
from .._types import PyTree
from ..formats import BlockFormat, BlockFormatLike, Format
from ..formats import format as format_
from ..interpret import Argument, Equation, Value, is_array, transform
from ..scalifying import Scalify
from ._boundaries import interpretation
from ._history import OperandAmaxes
from ._operand_settings import Operand
from ._quantized import QuantizedValue
from ._recipe import Recipe, RecipeLike
from .recipes import fp16
from .recipes import recipe as recipe_

if TYPE_CHECKING:
    from rich.console import Console

Kind = Literal["contraction", "result", "residual", "carry", "stacked", "collective", "output"]


@dataclasses.dataclass(frozen=True)
class ExplanationRow:
    """The format and the scale of one contraction, or of one stored value.

    Attributes:
        kind: ``"contraction"``; ``"result"`` of any other operation (``scalify``);
            ``"residual"``, read by the backward pass; ``"carry"`` of a loop; ``"stacked"`` by a
            scan; ``"collective"``, sent between devices; ``"output"``.
        name: the primitive; of a residual, the one that reads it; of an output, its path.
        shape: of the value, or of the contraction's result. A symbolic dimension is text.
        format: the format's name; of a contraction, those of its operands: ``"e4m3fn x e5m2"``.
        scale: how the scale is found, ``"none"`` without a scale, ``"stored"`` of an argument that
            is quantized; of a contraction, for each operand if they differ, or why the recipe
            leaves it alone (:attr:`Recipe.narrow`).
        direction: ``"forward"``, ``"backward"`` or ``"update"`` (an optimizer).
        file: of the user's code; empty if unknown, as for outputs.
        line: in the file; 0 if unknown.
        function: that contains the line.
    """

    kind: Kind
    name: str
    shape: tuple[int | str, ...]
    format: str
    scale: str
    direction: str
    file: str = ""
    line: int = 0
    function: str = ""


@dataclasses.dataclass(frozen=True)
class Explanation(Printed):
    """The result of :func:`explain`: a row for each contraction and stored value, in program order.

    Attributes:
        recipe: for which the program was explained.
        rows: of the program; values of one loop or equation that agree in all else share a row.
    """

    recipe: Recipe | Scalify
    rows: tuple[ExplanationRow, ...]

    def show(self, console: Console | None = None) -> None:
        """Prints the table."""
        heads = ("kind", "name", "shape", "format", "scale", "direction", "source")
        rows = []
        for r in self.rows:
            source = f"{place(r.file, r.line)} ({r.function})" if r.file else ""
            shape = "x".join(map(str, r.shape)) or "()"
            rows.append((r.kind, r.name, shape, r.format, r.scale, r.direction, source))
        with one_output(console) as one:
            print_rows(one, heads, rows)

    def to_rows(self) -> list[Mapping[str, object]]:
        """Returns the rows as dictionaries that ``json.dumps`` accepts."""
        return [dataclasses.asdict(row) | {"shape": list(row.shape)} for row in self.rows]

    def __repr__(self) -> str:
        return f"<Explanation of {len(self.rows)} values under {self.recipe}; show(), to_rows()>"


@checked
def explain(f: Callable[Params, Any], recipe: RecipeLike = fp16) -> Callable[Params, Explanation]:
    """Returns a function of ``f``'s arguments that lists what ``autoscale(f, recipe)`` stores.

    Rows are recorded where ``autoscale`` decides on a format while it traces the program, so that
    they describe the program that runs. Nothing is computed. Residuals are only listed if ``f``
    computes its own gradient: explain a whole training step.

    Args:
        f: any function that :func:`autoscale` takes.
        recipe: a :class:`Recipe`, or the name of one.

    Returns:
        A function that returns an :class:`Explanation`. Its arguments may be arrays or their types
        (``jax.ShapeDtypeStruct``).

    Raises:
        TypeError, ValueError: as :func:`autoscale`.

    Example:
        >>> import jax, jax.numpy as jnp, scalewise as sw
        >>> def f(x, w):
        ...     with jax.named_scope("head"):
        ...         return jnp.tanh(x @ w)
        >>> x, w = jnp.ones((8, 16)), jnp.ones((16, 4))
        >>> for row in sw.explain(f, "fp8")(x, w).rows:
        ...     print(row.kind, row.name, row.format, row.scale, row.direction)
        contraction dot_general e4m3fn x e4m3fn amax forward
        output [] fp32 none forward
    """
    recipe = recipe_(recipe)

    def explained(*args: PyTree, **kwargs: PyTree) -> Explanation:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = {
            i: x for i, x in enumerate(leaves) if is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
        }
        record = _Recorder()
        amaxes = OperandAmaxes(newest={}) if recipe.is_delayed else None
        by = interpretation(recipe, amaxes=amaxes, record=record)

        def dry(arrays: Mapping[int, Argument]) -> list[Value]:
            args, kwargs = tree.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
            outs = transform(f, by, name="explain")(*args, **kwargs)
            return [x for x in jax.tree.leaves(outs) if isinstance(x, jax.Array)]

        jax.eval_shape(dry, arrays)
        by.overrides.check("explain")
        return Explanation(recipe, record.result())

    return Pending(explained, "explain")


class _Recorder:
    """Collects rows, each once however often a loop's body is traced."""

    def __init__(self):
        self.rows: dict[Hashable, ExplanationRow] = {}

    def __call__(
        self,
        kind: Kind,
        where: Equation | str,
        shape: Sequence[int],
        formats: Sequence[Operand | QuantizedValue | BlockFormatLike],
        scale: str | None = None,
    ) -> None:
        """Adds a row; ``where`` is an equation or an output's path, ``formats`` the operands'."""
        plain = [f.format if isinstance(f, Operand | QuantizedValue) else f for f in formats]
        known = [f if isinstance(f, Format | BlockFormat) else format_(f) for f in plain]
        scales = [scale or _scale(f) for f in formats]
        text = scales[0] if len(set(scales)) == 1 else " x ".join(scales)
        dims = tuple(int(n) if isinstance(n, int) else str(n) for n in shape)
        if isinstance(where, str):
            key, name, direction, place = where, where or "[]", "forward", ("", 0, "")
        else:
            key, name, direction = (where.path, where.name), where.name, where.direction
            place = where.source or ("", 0, "")
        format = " x ".join(f.name for f in known)
        row = ExplanationRow(kind, name, dims, format, text, direction, *place)
        self.rows.setdefault((kind, key, dims, row.format), row)

    def result(self) -> tuple[ExplanationRow, ...]:
        rows = self.rows.values()
        if any(row.direction == "backward" for row in rows):
            last = [dataclasses.replace(r, direction="update") for r in rows if r.kind == "output"]
            return (*(r for r in rows if r.kind != "output"), *last)
        # a program without a backward pass has no optimizer
        return tuple(dataclasses.replace(row, direction="forward") for row in rows)


def _scale(given: Operand | QuantizedValue | BlockFormatLike) -> str:
    if isinstance(given, QuantizedValue):
        return "stored"
    if not isinstance(given, Operand):
        if isinstance(given, BlockFormat):
            return f"one for {given.size} elements"
        return "amax" if isinstance(given, Format) else "none"
    how = given.scaling.name or type(given.scaling).__name__
    if isinstance(given.format, BlockFormat):
        tile = f"{given.tile} x " if given.tile > 1 else ""
        own = given.scaling.of_blocks()
        how = f"one for {tile}{given.format.size} elements"
        how = f"{how}, {own.name}" if own is not None and own.name != "mx" else how
    elif given.per == "channel":
        how = f"{how} per channel"
    rounding = [] if given.rounding == "nearest_even" else [given.rounding]
    transform = [f"hadamard {given.hadamard}"] if given.hadamard > 1 else []
    return ", ".join([how, *transform, *rounding])
