"""The arithmetics of a reduced program: a format, or a policy or recipe; how a file writes them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jinja2 import Environment, PackageLoader, StrictUndefined

from ... import autoscaling as autoscaling_
from ... import devices as devices_
from ... import formats as formats_
from ... import scaled as scaled_
from ...autocasting import Autocast, Policy, Rule
from ...autoscaling import Boundaries, EveryOp, FormatOverrides, Recipe
from ...autoscaling.recipes import CATALOGUE
from ...emulating import Emulation
from ...formats import BF16, FP16, FP32, Format, Saturation
from ...interpret import Equation, is_float
from ...primitives import Family, names
from ._graph import Origin
from ._render import Slice

LOADED = "inputs = LOADED"
TEMPLATES = Environment(
    loader=PackageLoader("scalewise.auditing._reduce", "."),
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip
CASTS = {FP16: "float16", BF16: "bfloat16", FP32: "float32"}
MOVES = names(lambda row: row.family is Family.STRUCTURAL)
IMPORTED = (autoscaling_, scaled_, formats_, devices_)  # modules with the names in a recipe's text


@dataclasses.dataclass(frozen=True)
class _Reduced:
    """The dtype of the reference run, which both arithmetics of a reduced program have."""

    dtype: Any  # float32 or float64, of the reference run

    @property
    def wide(self) -> str:
        return np.dtype(self.dtype).name


@dataclasses.dataclass(frozen=True)
class Rounded(_Reduced):
    """Each result rounded to one format."""

    fmt: Format  # fmt, saturate: as in the audit
    saturate: Saturation

    @property
    def name(self) -> str:
        return self.fmt.name.upper()

    @property
    def holds(self) -> Callable[[float], bool]:
        def is_held(number: float) -> bool:
            code = self.fmt.encode(np.float64(number), saturate=self.saturate)
            return float(self.fmt.decode(code)) == number

        return is_held

    def apply(self, equation: Equation, arrays: Sequence[ArrayLike]) -> list[Any]:
        emulation = Emulation(self.fmt, self.saturate)
        lows = [
            emulation.lift(x, a) if is_float(a) else x
            for x, a in zip(arrays, equation.in_avals, strict=True)
        ]
        return list(emulation.apply((), equation, lows)[1])

    def values(self, piece: Slice) -> dict[str, Any]:
        floats = {n for n, o in piece.inputs.items() if is_float(o.aval)}
        return {"lines": piece.lines, "floats": floats, "low": self._source, "imports": []}

    @property
    def _native(self) -> str | None:
        return None if self.saturate else CASTS.get(self.fmt)

    @property
    def _source(self) -> str:
        x = f"jnp.asarray(x, jnp.{self.wide})"
        if self._native:
            return f"{x}.astype(jnp.{self._native}).astype(jnp.{self.wide})"
        saturate = f", saturate={self.saturate!r}" if self.saturate else ""
        return f"scalewise.round_to({x}, {self.fmt.name!r}{saturate}).astype(jnp.{self.wide})"


@dataclasses.dataclass(frozen=True)
class Interpreted(_Reduced):
    """A program under a policy or recipe."""

    low: Any  # the policy's or the recipe's interpretation

    @property
    def name(self) -> str:
        return "policy" if isinstance(self.low, Autocast) else "recipe"

    @property
    def holds(self) -> None:
        return None

    def apply(self, equation: Equation, arrays: Sequence[ArrayLike]) -> list[Any]:
        lows = [
            self.low.lift(jnp.asarray(x, jnp.float32), a) if is_float(a) else x
            for x, a in zip(arrays, equation.in_avals, strict=True)
        ]
        outs = self.low.apply((), equation, lows)[1]
        return [
            self.low.lower(y, a) if is_float(a) else y
            for y, a in zip(outs, equation.out_avals, strict=True)
        ]

    def values(self, piece: Slice) -> dict[str, Any]:
        if isinstance(self.low, Autocast):
            policy = self._policy(piece)
            imports = ["from scalewise.autocasting import Rule"] if policy.rules else []
            found = {"run": "autocast", "setting": f"policy = {_policy_text(policy)}"}
            return found | {"imports": imports, "lines": piece.lines}
        text, imports = recipe_text(self._recipe(piece))
        found = {"run": "autoscale", "setting": f"recipe = {text}"}
        return found | {"imports": imports, "lines": list(self._scoped(piece))}

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


ReducedArithmetic: TypeAlias = Rounded | Interpreted


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
    match low:
        case Emulation():
            return Rounded(dtype, low.fmt, low.saturate)
        case Autocast() | Boundaries() | EveryOp():
            return Interpreted(dtype, low)
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
