"""Applies a fix outside of the audit: to a policy, a recipe or a function."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..._jax import ShapedArray, is_tracing
from ..._types import PyTree
from ...autocasting import Autocast, converted, policy
from ...autoscaling import Boundaries, interpretation
from ...autoscaling.recipes import recipe
from ...emulating import Constant, EmulationWithDraws
from ...interpret import Applied, Argument, Equation, Interpretation, State, Value, transform
from ...rounding import (
    FP32_PARAMS,
    FP64_PARAMS,
    format_params,
    is_wide,
    scale_params,
)
from ...scalifying import EveryOp
from .._run._outcome import Outcome
from .._run._session import Session
from .._tape._compiled import compiled
from .._tape._forward import ON_ONE_DEVICE
from .._tape._interpretations import FP32_MAX, TableEmulation, restored
from .._tape._loss_scale import LossScaled


@dataclasses.dataclass(frozen=True)
class FormatChoice:
    """What a run in one format may choose: the format of each equation, and literals replaced."""

    formats: np.ndarray  # a table with a format's parameters for each equation
    constants: tuple[tuple[float, float], ...] = ()  # pairs (old, new)
    double: bool = False  # whether an operation is widened to float64 rather than float32

    @property
    def word(self) -> str:
        return "float64" if self.double else "float32"

    def run(self, session: Session) -> Outcome:
        return session.run(self.formats, dict(self.constants))

    def with_format(self, indices: Sequence[int], params: np.ndarray) -> FormatChoice:
        formats = self.formats.copy()
        formats[list(indices)] = params
        return dataclasses.replace(self, formats=formats)

    def widened(self, indices: Sequence[int]) -> FormatChoice:
        return self.with_format(indices, FP64_PARAMS if self.double else FP32_PARAMS)

    def scaled(self, indices: Sequence[int], power: int) -> FormatChoice:
        formats = self.formats.copy()
        for index in indices:
            formats[index] = scale_params(formats[index], power)
        return dataclasses.replace(self, formats=formats)

    def without_limits(self, limits: Sequence[float]) -> FormatChoice:
        setting = self
        for number in limits:
            setting = setting.with_constant(number, math.copysign(FP32_MAX, number))
        return setting

    def with_constant(self, old: float, new: float) -> FormatChoice:
        return dataclasses.replace(self, constants=(*self.constants, (old, new)))


Indices = Mapping[tuple[int, ...], tuple[int, str]]
OTHER_PROGRAM = (
    "fix.apply: expected the audited function with arguments of the same shapes and dtypes; to "
    "differentiate it, audit jax.grad(f)"
)


@dataclasses.dataclass(frozen=True, eq=False)
class AuditedArithmetic:
    """The arithmetic of the audit that tried a fix."""

    low: Interpretation  # the interpretation of the low-precision run
    start: FormatChoice | None = None  # the setting without fixes; None under a policy or recipe
    # by an equation's path, its index in the setting's table, and its primitive
    indices: Indices = dataclasses.field(default_factory=dict)

    def function(self, f: Callable) -> FixedFunction:
        return FixedFunction(f, self, self.start or self.low)


@dataclasses.dataclass(frozen=True, eq=False)
class FixedEmulation(EmulationWithDraws, TableEmulation):
    """Emulation with a setting: each equation has the format that the setting gives it."""

    setting: FormatChoice | None = None
    indices: Indices = dataclasses.field(default_factory=dict)
    seen: set[tuple[int, ...]] = dataclasses.field(default_factory=set)  # paths interpreted so far
    limits: set[float] = dataclasses.field(default_factory=set)  # as in the audit

    @functools.cached_property
    def carrier(self) -> DTypeLike:
        assert self.setting is not None
        beyond_float32 = np.any(self.setting.formats[:, 0] > FP32_PARAMS[0])
        return jnp.float64 if beyond_float32 else super().carrier

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Any:
        assert self.setting is not None
        constants = dict(self.setting.constants)
        value = float(x) if x.size == 1 else None
        if value is None or value not in constants:
            wide = self.in_float32(x)
            if wide is x:
                return super().constant(x, aval)
            self.limits.update(x.flat)
            return self.unrounded(wide, TableEmulation.constant(self, x, aval))
        new = np.full(x.shape, constants[value])
        if constants[value] == value or abs(constants[value]) == FP32_MAX:
            return self.unrounded(x, jnp.asarray(new, self.carrier))
        own = self.unrounded(x, TableEmulation.constant(self, new, aval))
        return dataclasses.replace(
            own, literal=False
        )  # operations in float32 have the new number as well

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        assert self.setting is not None
        index, primitive = self.indices.get(equation.path, (None, equation.name))
        if primitive != equation.name:
            raise ValueError(OTHER_PROGRAM)
        self.seen.add(equation.path)
        if index is None:  # exact, or in a branch that the audit didn't take
            own = self.own_params(equation)
            params = format_params(self.fmt, self.saturate) if own is None else own
        else:
            params = self.setting.formats[index]
        keeps_limits = self.limits and self.own_params(equation) is FP32_PARAMS
        if is_wide(params) and not keeps_limits:  # in float32 it reads the program's own constants
            inputs = [
                dataclasses.replace(x, rounded=x.exact.astype(self.carrier))
                if isinstance(x, Constant) and x.literal
                else x
                for x in inputs
            ]
        return state, super().apply(jnp.asarray(params), equation, inputs)[1]

    def lower(self, value: Value, aval: ShapedArray) -> jax.Array:
        """A result that a fix computes in float32 may exceed the dtype that the program has."""
        cast = self.cast_dtype is not None and aval.dtype == self.cast_dtype
        return super().lower(value, aval.update(dtype=np.dtype(np.float32)) if cast else aval)

    def tangent(self, argument: Argument, tangent: PyTree) -> Any:
        raise ValueError(OTHER_PROGRAM)


class FixedFunction:
    """A function in the audited arithmetic with fixes; further fixes can be applied to it."""

    def __init__(self, f: Callable, origin: AuditedArithmetic, now: Any):
        # now: the setting, or the interpretation, with the fixes
        self.f, self.origin, self.now = f, origin, now
        functools.update_wrapper(self, f, updated=())

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        arrays = jax.Array | np.ndarray | np.generic
        if not is_tracing() and all(isinstance(x, arrays) for x in jax.tree.leaves((args, kwargs))):
            return self._compiled(*args, **kwargs)  # operation by operation takes ten times as long
        return self._run(*args, **kwargs)

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        return compiled(self._run, 0)

    def _run(self, *args: PyTree, **kwargs: PyTree) -> Any:
        f, low = self.f, self.now
        if isinstance(low, FormatChoice):
            emulated = self.origin.low
            assert isinstance(emulated, TableEmulation)
            indices = self.origin.indices
            self._check_devices(low)
            low = FixedEmulation(
                emulated.fmt,
                emulated.saturate,
                emulated.low_dtype,
                emulated.cast_dtype,
                setting=low,
                indices=indices,
            )
            applied = transform(f, low, name="fix.apply", rewrite=self._restored(args, kwargs))
            with warnings.catch_warnings():  # of constants, which are restored
                warnings.simplefilter("ignore")
                outs = applied(*args, **kwargs)
            expected = {path for path in indices if ON_ONE_DEVICE not in path}
            if not expected <= low.seen:
                raise ValueError(OTHER_PROGRAM)
            return outs
        if isinstance(low, Autocast | LossScaled):
            policy = (low.low if isinstance(low, LossScaled) else low).policy
            prepare = functools.partial(converted, policy=policy)
            return transform(f, low, name="fix.apply", prepare=prepare)(*args, **kwargs)
        return transform(f, low, name="fix.apply")(*args, **kwargs)

    def _check_devices(self, now: FormatChoice) -> None:
        assert self.origin.start is not None
        mapped = [i for path, (i, _) in self.origin.indices.items() if ON_ONE_DEVICE in path]
        before, after = (x.formats[mapped] for x in (self.origin.start, now))
        if not np.array_equal(before, after, equal_nan=True):
            raise ValueError(
                "fix.apply: the fix changes lines of a shard_map, which the audit runs for all "
                "devices at once; change them in the source"
            )

    def _restored(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Callable:
        """Returns what gives a program traced as written the constants that the audit saw."""
        low = self.origin.low
        if not isinstance(low, TableEmulation) or low.low_dtype is None:
            return lambda program: program
        return lambda program: restored(program, self.f, low, args, kwargs)


def apply_fix(fix: Any, target: Any) -> Any:
    origin: AuditedArithmetic | None = fix.origin
    if origin is None:
        raise TypeError(f"fix.apply: {str(fix)!r} wasn't accepted by an audit")
    if isinstance(target, FixedFunction):
        return FixedFunction(target.f, origin, fix.change(target.now))
    if callable(target):
        target = origin.function(target)
        return FixedFunction(target.f, origin, fix.change(target.now))
    match origin.low:
        case Autocast():
            changed = fix.change(Autocast(policy(target)))
            if isinstance(changed, LossScaled):
                raise TypeError(
                    f"fix.apply: a {fix} changes the program, not its policy; apply it to the "
                    "function, or train with training.loss_scaled"
                )
            return changed.policy
        case Boundaries() | EveryOp():
            return fix.change(interpretation(recipe(target))).recipe
    raise TypeError(
        f"fix.apply: expected a function, since the audit ran in one format; got {target!r}"
    )
