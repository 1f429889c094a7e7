"""The rules: for each ATen overload, the JAX function that computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .._types import PyTree
from ._torch import Overload, torch

RULES: dict[Overload, Callable[..., PyTree]] = {}
"""By overload (``torch.ops.aten.exp.default``): a function of JAX arrays and Python values."""


DRAWS: dict[Any, Callable[..., PyTree]] = {}
"""By overload whose rule may draw random numbers: of its arguments, whether it does.

The rule then takes ``position``, a number that differs between the operations of a program.
"""


STAGED: set[Overload] = set()
"""The overloads whose rule calls :func:`operation` for each of its roundings by itself."""


def rule(*overloads: Overload) -> Callable[[Callable], Callable]:
    """Returns a decorator that registers a function as the rule of ATen (or custom) overloads.

    The function gets what the overload gets, JAX arrays in place of tensors, and returns the arrays
    that the overload returns. It may use any JAX function; its results are cast to the dtypes that
    torch says they have. Unless the granularity is ``"decomposed"``, its float operands are float32
    if it takes several roundings, and its results are rounded once. A later rule replaces an
    earlier one.

    Args:
        overloads: such as ``torch.ops.aten.exp.default``.

    Raises:
        TypeError: an argument is no overload, for example ``torch.ops.aten.exp``.

    Example::

        @scalewise.torch.rule(torch.ops.aten.trace.default)
        def trace(x):
            return jnp.sum(jnp.diagonal(x))
    """
    for overload in overloads:
        if isinstance(overload, torch._ops.OpOverloadPacket):
            names = ", ".join(overload.overloads())
            raise TypeError(f"rule takes overloads, not {overload}; expected one of its {names}")
        if not callable(overload):
            raise TypeError(f"rule takes overloads such as torch.ops.aten.exp.default: {overload}")

    def register(function: Callable) -> Callable:
        RULES.update(dict.fromkeys(overloads, function))
        return function

    return register


class MissingRuleError(NotImplementedError):
    """A program has operations without a rule; the message lists all of them."""


def check_covered(targets: Iterable[tuple[Overload, str]]) -> None:
    """Raises an error that lists every operation without a rule.

    Args:
        targets: operations, each with the source line that calls it.

    Raises:
        MissingRuleError: there are some.
    """
    missing: dict[str, list[str]] = {}
    for target, line in targets:
        if target not in RULES:
            missing.setdefault(str(target), []).append(line)
    if missing:
        listed = "\n".join(
            f"  {name} ({len(lines)}x, first at {lines[0]})"
            for name, lines in sorted(missing.items())
        )
        ordinary = [name for name in sorted(missing) if not _is_control_flow(name)]
        advice = (
            f"Give each one as a JAX function:\n  @scalewise.torch.rule(torch.ops.{ordinary[0]})\n"
            "  def rule(*args, **kwargs): ..."
            if ordinary
            else "Control flow isn't supported: write both ways, and choose by torch.where."
        )
        raise MissingRuleError(f"{len(missing)} operations have no rule:\n{listed}\n{advice}")


def _is_control_flow(name: str) -> bool:
    """Returns whether an operation isn't an overload, so that no rule can be given for it."""
    return "." not in name
