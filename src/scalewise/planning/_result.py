"""``Plan``: the result of :func:`plan`, as a table, a page, a recipe, a config for serving."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

from .._output import Rows, Tabular, counted, plain, tables_page
from .._types import Json
from ..autoscaling import Operand, Products, Recipe, Role
from ..checkpoints import Layout, Strategy, writable
from ..checkpoints import compressed_tensors as quantization_groups
from ..formats import E8M0, BlockFormat


@dataclasses.dataclass(frozen=True)
class PlanLine:
    """The formats of the products at one place, and their effect."""

    name: str  # the places, as ``Recipe.keep`` names them: several, if they share a weight
    function: str  # the user's function that has the line
    primitives: tuple[str, ...]
    weights: tuple[str, ...]  # the paths of the arguments
    operands: Mapping[Role, Operand | None]  # how they are rounded, by role; None: unrounded
    bits: float  # of a weight
    elements: int  # how many numbers the weights have
    among_others: float  # what these roundings do in the mean of all plans of the other lines
    alone: float  # what they do without any other rounding
    share: float  # of ``alone`` among all lines
    note: str  # where these differ, and which decisions may change

    @property
    def formats(self) -> str:
        """The formats in words: ``"weight nvfp4, activation bf16"``."""
        named = {r: "unrounded" if x is None else x.format.name for r, x in self.operands.items()}
        return ", ".join(f"{role} {name}" for role, name in named.items()) or "as written"


@dataclasses.dataclass(frozen=True)
class FrontPoint:
    """A plan that none beats in both bits and predicted error."""

    bits: float
    predicted: float


@dataclasses.dataclass(frozen=True)
class Plan(Tabular):
    """The formats of a program's products, and their bits; :meth:`show` prints them."""

    function: str
    objective: str  # what is kept small, in words
    bits: float  # the mean of a weight
    predicted: float  # the objective by runs with one rounding each, and of random plans
    measured: float  # the objective under ``autoscale`` with the plan's recipe
    recipe: Recipe  # rounds the operands that the plan says, and nothing else
    lines: tuple[PlanLine, ...]  # the products by place, in the program's order
    front: tuple[FrontPoint, ...]  # the Pareto front, from the cheapest plan on
    runs: int  # emulated
    exact: bool  # whether the front is exact, or thinned out to 16,384 plans on the way

    @property
    def verdict(self) -> str:
        """A sentence: the bits and the objective."""
        return (
            f"{self.function} with {figure(self.bits)} bits a weight: {self.objective} "
            f"{figure(self.measured)} (predicted {figure(self.predicted)})."
        )

    def python(self) -> str:
        """Returns Python that makes the recipe."""
        names: dict[Products, str] = {}
        lines = {name: line for line in self.lines for name in line.name.split(", ")}
        for name, products in self.recipe.keep:
            if isinstance(products, Products) and products not in names:
                operands = lines[str(name)].operands
                label = "_".join(f"{r}_{x.format.name}" for r, x in operands.items() if x)
                unique = label if label not in names.values() else f"{label}_{len(names)}"
                names[products] = unique
        made = [
            f"{name} = " + re.sub(r"\b([A-Z]\w+)(?=[.(])", r"sw.\1", repr(x))
            for x, name in names.items()
        ]
        kept = [(n, names[x] if isinstance(x, Products) else repr(x)) for n, x in self.recipe.keep]
        rows = [f"        {n!r}: {x}," for n, x in kept]
        return "\n".join(
            ["import scalewise as sw", "", *made, "recipe = sw.Recipe(",
             "    sw.Products.short(None, None),", "    residuals=None,", "    narrow='always',",
             "    keep={", *rows, "    },", ")", ""]
        )  # fmt: skip

    def compressed_tensors(self, rename: Callable[[str], str] = str) -> dict[str, Json]:
        """Returns ``quantization_config`` of compressed-tensors, with its ``config_groups``.

        Args:
            rename: returns the name that a module has in the served model, from the path of the
                argument here (``"blocks.0.qkv"``).
        """
        layers: dict[str, Layer] = {}
        for x in self.lines:
            for name in map(module_name, x.weights):
                layer = name, x.operands.get("weight"), x.operands.get("activation")
                if layers.setdefault(name, layer) != layer:
                    raise ValueError(
                        f"this plan gives parts of {name} different formats, which a file can't "
                        "hold: make each part an argument of its own"
                    )
        if not layers:
            raise ValueError("this plan rounds no weights: there is nothing to export")
        return compressed_tensors([*layers.values()], rename)

    @property
    def title(self) -> str:
        return f"Formats for {self.function}"

    @property
    def heading(self) -> str:
        return f"plan  {self.function}   {counted(self.runs, 'run')}"

    def sentences(self) -> list[str]:
        return [self.verdict]

    def __repr__(self) -> str:
        return f"<Plan of {self.verdict} show(), save('plan.html'), .recipe, python()>"

    def as_dict(self) -> dict[str, Json]:
        lines = [
            vars(x) | {"operands": {r: o and repr(o) for r, o in x.operands.items()}}
            for x in self.lines
        ]
        own = {"verdict": self.verdict, "recipe": repr(self.recipe), "lines": lines}
        return plain(vars(self) | own | {"front": [vars(p) for p in self.front]})

    def tables(self, *, everything: bool = True) -> list[Rows]:
        heads = ("line", "weights", "formats", "bits", "numbers", "among others", "alone", "note")
        rows = [
            [
                x.name,
                ", ".join(map(module_name, x.weights)),
                x.formats,
                f"{x.bits:.2f}" if x.elements else "",
                f"{x.elements:,}",
                figure(x.among_others),
                f"{figure(x.alone)} ({x.share:.0%})",
                x.note,
            ]
            for x in self.lines
        ]
        front = [[figure(x) for x in dataclasses.astuple(p)] for p in self.front]
        of_front = Rows("Pareto front", ("bits a weight", "predicted"), front)
        return [Rows("Lines", heads, rows), of_front]

    def _page(self) -> str:
        thinned = "" if self.exact else ", thinned out to 16,384 plans on the way"
        said = f"The front is as predicted{thinned}. The recipe is below."
        return tables_page(self.title, [self.verdict, said], self.tables(), code=self.python())


