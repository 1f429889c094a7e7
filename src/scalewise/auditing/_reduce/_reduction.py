"""``Reduction``: a program of a few operations that shows a finding, as a Python file."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console

from ... import autoscaling as autoscaling_
from ... import devices as devices_
from ... import formats as formats_
from ... import scaled as scaled_
from ..._output import Printed, check_writable, replacing
from ..._output._text import Text
from ...autocasting import Autocast, Policy, Rule
from ...autoscaling import Boundaries, EveryOp, FormatOverrides, Recipe
from ...autoscaling.recipes import CATALOGUE
from ...emulating import Emulation
from ...formats import BF16, FP16, FP32
from ...interpret import Equation, is_float
from ...primitives import Family, names
from ._graph import Origin
from ._render import Slice

LOADED = "inputs = LOADED"
LOADING = 'inputs = dict(np.load(Path(__file__).with_suffix(".npz")))'
EMBEDDED = 256  # numbers up to which inputs are written into the file
TEMPLATES = Environment(
    loader=PackageLoader("scalewise.auditing._reduce", "."),
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip
CASTS = {FP16: "float16", BF16: "bfloat16", FP32: "float32"}
MOVES = names(lambda row: row.family is Family.STRUCTURAL)
IMPORTED = (autoscaling_, scaled_, formats_, devices_)  # modules with the names in a recipe's text


@dataclasses.dataclass(frozen=True)
class ReducedArithmetic:
    """The arithmetic of the low-precision run, and the dtype of the reference run."""

    dtype: Any  # float32 or float64
    low: Any  # the emulation of a format, or a policy's or recipe's interpretation

    @property
    def wide(self) -> str:
        return np.dtype(self.dtype).name

    @property
    def emulates(self) -> bool:
        return isinstance(self.low, Emulation)

    @property
    def name(self) -> str:
        if self.emulates:
            return self.low.fmt.name.upper()
        return "policy" if isinstance(self.low, Autocast) else "recipe"

    @property
    def holds(self) -> Callable[[float], bool] | None:
        def is_held(number: float) -> bool:
            code = self.low.fmt.encode(np.float64(number), saturate=self.low.saturate)
            return float(self.low.fmt.decode(code)) == number

        return is_held if self.emulates else None

    def apply(self, equation: Equation, arrays: Sequence[ArrayLike]) -> list[Any]:
        dtype = None if self.emulates else jnp.float32
        lows = [
            self.low.lift(jnp.asarray(x, dtype), a) if is_float(a) else x
            for x, a in zip(arrays, equation.in_avals, strict=True)
        ]
        outs = self.low.apply((), equation, lows)[1]
        lowered = zip(outs, equation.out_avals, strict=True)
        return [y if self.emulates or not is_float(a) else self.low.lower(y, a) for y, a in lowered]

    def values(self, piece: Slice) -> dict[str, Any]:
        """Returns what the template of the file gets."""
        if self.emulates:
            floats = {n for n, o in piece.inputs.items() if is_float(o.aval)}
            return {"lines": piece.lines, "floats": floats, "low": self._rounding(), "imports": []}
        if isinstance(self.low, Autocast):
            policy = self._policy(piece)
            imports = ["from scalewise.autocasting import Rule"] if policy.rules else []
            found = {"run": "autocast", "setting": f"policy = {_policy_text(policy)}"}
            return found | {"imports": imports, "lines": piece.lines}
        text, imports = recipe_text(self._recipe(piece))
        found = {"run": "autoscale", "setting": f"recipe = {text}"}
        return found | {"imports": imports, "lines": list(self._scoped(piece))}

    def _rounding(self) -> str:
        x, fmt, saturate = f"jnp.asarray(x, jnp.{self.wide})", self.low.fmt, self.low.saturate
        if fmt in CASTS and not saturate:
            return f"{x}.astype(jnp.{CASTS[fmt]}).astype(jnp.{self.wide})"
        option = f", saturate={saturate!r}" if saturate else ""
        return f"scalewise.round_to({x}, {fmt.name!r}{option}).astype(jnp.{self.wide})"

    def _scoped(self, piece: Slice) -> Iterator[str]:
        """Yields the lines of a slice within the scopes that they have in the audited program."""
        lines = [
            (origin.equation.scope if origin.equation else "", f"{name} = {name} * 1.0")
            for name, origin in piece.inputs.items()
            if is_float(origin.aval) and _is_computed(origin)
        ]
        for operation, line in zip(piece.operations, piece.lines, strict=True):
            assert operation.equation is not None
            lines.append((operation.equation.scope, line))
        before = ""
        for scope, line in lines:
            if scope and scope != before:
                yield f"with jax.named_scope({scope!r}):"
            yield f"{'    ' if scope else ''}{line}"
            before = scope

    def _recipe(self, piece: Slice) -> Recipe:
        """Returns the recipe without exceptions for other operations, which it would refuse."""
        own: Recipe = self.low.recipe
        equations = [o.equation for o in piece.operations if o.equation is not None]

        def applies(entry: Any) -> bool:
            found = FormatOverrides((entry,))
            return any(found.find(e, own) is not own for e in equations)

        return dataclasses.replace(own, keep=tuple(filter(applies, own.keep)))

    def _policy(self, piece: Slice) -> Policy:
        """Returns a policy that runs a slice's operations as the audited one does.

        Its rules name primitives, since the functions and scopes aren't in the file.
        """
        own: Policy = self.low.policy
        plain, rules = Policy(compute=own.compute), {}
        for origin in piece.operations:
            equation = origin.equation
            assert equation is not None
            run = own.run(equation)
            if rules.setdefault(equation.name, run) != run:
                raise ValueError(
                    f"the policy runs one {equation.name} of the slice as {rules[equation.name]!r} "
                    f"and another one as {run!r}, which no rule by primitive says"
                )
        kept = {
            name: run for name, run in rules.items()
            if run != ("low" if name in plain.low else "full" if name in plain.full else "follow")
        }  # fmt: skip
        return dataclasses.replace(
            plain, rules=tuple(Rule(run, primitive=name) for name, run in kept.items())
        )


def source(
    own: ReducedArithmetic, piece: Slice, inputs: str, finding: str = "", operations: int = 0
) -> str:
    """Returns the file of a slice, whose ``results()`` computes it in both arithmetics; ``inputs``
    defines those, and the audited program ran so many operations up to there."""
    values = {"run": "", "setting": "", "floats": (), "low": ""} | own.values(piece)
    values["lines"] = [line.replace("FLOAT", f"jnp.{own.wide}") for line in values["lines"]]
    both = own.wide == "float64"
    text = {"finding": finding, "operations": operations, "inputs": inputs}
    return TEMPLATES.get_template("reduced.py.j2").render(
        piece=piece, name=own.name, wide=own.wide, both=both, **text, **values
    )


def run(code: str, arrays: Mapping[str, ArrayLike]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the results of a file that takes its inputs from ``LOADED``."""
    names: dict[str, Any] = {"__name__": "reduced", "LOADED": arrays}
    exec(compile(code, "reduced.py", "exec"), names)
    low, wide = names["results"]()
    return np.asarray(low), np.asarray(wide)


