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


HYPOTENUSES = {
    "add": "hypot in place of sqrt(x * x + y * y)",
    "sub": "sqrt((x - y) * (x + y)) in place of sqrt(x * x - y * y)",
}
TWO_EXPONENTIALS = {
    "add": "logaddexp(x, y) in place of log(exp(x) + exp(y))",
    "sub": "x + log(-expm1(y - x)) in place of log(exp(x) - exp(y))",
}
FIRST, LAST, EITHER = (0,), (1,), (0, 1)
# The last operation; the one before it; the positions at one of which that has the operand 1 (() if
# it needs none); an operation that it is made of ("" for any); the text. The first match counts.
PATTERNS = (
    ("log", "cosh", (), "", "logaddexp(x, -x) - log(2) in place of log(cosh(x))"),
    ("log", "cumsum", (), "exp", "cumlogsumexp(x) in place of log(cumsum(exp(x)))"),
    ("log", "mul", (), "exp", "x + log(s) in place of log(s * exp(x))"),
    ("log", "logistic", (), "", "log_sigmoid(x) in place of log(sigmoid(x))"),
    ("log", "sub", FIRST, "logistic", "log_sigmoid(-x) in place of log(1 - sigmoid(x))"),
    ("log", "sub", FIRST, "exp", "log(-expm1(x)) in place of log(1 - exp(x))"),
    ("log", "sub", FIRST, "", "log1p(-x) in place of log(1 - x)"),
    ("log", "sub", LAST, "exp", "x + log(-expm1(-x)) in place of log(exp(x) - 1)"),
    ("log", "reduce_prod", (), "exp", "sum(x) in place of log(prod(exp(x)))"),
    ("log", "reduce_prod", (), "", "sum(log(x)) in place of log(prod(x))"),
    ("log", "add", EITHER, "exp", "softplus(x) in place of log(1 + exp(x))"),
    ("log", "add", EITHER, "", "log1p(x) in place of log(1 + x)"),
    ("acos", "sub", FIRST, "", "2 * arcsin(sqrt(x / 2)) in place of arccos(1 - x)"),
    ("acosh", "add", EITHER, "", "2 * arcsinh(sqrt(x / 2)) in place of arccosh(1 + x)"),
    ("pow", "add", EITHER, "", "exp(n * log1p(x)) in place of (1 + x)**n"),
)
# Rewrites of differences in which one operand is 1.
DIFFERENCES = (
    ("exp", FIRST, "-expm1(x) in place of 1 - exp(x)"),
    ("exp", LAST, "expm1(x) in place of exp(x) - 1"),
    ("cos", FIRST, "2 * sin(x / 2)**2 in place of 1 - cos(x)"),
    ("logistic", FIRST, "sigmoid(-x) in place of 1 - sigmoid(x)"),
)


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """An expression and what may take its place.

    Its inner operations are then computed without rounding, and the last one rounds: that is the
    function's result within half a unit in the last place. So are the operations of its derivative.
    """

    text: str  # ``log1p(x) in place of log(1 + x)``
    inner: tuple[int, ...]  # the indices of the operations before the last
    root: int  # the index of the last


def rewrites(equations: Sequence[Equation], operands: Operands) -> list[Rewrite]:
    """Returns what may be written in other ways; of expressions within each other the largest.

    A number that a select chooses of several operations' results is no part of an expression."""
    whole = operands
    operands = {i: tuple(x if len(x) == 1 else () for x in own) for i, own in whole.items()}
    finder = _Finder(equations, _without_conversions(equations, operands), whole)
    found = [x for root in range(len(equations)) for x in finder.at(root)]
    found = [dataclasses.replace(x, inner=_with_conversions(x, equations, operands)) for x in found]
    found = [x for x in found if not any({*x.inner, x.root} <= {*y.inner} for y in found)]
    derivatives = _derivatives(equations, operands)
    return [
        dataclasses.replace(x, inner=_with_derivative(x, equations, operands, derivatives))
        for x in found
    ]


CONVERSION = "convert_element_type"  # JAX makes some around sums, which it computes in float32


def _without_conversions(equations: Sequence[Equation], operands: Operands) -> Operands:
    def before(i: int) -> int:
        origins = [j for operand in operands.get(i, ()) for j in operand]
        if equations[i].name != CONVERSION or len(origins) != 1:
            return i
        return before(origins[0])

    return {
        i: tuple(tuple(before(j) for j in operand) for operand in own)
        for i, own in operands.items()
    }


def _with_conversions(
    rewrite: Rewrite, equations: Sequence[Equation], operands: Operands
) -> tuple[int, ...]:
    """Returns the inner operations, and the conversions between them."""
    inner = {*rewrite.inner}
    for i in (*rewrite.inner, rewrite.root):
        pending = [j for operand in operands.get(i, ()) for j in operand]
        while pending:
            j = pending.pop()
            if equations[j].name == CONVERSION and j not in inner:
                inner.add(j)
                pending += [k for operand in operands.get(j, ()) for k in operand]
    return tuple(sorted(inner))


