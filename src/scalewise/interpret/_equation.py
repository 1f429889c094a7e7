"""An interpretation's view of one equation: primitive, types, and the user's source line."""

from __future__ import annotations

import copy
import dataclasses
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import _jax
from .._jax import Jaxpr, Parameter, ShapedArray, jex
from ..primitives import Family, having, names, params
from . import _wide
from ._wide import is_float, is_inexact

if TYPE_CHECKING:
    from ._interpret import Body

Direction = Literal["forward", "backward", "update"]
CONTRACTIONS = names(lambda row: row.family is Family.CONTRACTION) | having("contraction")
CALLBACKS = having("host")
COMPLEX = "stays in the program's own dtype: no narrow format has complex numbers."
# Whose bodies aren't interpreted.
KERNELS = names(lambda row: row.family is Family.KERNEL) | {"custom_linear_solve"}
TRACING = str(Path(__file__).parent)  # of the frames above the traced function
LIBRARIES = tuple({sysconfig.get_path(x) for x in ("purelib", "platlib", "stdlib")})


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """One equation of a program, with its provenance.

    Attributes:
        eqn: JAX's own equation.
        scope: the full name stack, outermost first, also inside loops and calls; for example
            ``"transpose(jvp(block_0))/attention"``.
        path: the positions of the equations around it (and the number of the branch), then its own
            position in its jaxpr. It is the same each time a body is traced, and differs between
            calls.
        within: the call or loop in whose body it is.
        bodies: a cache of the equation's own bodies, for programs that are kept.
        order: like ``path``, but counts only equations that contain a contraction, so that it is
            the same whether a program's arrays are on one device or, with other equations, on
            several.
        held: arrays of the program in place of the last operands: see :meth:`bind_last`.
    """

    eqn: jex.JaxprEqn
    scope: str
    path: tuple[int, ...] = ()
    within: Equation | None = None
    bodies: dict[tuple[Jaxpr, tuple[int, ...]], Body] | None = dataclasses.field(
        default=None, repr=False
    )
    order: tuple[int, ...] = ()
    held: tuple[ArrayLike, ...] = ()

    @property
    def primitive(self) -> jex.Primitive:
        return self.eqn.primitive

    @cached_property
    def name(self) -> str:
        """The primitive's name; ``"scatter_apply"`` for a scatter that applies a function.

        JAX calls ``x.at[i].apply(f)`` ``"scatter"``, as it does ``x.at[i].set(y)``.
        """
        name = self.eqn.primitive.name
        return "scatter_apply" if name == "scatter" and _applies(self.eqn) else name

    @property
    def params(self) -> dict[str, Parameter]:
        return self.eqn.params

    @cached_property
    def in_avals(self) -> tuple[ShapedArray, ...]:
        return tuple(_jax.avals_of(self.eqn.invars))

    @cached_property
    def out_avals(self) -> tuple[ShapedArray, ...]:
        return tuple(_jax.avals_of(self.eqn.outvars))

    @cached_property
    def lifted(self) -> bool:
        """Whether an operand or a result is a float."""
        return any(is_float(a) for a in self.in_avals + self.out_avals)

    @cached_property
    def of_complex(self) -> bool:
        """Whether an operand is complex."""
        return any(jnp.issubdtype(a.dtype, jnp.complexfloating) for a in self.in_avals)

    @cached_property
    def direction(self) -> Direction:
        """The pass that the equation belongs to.

        ``"backward"`` inside a transposed function, ``"forward"`` inside a differentiated one. JAX
        writes both into the name stack, and marks what a backward pass recomputes of the forward
        pass (``jax.checkpoint``); that counts as forward. Everything else is ``"update"``: a
        training step's optimizer, or a function that isn't differentiated.
        """
        if "transpose(" in self.scope:
            return "forward" if "rematted_computation" in self.scope else "backward"
        return "forward" if "jvp(" in self.scope else "update"

    @cached_property
    def source(self) -> tuple[str, int, str] | None:
        """File, line and function of the user's code; None if JAX doesn't know them.

        An equation of a library's jitted function (``jax.nn.log_softmax``) has no line of the
        user's. It counts for the line that calls the function.
        """
        own = next(_jax.user_frames(self.eqn), None)
        return own or (self.within.source if self.within else None)

    @cached_property
    def traceback(self) -> object:
        """JAX's traceback of :attr:`source`."""
        own = self.eqn.source_info.traceback
        if self.within is None or next(_jax.user_frames(self.eqn), None) is not None:
            return own
        return self.within.traceback

    @cached_property
    def caller(self) -> tuple[str, int, str] | None:
        """The line that called the installed library behind the equation; None for user code."""
        if self.source is None or not _is_installed(self.source[0]):
            return None
        own = next((f for f in self._frames if not _is_installed(f[0])), None)
        if own is None and self.within is not None:
            above = self.within
            own = above.caller or (above.source if above.source != self.source else None)
        return own

    @cached_property
    def call_site(self) -> tuple[str, int, str] | None:
        """The user's line that called the equation's function; None for the traced function."""
        if self.caller is not None:
            return self.caller
        own = [frame for frame in self._frames if not _is_installed(frame[0])]
        if len(own) > 1:
            return own[1]
        return self.within.call_site or self.within.source if self.within else None

    @cached_property
    def _frames(self) -> list[tuple[str, int, str]]:
        frames = list(_jax.user_frames(self.eqn))
        traced = next((i for i, f in enumerate(frames) if f[0].startswith(TRACING)), len(frames))
        return frames[:traced]

    @cached_property
    def inner(self) -> int:
        """The number of equations, at least 1, in one iteration of a loop or in all branches."""
        return max(sum(map(count_work, nested_jaxprs(self.eqn))), 1)

    def where(self) -> str:
        """Returns the user's ``file:line (function)``, for error messages and warnings."""
        line = self.caller or self.source
        return "{}:{} ({})".format(*line) if line else "an unknown source line"

    def bind(self, *inputs: ArrayLike) -> list[jax.Array]:
        """Binds the primitive to plain arrays of the equation's own types."""
        return _wide.bind(self.primitive, self.params, self.varied(inputs))

    def varied(self, inputs: Sequence[ArrayLike]) -> list[ArrayLike]:
        """Returns operands cast to vary over the mesh axes over which they varied when traced."""
        if not _jax.manual_now():
            return list(inputs)
        axes = map(_jax.varying, self.in_avals)
        return [_jax.vary(x, a) for x, a in zip(inputs, axes, strict=True)]

    def bind_last(self, *operands: ArrayLike) -> Equation:
        """Returns an equation of the first operands alone, with plain arrays for the last ones."""
        bound = copy.copy(self.primitive)

        def bind(*inputs: ArrayLike, **params: Parameter) -> jax.Array | list[jax.Array]:
            outs = _wide.bind(self.primitive, params, [*inputs, *operands])
            return outs if bound.multiple_results else outs[0]

        bound.bind = bind
        changed = self.with_primitive(bound, self.params)
        rest = changed.with_operands(*range(len(self.eqn.invars) - len(operands)))
        return dataclasses.replace(rest, held=operands)

    def with_primitive(self, primitive: jex.Primitive, params: dict[str, Parameter]) -> Equation:
        """Returns the equation with another primitive, at the same place of the program."""
        return dataclasses.replace(self, eqn=self.eqn.replace(primitive=primitive, params=params))

    def with_params(self, **changes: Parameter) -> Equation:
        """Returns the same equation with some of its parameters replaced."""
        changed = self.eqn.replace(params=params.replaced(self, **changes))
        return dataclasses.replace(self, eqn=changed)

    def with_operands(self, *positions: int) -> Equation:
        """Returns the equation with only the operands at these positions."""
        invars = [self.eqn.invars[i] for i in positions]
        return dataclasses.replace(self, eqn=self.eqn.replace(invars=invars))