def results(
    own: ReducedArithmetic, piece: Slice, arrays: Mapping[str, ArrayLike]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a slice's file computes of some inputs: in the arithmetic, and in its dtype."""
    return run(source(own, piece, LOADED), arrays)


def arithmetic(low: Any, dtype: Any) -> ReducedArithmetic | None:
    """Returns the arithmetic of an audit; None for an interpretation that a file can't name."""
    match low:
        case Emulation():
            return ReducedArithmetic(dtype, Emulation(low.fmt, low.saturate))
        case Autocast() | Boundaries() | EveryOp():
            return ReducedArithmetic(dtype, low)
    return None


def recipe_text(recipe: Recipe) -> tuple[str, list[str]]:
    known = next((name for name, one in CATALOGUE.items() if one == recipe), None)
    if known is not None:
        return f"scalewise.recipes.{known}", []
    text = repr(recipe)
    modules = {
        name: module for module in IMPORTED for name in sorted(set(re.findall(r"\b[A-Z]\w*", text)))
        if hasattr(module, name)
    }  # fmt: skip
    names = {name: getattr(module, name) for name, module in modules.items()} | {"re": re}
    try:
        made = eval(text, names)
    except Exception as error:
        raise ValueError(f"the recipe can't be written as Python: {text} ({error})") from None
    if made != recipe:
        raise ValueError(f"the recipe can't be written as Python: {text}")
    imports = [f"from {module.__name__} import {name}" for name, module in modules.items()]
    return text, (["import re"] if "re.compile" in text else []) + imports


def _policy_text(policy: Policy) -> str:
    rules = ", ".join(f"Rule({rule.run!r}, primitive={rule.primitive!r})" for rule in policy.rules)
    own = f", rules=({rules},)" if rules else ""
    return f"scalewise.Policy(compute={np.dtype(policy.compute).name!r}{own})"


def _is_computed(origin: Origin) -> bool:
    if origin.equation is None:
        return False
    if origin.equation.name not in MOVES:
        return True
    return any(is_float(o.aval) and o.constant is None and _is_computed(o)
               for o in origin.operands)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Reduction(Printed):
    """The smallest program found that shows a finding.

    Attributes:
        finding: a sentence: kind, place and evidence.
        arithmetic: the format, or the policy or recipe.
        piece: the operations.
        inputs: their inputs, by name; floats as the reference run has them.
        operations: how many operations the audited program ran up to there.
        low, wide: the result in the format, and in float32 (or float64).
    """

    finding: str
    arithmetic: ReducedArithmetic
    piece: Slice
    inputs: dict[str, np.ndarray]
    operations: int
    low: np.ndarray
    wide: np.ndarray

    @property
    def code(self) -> str:
        """The program; it reads inputs of more than 256 numbers from a file beside it."""
        inputs = "\n".join(_embedded(self.inputs)) if self.is_small else LOADING
        finding = self.finding.replace("\\", "/").replace('"""', "'''") + "."
        return source(self.arithmetic, self.piece, inputs, finding, self.operations)

    @property
    def is_small(self) -> bool:
        """Whether the inputs are written into the program."""
        sizes = (x.size for x in self.inputs.values() if not (x == x.flat[:1]).all())
        return sum(sizes) <= EMBEDDED

    def show(self, console: Console | None = None) -> None:
        """Prints the program."""
        (console or Console()).print(Text(self.code))

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns what the program computes, in the arithmetic and in its dtype."""
        with jax.enable_x64(self.arithmetic.dtype == np.float64):
            return run(self.code.replace(LOADING, LOADED), self.inputs)

    def __repr__(self) -> str:
        count = f"{len(self.piece.lines)} of {self.operations} operations"
        return f"<Reduction to {count}: {self.finding}; show(), save('case.py')>"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the program and, unless they are small, its inputs as ``.npz`` beside it.

        Raises:
            ValueError: the name doesn't end with ``.py``; no such folder, or not a regular file.
            OSError: a file can't be written.
        """
        path = Path(path)
        if path.suffix != ".py":
            raise ValueError(f"save({str(path)!r}): expected a name that ends with .py")
        check_writable(path)
        if not self.is_small:
            with replacing(path.with_suffix(".npz")) as file:
                np.savez(file, **self.inputs)  # pyright: ignore[reportArgumentType]
        with replacing(path) as file:
            file.write(self.code.encode())
        return path


def _embedded(inputs: dict[str, np.ndarray]) -> list[str]:
    lines = ["inputs = {"]
    for name, x in inputs.items():
        if x.size > 1 and (x == x.flat[0]).all():
            text = f"np.full({x.shape}, {_nested(x.flat[0].item(), x.dtype)}, np.{x.dtype.name})"
        else:
            text = f"np.array({_nested(x.tolist(), x.dtype)}, np.{x.dtype.name})"
        lines.append(f'    "{name}": {text},')
    return [*lines, "}"]


def _nested(x: Any, dtype: np.dtype) -> str:
    if isinstance(x, list):
        return f"[{', '.join(_nested(y, dtype) for y in x)}]"
    if not isinstance(x, float):
        return repr(x)
    if not np.isfinite(x):
        return f"np.{x!r}" if x != -np.inf else "-np.inf"
    return repr(float(str(dtype.type(x))))