def _derivatives(equations: Sequence[Equation], operands: Operands) -> list[int]:
    """Returns the operations of a backward pass, and those of the forward pass that it alone reads:
    factors of derivatives."""
    readers: dict[int, set[int]] = {}
    for i, own in operands.items():
        for j in (j for operand in own for j in operand):
            readers.setdefault(j, set()).add(i)
    found: set[int] = set()
    for i, e in reversed([*enumerate(equations)]):
        if e.direction == "backward" or (i in readers and readers[i] <= found):
            found.add(i)
    return sorted(found)


def _with_derivative(
    rewrite: Rewrite, equations: Sequence[Equation], operands: Operands, derivatives: Sequence[int]
) -> tuple[int, ...]:
    """Returns the inner operations, and those of its derivative on the expression's lines, which
    read their results, without the last ones, which round."""
    own, inner = {rewrite.root}, {*rewrite.inner}
    lines = {equations[i].source for i in own | inner}
    for i in derivatives:
        before = {j for operand in operands.get(i, ()) for j in operand}
        if equations[i].source in lines and before & (own | inner):
            inner.add(i)
    read = {j for i in own | inner for operand in operands.get(i, ()) for j in operand}
    return tuple(sorted({*rewrite.inner} | (inner & read)))


@dataclasses.dataclass(frozen=True)
class _Finder:
    equations: Sequence[Equation]
    operands: Operands
    whole: Operands  # with what selects choose

    def name(self, index: int) -> str:
        return self.equations[index].name

    def sources(self, index: int) -> list[int]:
        return [i for operand in self.operands.get(index, ()) for i in operand]

    def has_number(self, index: int, number: float | None, at: Sequence[int] = EITHER) -> bool:
        """Returns True if an operand at one of the positions is this number (None: any)."""
        atoms = [x for i, x in enumerate(self.equations[index].eqn.invars) if i in at]
        values = [x.val for x in atoms if isinstance(x, jex.Literal) and np.size(x.val) == 1]
        return any(number is None or float(x) == number for x in values)

    def at(self, root: int) -> Iterator[Rewrite]:
        sources = self.sources(root)
        for i in sources:
            yield from self._listed(root, i)
        match self.name(root):
            case "log":
                yield from self._logarithm(root, sources)
            case "sqrt":
                for i in sources:
                    parts = self.sources(i)
                    squares = [j for j in parts if is_square(self.equations[j])]
                    if self.name(i) in HYPOTENUSES and len(squares) > 1:
                        yield Rewrite(HYPOTENUSES[self.name(i)], (*squares, i), root)
            case "sub":
                yield from self._variance(root)
            case "div":
                yield from self._softmax(root)

    def _listed(self, root: int, i: int) -> Iterator[Rewrite]:
        for before, one, text in DIFFERENCES if self.name(root) == "sub" else ():
            if self.name(i) == before and self.has_number(root, 1, one):
                yield Rewrite(text, (i,), root)
        for last, before, one, part, text in PATTERNS:
            inner = [j for j in self.sources(i) if self.name(j) == part]
            alike = (self.name(root), self.name(i)) == (last, before) and (inner or not part)
            if alike and (not one or self.has_number(i, 1, one)):
                if before == "mul" and self.is_made_of(i, "lu"):
                    text = "slogdet(a) in place of log(det(a))"
                yield Rewrite(text, (*inner, i), root)
                return

    def _logarithm(self, root: int, sources: Sequence[int]) -> Iterator[Rewrite]:
        for i in sources:
            exponentials = [j for j in self.sources(i) if self.name(j) == "exp"]
            sums = [j for j in self.sources(i) if self.name(j) == "reduce_sum"]
            if self.name(i) == "reduce_sum":
                yield from self._sum_of_exponentials(root, i)
            elif self.name(i) in ("div", "mul") and self.has_number(i, None):
                for total in sums:
                    yield from self._sum_of_exponentials(root, total, (i,))
            elif self.name(i) in TWO_EXPONENTIALS and len(exponentials) > 1:
                yield Rewrite(TWO_EXPONENTIALS[self.name(i)], (*exponentials, i), root)
            elif self.name(i) == "div" and exponentials:
                text = "log_softmax(x) in place of log(softmax(x))"
                yield Rewrite(text, (*exponentials, *sums, i), root)

    def is_made_of(self, index: int, name: str, depth: int = 6) -> bool:
        before = [i for operand in self.whole.get(index, ()) for i in operand] if depth else []
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
        same = [i for i in self.sources(total) if self.is_same(i, exponential)]
        if same and not shifted:
            text = "softmax(x) in place of exp(x) / sum(exp(x))"
            yield Rewrite(text, (exponential, *same, total), root)

    def is_same(self, a: int, b: int) -> bool:
        """Returns whether two operations compute the same, as of an expression written twice."""
        read = [self.equations[i].eqn.invars for i in (a, b)]
        return self.name(a) == self.name(b) and read[0] == read[1]

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
