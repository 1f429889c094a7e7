"""Expressions that lose digits or overflow where a function of JAX computes the same does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from ..._jax import jex
from ...interpret import Equation
from ...primitives import having, params
from .._run._equation_statistics import Operands

BETWEEN = having("in_norms")


def norms(equations: Sequence[Equation], operands: Operands) -> list[tuple[int, ...]]:
    """Returns the indices of each written-out norm's equations: the squares, the sums, what is
    added or divided by; the root last."""
    found = [_norm(i, equations, operands) for i, e in enumerate(equations) if e.name == "sqrt"]
    return [indices for indices in found if indices]


def _norm(root: int, equations: Sequence[Equation], operands: Operands) -> tuple[int, ...]:
    """Returns the norm that ends in a square root; () if its argument is no sum of squares."""
    found, pending, squares = {root}, [root], 0
    while pending:
        for index in (i for operand in operands.get(pending.pop(), ()) for i in operand):
            if index in found or equations[index].path[:-1] != equations[root].path[:-1]:
                continue  # a sum over the iterations of a loop isn't a norm's
            if is_square(equations[index]):
                squares += 1
            elif equations[index].name in BETWEEN:
                pending.append(index)
            else:
                continue
            found.add(index)
    sums = any(equations[i].name == "reduce_sum" for i in found)
    return (*sorted(found - {root}), root) if squares and sums else ()


def is_square(equation: Equation) -> bool:
    atoms = equation.eqn.invars
    match equation.name:
        case "square":
            return True
        case "integer_pow":
            return params.degree(equation) == 2
        case "mul":
            return atoms[0] is atoms[1]
    return False


SUMS = having("adds")
MINUS_ONE = {"exp": "expm1(x) in place of exp(x) - 1"}
ONE_MINUS = {
    "exp": "-expm1(x) in place of 1 - exp(x)",
    "cos": "2 * sin(x / 2)**2 in place of 1 - cos(x)",
    "logistic": "sigmoid(-x) in place of 1 - sigmoid(x)",
}
NEAR_ONE = {
    "acos": "2 * arcsin(sqrt(x / 2)) in place of arccos(1 - x)",
    "acosh": "2 * arcsinh(sqrt(x / 2)) in place of arccosh(1 + x)",
    "pow": "exp(n * log1p(x)) in place of (1 + x)**n",
}


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """An expression and what may take its place.

    Its inner operations are then computed without rounding, and the last one rounds: that is the
    function's result within half a unit in the last place.
    """

    text: str  # ``log1p(x) in place of log(1 + x)``
    inner: tuple[int, ...]  # the indices of the operations before the last
    root: int  # the index of the last


def rewrites(equations: Sequence[Equation], operands: Operands) -> list[Rewrite]:
    finder = _Finder(equations, operands)
    return [found for root in range(len(equations)) for found in finder.at(root)]


@dataclasses.dataclass(frozen=True)
class _Finder:
    equations: Sequence[Equation]
    operands: Operands

    def name(self, index: int) -> str:
        return self.equations[index].name

    def sources(self, index: int) -> list[int]:
        return [i for operand in self.operands.get(index, ()) for i in operand]

    def constant(self, index: int, at: int | None = None) -> float | None:
        """Returns an operand that is a number: the one at a position, or the first one."""
        atoms = self.equations[index].eqn.invars
        literals = [x.val for x in (atoms if at is None else atoms[at : at + 1])
                    if isinstance(x, jex.Literal) and np.size(x.val) == 1]  # fmt: skip
        return float(literals[0]) if literals else None

    def at(self, root: int) -> Iterator[Rewrite]:
        sources = self.sources(root)
        match self.name(root):
            case "log":
                yield from self._logarithm(root, sources)
            case "sub" if self.constant(root) == 1:
                texts = ONE_MINUS if self.constant(root, 0) == 1 else MINUS_ONE
                for i in sources:
                    if self.name(i) in texts:
                        yield Rewrite(texts[self.name(i)], (i,), root)
            case ("acos" | "acosh" | "pow") as name:
                for i in sources:
                    minus = self.name(i) == "sub" and self.constant(i, 0) == 1
                    plus = self.name(i) in SUMS and self.constant(i) == 1
                    if minus if name == "acos" else plus:
                        yield Rewrite(NEAR_ONE[name], (i,), root)
            case "sqrt":
                for i in sources:
                    parts = self.sources(i)
                    squares = [j for j in parts if is_square(self.equations[j])]
                    if self.name(i) in SUMS and len(squares) > 1:
                        yield Rewrite("hypot in place of sqrt(x * x + y * y)", (*squares, i), root)
            case "sub":
                yield from self._variance(root)
            case "div":
                yield from self._softmax(root)

    def _logarithm(self, root: int, sources: Sequence[int]) -> Iterator[Rewrite]:
        for i in sources:
            exponentials = [j for j in self.sources(i) if self.name(j) == "exp"]
            sigmoids = [j for j in self.sources(i) if self.name(j) == "logistic"]
            inner, name = (*exponentials, i), self.name(i)
            if name == "cosh":
                yield Rewrite("logaddexp(x, -x) - log(2) in place of log(cosh(x))", (i,), root)
            elif name == "cumsum" and exponentials:
                yield Rewrite("cumlogsumexp(x) in place of log(cumsum(exp(x)))", inner, root)
            elif name == "mul" and exponentials:
                text = "slogdet(a) in place of log(det(a))"
                text = (
                    text if self.is_made_of(i, "lu") else "x + log(s) in place of log(s * exp(x))"
                )
                yield Rewrite(text, inner, root)
            elif name == "sub" and exponentials and self.constant(i, 0) == 1:
                yield Rewrite("log(-expm1(x)) in place of log(1 - exp(x))", inner, root)
            elif name == "sub" and exponentials and self.constant(i, 1) == 1:
                text = "x + log(-expm1(-x)) in place of log(exp(x) - 1)"
                yield Rewrite(text, inner, root)
            elif self.name(i) == "logistic":
                yield Rewrite("log_sigmoid(x) in place of log(sigmoid(x))", (i,), root)
            elif self.name(i) == "sub" and self.constant(i) == 1 and sigmoids:
                text = "log_sigmoid(-x) in place of log(1 - sigmoid(x))"
                yield Rewrite(text, (*sigmoids, i), root)
            elif self.name(i) == "sub" and self.constant(i, 0) == 1:
                yield Rewrite("log1p(-x) in place of log(1 - x)", (i,), root)
            elif self.name(i) == "reduce_sum":
                yield from self._sum_of_exponentials(root, i)
            elif self.name(i) in ("div", "mul") and self.constant(i) is not None:
                sums = [j for j in self.sources(i) if self.name(j) == "reduce_sum"]
                for total in sums:
                    yield from self._sum_of_exponentials(root, total, (i,))
            elif self.name(i) == "reduce_prod" and exponentials:
                yield Rewrite("sum(x) in place of log(prod(exp(x)))", inner, root)
            elif self.name(i) in SUMS and self.constant(i) == 1 and exponentials:
                yield Rewrite("softplus(x) in place of log(1 + exp(x))", inner, root)
            elif self.name(i) in SUMS and self.constant(i) == 1:
                yield Rewrite("log1p(x) in place of log(1 + x)", (i,), root)
            elif self.name(i) in SUMS and len(exponentials) > 1:
                text = "logaddexp(x, y) in place of log(exp(x) + exp(y))"
                yield Rewrite(text, inner, root)
            elif self.name(i) == "div" and any(self.name(j) == "exp" for j in self.sources(i)):
                sums = [j for j in self.sources(i) if self.name(j) == "reduce_sum"]
                inner = (*exponentials, *sums, i)
                yield Rewrite("log_softmax(x) in place of log(softmax(x))", inner, root)

    def is_made_of(self, index: int, name: str, depth: int = 6) -> bool:
        before = self.sources(index) if depth else []
        return any(self.name(i) == name or self.is_made_of(i, name, depth - 1) for i in before)

    def _sum_of_exponentials(
        self, root: int, total: int, mean: tuple[int, ...] = ()
    ) -> Iterator[Rewrite]:
        what, less = ("mean", " - log(n)") if mean else ("sum", "")
        parts = self.sources(total)
        exponentials = [j for j in parts if self.name(j) == "exp"]
        if exponentials:
            text = f"logsumexp(x){less} in place of log({what}(exp(x)))"
            yield Rewrite(text, (*exponentials, total, *mean), root)
        for product in (j for j in parts if self.name(j) == "mul"):
            exponentials = [j for j in self.sources(product) if self.name(j) == "exp"]
            if exponentials:
                text = f"logsumexp(x, b=w){less} in place of log({what}(w * exp(x)))"
                yield Rewrite(text, (*exponentials, product, total, *mean), root)

    def _softmax(self, root: int) -> Iterator[Rewrite]:
        """Yields exponentials over their sum, unless a maximum is subtracted before."""
        parts = self.operands.get(root, ())
        if len(parts) != 2 or not all(parts):
            return
        exponential, total = parts[0][0], parts[1][0]
        if self.name(exponential) != "exp" or self.name(total) != "reduce_sum":
            return
        shifted = any(self.name(i) == "sub" for i in self.sources(exponential))
        if exponential in self.sources(total) and not shifted:
            text = "softmax(x) in place of exp(x) / sum(exp(x))"
            yield Rewrite(text, (exponential, total), root)

    def _variance(self, root: int) -> Iterator[Rewrite]:
        parts = self.operands.get(root, ())
        if len(parts) != 2 or not all(parts):
            return
        mean_of_squares, square = parts[0][0], parts[1][0]
        inner, at = [mean_of_squares], mean_of_squares
        while self.name(at) in ("div", "mul", "reduce_sum") and not is_square(self.equations[at]):
            before = self.sources(at)
            if not before:
                return
            at = before[0]
            inner.append(at)
        summed = any(self.name(i) == "reduce_sum" for i in inner)
        if summed and is_square(self.equations[at]) and is_square(self.equations[square]):
            means = [i for i in self.sources(square) if self.name(i) in ("div", "mul")]
            sums = [j for i in means for j in self.sources(i) if self.name(j) == "reduce_sum"]
            text = "the mean of squared deviations in place of E[x^2] - E[x]^2"
            yield Rewrite(text, (*inner, square, *means, *sums), root)