def _applies(eqn: jex.JaxprEqn) -> bool:
    """Returns whether a scatter applies another function than ``lambda old, new: new``."""
    jaxpr = params.update_function(eqn)
    if jaxpr is None:
        return False
    body, _ = _jax.open_jaxpr(jaxpr)
    return list(body.outvars) != list(body.invars[1:])


def _is_installed(file: str) -> bool:
    return file.startswith(LIBRARIES)


def nested_jaxprs(eqn: jex.JaxprEqn) -> list[Jaxpr]:
    values = [p if isinstance(p, tuple | list) else (p,) for p in eqn.params.values()]
    return [x for value in values for x in value if hasattr(x, "eqns") or hasattr(x, "jaxpr")]


def all_equations(jaxpr: Jaxpr, *, operations: bool = False) -> Iterator[jex.JaxprEqn]:
    """Yields the equations of a jaxpr and of all bodies nested in it.

    Args:
        jaxpr: open or closed.
        operations: whether also those of :func:`operation_body`.
    """
    for eqn in _jax.open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for body in _bodies(eqn) if operations else nested_jaxprs(eqn):
            yield from all_equations(body, operations=operations)


def operation_body(equation: Equation | jex.JaxprEqn) -> Jaxpr | None:
    """Returns the jaxpr of an operation that another library computes as one equation.

    Its primitive has the attribute ``steps``: a function of the operands, and of the equation's
    parameters by name, that returns the results.

    Returns:
        A closed jaxpr without source lines, the same for equal operations. None for JAX's own.
    """
    steps = getattr(equation.primitive, "steps", None)
    if steps is None:
        return None
    eqn = equation if isinstance(equation, jex.JaxprEqn) else equation.eqn
    types = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in _jax.avals_of(eqn.invars))
    return _steps(steps, tuple(sorted(eqn.params.items())), types)


