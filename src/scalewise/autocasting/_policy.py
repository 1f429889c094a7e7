"""``Policy``: dtypes of parameters, computation and output, the lists, and their exceptions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence, Set
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._check import Pattern, checked
from .._resolve import kind_of
from ..formats import BF16, FP16, FP32, FP64
from ..formats import format as format_
from ..interpret import Equation
from ..primitives import names

# Primitives that run in the narrow dtype, and primitives that run in float32; others run in the
# widest dtype among their operands. `scalewise.primitives.AUTOCAST` has the reasons.
LOW = names(lambda row: row.autocast == "low")
FULL = names(lambda row: row.full)
Run = Literal["low", "full", "follow"]
FIELDS = {key: field for field in ("params", "compute", "output") for key in (field, field[0])}


@checked
@dataclasses.dataclass(frozen=True)
class Rule:
    """One exception to the lists: operations that meet every condition given run so.

    Attributes:
        run: ``"low"``, ``"full"`` (float32, also where the program converts to fewer bits itself)
            or ``"follow"`` (the widest operand).
        primitive: name of a JAX primitive, ``"tanh"`` say.
        scope: a regular expression, searched for in the name stack (``jax.named_scope``, Flax
            modules), ``"block_0/attention"`` say; forward and backward pass alike.
        function: name of the user's function (or method) on whose line the operation stands.
    """

    run: Run
    primitive: str | None = None
    scope: Pattern | None = None
    function: str | None = None

    def __post_init__(self):
        if self.primitive is self.scope is self.function is None:
            raise ValueError("Rule takes at least one of primitive, scope and function")

    def matches(self, equation: Equation) -> bool:
        """Returns whether an operation meets every condition."""
        if self.primitive is not None and equation.name != self.primitive:
            return False
        if self.scope is not None and not re.search(self.scope, equation.scope):
            return False
        if self.function is None:
            return True
        written_in = equation.source[2] if equation.source else ""
        return self.function in (written_in, written_in.rpartition(".")[2])  # qualified, or not


ComputeDtype: TypeAlias = Any
"""Given as a dtype or a name (``"bf16"``), read as an ``np.dtype``, or None."""


@checked
@dataclasses.dataclass(frozen=True)
class Policy:
    """What :func:`autocast` runs in which dtype.

    Attributes:
        compute: the narrow dtype, that of ``low`` operations.
        params: float arguments are converted to it on the way in; None: they stay as they are.
            ``training.step`` keeps the parameters in it.
        output: float results are converted to it; None: the function's own dtypes.
        low: primitives that run in ``compute``; ``LOW | {...}`` adds to the default.
        full: primitives that run in float32 (float64 in a float64 program).
        rules: exceptions; the first that matches an operation decides, before the lists.
    """

    compute: ComputeDtype = jnp.float16
    params: ComputeDtype = None
    output: ComputeDtype = None
    low: Set[str] = LOW
    full: Set[str] = FULL
    rules: Sequence[Rule] = ()

    def __post_init__(self):
        for field in ("compute", "params", "output"):
            value = getattr(self, field)
            if field == "compute" or value is not None:
                object.__setattr__(self, field, _dtype(value, field))
        object.__setattr__(self, "low", frozenset(self.low))
        object.__setattr__(self, "full", frozenset(self.full))
        object.__setattr__(self, "rules", tuple(self.rules))
        both = self.low & self.full
        if both:
            raise ValueError(f"Policy: {', '.join(sorted(both))}: both in low and in full")

    def run(self, equation: Equation) -> Run:
        """Returns how an operation runs, by the first rule that matches it or by the lists."""
        rule = self.rule(equation)
        if rule is not None:
            return rule.run
        if equation.name in self.low:
            return "low"
        return "full" if equation.name in self.full else "follow"

    def rule(self, equation: Equation) -> Rule | None:
        """Returns the first rule that matches an operation, or None."""
        return next((rule for rule in self.rules if rule.matches(equation)), None)

    def __repr__(self) -> str:
        dtypes = [(name, getattr(self, name)) for name in ("params", "output")]
        arguments = [repr(self.compute.name)]
        arguments += [f"{name}={dtype.name!r}" for name, dtype in dtypes if dtype is not None]
        for name, chosen, default in (("low", self.low, LOW), ("full", self.full, FULL)):
            if chosen != default:
                more, less = sorted(chosen - default), sorted(default - chosen)
                text = name.upper() + (f" | {set(more)}" if more else "")
                arguments.append(f"{name}={text}" + (f" - {set(less)}" if less else ""))
        if self.rules:
            arguments.append(f"rules={self.rules!r}")
        return f"Policy({', '.join(arguments)})"

    def __str__(self) -> str:
        named = [(k[0], getattr(self, k)) for k in ("params", "compute", "output")]
        return ",".join(f"{k}={v.name}" for k, v in named if v is not None)


PolicyLike: TypeAlias = Policy | str | DTypeLike
"""A policy, its string (``"p=f32,c=bf16,o=f32"``), or the dtype to compute in."""


@checked
def policy(text: PolicyLike) -> Policy:
    """Returns a policy from a string, or the policy itself.

    Args:
        text: ``"p=f32,c=bf16,o=f32"`` (params, compute, output; each may be left out), or only the
            narrow dtype: ``"bf16"``, ``jnp.float16``.

    Raises:
        ValueError: the string is no policy; the message says what is.

    Example:
        >>> str(policy("p=f32,c=bf16,o=f32"))
        'p=float32,c=bfloat16,o=float32'
        >>> policy("c=int8")
        Traceback (most recent call last):
        ...
        ValueError: Policy.compute: 'int8' is no dtype to compute in; expected one of f16, bf16, ...
    """
    if isinstance(text, Policy):
        return text
    if not isinstance(text, str) or "=" not in text:
        return Policy(compute=text)
    fields: dict[str, ComputeDtype] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        field = FIELDS.get(key.strip())
        if not equals or field is None or field in fields:
            raise ValueError(
                f"policy {text!r}: can't read {part.strip()!r}; expected, for example, "
                "'p=f32,c=bf16,o=f32' with each of p, c, o at most once"
            )
        fields[field] = value.strip()
    if "compute" not in fields:
        raise ValueError(f"policy {text!r} lacks c=, the dtype to compute in")
    return Policy(**fields)


def _dtype(value: ComputeDtype, field: str) -> np.dtype:
    try:
        fmt = FP32 if str(value).lower() == "full" else format_(value)
    except ValueError:
        fmt = None
    if fmt not in (FP16, BF16, FP32, FP64) or fmt.dtype is None:
        known = kind_of(value) if isinstance(value, str) else None
        what = f"{known}, no dtype" if known else "no dtype"
        raise ValueError(
            f"Policy.{field}: {value!r} is {what} to compute in; expected one of f16, "
            "bf16, f32, f64"
        )
    return fmt.dtype
