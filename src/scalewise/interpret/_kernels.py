"""Operations whose bodies aren't interpreted: kernels, foreign and Python functions, solvers."""

from __future__ import annotations

import warnings

from ..primitives import Family, names, params
from ._equation import CONTRACTIONS, Equation, all_equations
from ._floats import is_float

KERNELS = names(lambda row: row.family is Family.KERNEL) | {"custom_linear_solve"}


def warn_kernel(equation: Equation, transformation: str, advice: str = "") -> None:
    """Warns, with the source line, if floats pass through an equation that can't be transformed.

    Python shows a warning of the same text once.
    """
    if equation.name not in KERNELS:
        return
    through = all(any(map(is_float, avals)) for avals in (equation.in_avals, equation.out_avals))
    if through and _hides(equation):
        warnings.warn(
            f"{transformation}: {equation.where()}: {equation.name} can't be transformed: it gets "
            f"plain numbers, and its inside computes in the program's own dtypes.{advice}",
            UserWarning,
            stacklevel=2,
        )


def _hides(equation: Equation) -> bool:
    """Returns whether users may expect the body to be transformed; a solver's if it multiplies."""
    solver = params.solver(equation)
    return solver is None or any(e.primitive.name in CONTRACTIONS for e in all_equations(solver[0]))