def figure(x: float | None) -> str:
    return "" if x is None else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


Layer = tuple[str, Operand | None, Operand | None]  # its name, its weight, its activation
Rename = Callable[[str], str]
KEY = re.compile(r"\['((?:[^'\\]|\\.)*)'\]|\[\"([^\"]*)\"\]|\[(\d+)\]|\.(\w+)")
WIDE_BITS = 16


def module_name(path: str) -> str:
    """Returns ``blocks.1.qkv`` of an argument's path ``[0]['blocks'][1]['qkv']``."""
    keys = [next(x for x in found if x) for found in KEY.findall(path)]
    if path.startswith("[") and len(keys) > 1 and keys[0].isdigit():
        keys = keys[1:]  # the position of the argument
    name = re.sub(r"^states\.\d+\.", "", ".".join(keys) or path)  # of Flax NNX's objects
    return re.sub(r"(\.(weight|kernel|w|value))+$", "", name)


def compressed_tensors(layers: Sequence[Layer], rename: Rename) -> dict[str, Json]:
    kinds: dict[tuple[Operand, Operand | None], list[str]] = {}
    ignored = []
    for name, weight, activation in layers:
        if (weight := _narrow(weight)) is None:
            ignored.append(rename(name))
        else:
            kinds.setdefault((weight, _narrow(activation)), []).append(rename(name))
    groups = [
        (_layout(weight), activation and _activation(activation), names)
        for (weight, activation), names in kinds.items()
    ]
    return quantization_groups(groups, ignored)


def _narrow(operand: Operand | None) -> Operand | None:
    """Returns None for formats that are dtypes, too: what is in one isn't quantised."""
    if operand is None or isinstance(operand.format, BlockFormat):
        return operand
    return operand if operand.format.bits < WIDE_BITS else None


def _layout(operand: Operand) -> tuple[Layout, Strategy]:
    layout = writable("compressed-tensors", operand.format.name)
    return layout, layout.block or ("channel" if operand.per == "channel" else "tensor")


def _activation(operand: Operand) -> dict[str, Json]:
    common = {"num_bits": operand.format.element.bits, "symmetric": True, "type": "float"}
    fmt = operand.format
    if not isinstance(fmt, BlockFormat):
        strategy = "token" if operand.per == "channel" else "tensor"
        return {**common, "dynamic": True, "strategy": strategy}
    blocks = {**common, "group_size": fmt.size}
    if fmt.scale == E8M0:
        return {**blocks, "dynamic": True, "strategy": "group", "scale_dtype": "torch.uint8"}
    scale = {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    return {**blocks, "dynamic": "local", **scale}