@lru_cache(maxsize=4096)
def _steps(
    steps: Callable, params: tuple[tuple[str, Parameter], ...], types: tuple[Any, ...]
) -> Jaxpr:
    wide = any(t.dtype.itemsize == 8 for t in types)
    with jax.enable_x64(True) if wide else nullcontext():
        return _jax.anonymous(jax.make_jaxpr(partial(steps, **dict(params)))(*types))


def contracts(eqn: jex.JaxprEqn) -> bool:
    inner = (e for body in _bodies(eqn) for e in all_equations(body, operations=True))
    return any(e.primitive.name in CONTRACTIONS for e in (eqn, *inner))


def _bodies(eqn: jex.JaxprEqn) -> list[Jaxpr]:
    steps = operation_body(eqn)
    return nested_jaxprs(eqn) if steps is None else [steps]


def is_carry(equation: Equation, operand: int) -> bool:
    """Returns whether an operand is a carry of the loop in whose body the equation stands."""
    loop = equation.within
    if loop is None or loop.name not in ("scan", "while"):
        return False
    carries = len(loop.out_avals)
    if loop.name == "scan":
        known = params.scan(loop)
        body, first, carries = known.body, known.consts, known.carries
    else:
        known = params.while_loop(loop)
        body, first = known.body, known.body_consts
    return equation.eqn.invars[operand] in _jax.open_jaxpr(body)[0].invars[first:][:carries]


def count_work(jaxpr: Jaxpr) -> int:
    """Returns how many equations a jaxpr computes, with nested bodies and a scan's iterations."""
    total = 0
    for eqn in _jax.open_jaxpr(jaxpr)[0].eqns:
        iterations = params.scan(eqn).length if eqn.primitive.name == "scan" else 1
        total += 1 + iterations * sum(map(count_work, nested_jaxprs(eqn)))
    return total


def warn_kernel(equation: Equation, transformation: str, advice: str = "", what: str = "") -> None:
    """Warns, with the source line, of ``what`` an equation does; without it, if floats pass through
    an equation that can't be transformed.

    Python shows a warning of the same text once.
    """
    through = all(any(map(is_inexact, x)) for x in (equation.in_avals, equation.out_avals))
    if not what and equation.name in KERNELS and through and _hides(equation):
        what = (
            "can't be transformed: it gets plain numbers, and its inside computes in the program's "
            "own dtypes."
        )
    if what:
        text = f"{transformation}: {equation.where()}: {equation.name} {what}{advice}"
        warnings.warn(text, UserWarning, stacklevel=2)


def _hides(equation: Equation) -> bool:
    """Returns whether users may expect the body to be transformed; a solver's if it multiplies."""
    solver = params.solver(equation)
    return solver is None or any(e.primitive.name in CONTRACTIONS for e in all_equations(solver[0]))
