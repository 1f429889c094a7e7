"""Expressions of a user's source that a fix replaces, found by patterns of Python's syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

# By the text of a fix before "in place of": the expression that is replaced, and what replaces it.
# Single capitals stand for any expression, the same one each time; `...` for a call's further
# arguments. Squares are written `square(X)`, methods of arrays as functions.
AXES = (  # in a mean, in what takes its place, how many numbers it is of
    ("..., axis=A", "..., axis=A", "jnp.size(X, A)"),
    ("A, ...", "..., axis=A", "jnp.size(X, A)"),
    ("...", "...", "jnp.size(X)"),
)
MEANS = [
    *((f"mean(square(X), {axis})", own, n) for axis, own, n in AXES),
    *((f"sum(square(X), {axis}) / N", own, "N") for axis, own, _ in AXES),
]
PATTERNS: Mapping[str, Sequence[tuple[str, str]]] = {
    "log1p(x)": [("log(1 + X)", "jnp.log1p(X)")],
    "log1p(-x)": [("log(1 - X)", "jnp.log1p(-(X))")],
    "expm1(x)": [("exp(X) - 1", "jnp.expm1(X)")],
    "-expm1(x)": [("1 - exp(X)", "-jnp.expm1(X)")],
    "log(-expm1(x))": [("log(1 - exp(X))", "jnp.log(-jnp.expm1(X))")],
    "x + log(-expm1(-x))": [("log(exp(X) - 1)", "X + jnp.log(-jnp.expm1(-X))")],
    "x + log(-expm1(y - x))": [("log(exp(X) - exp(Y))", "X + jnp.log(-jnp.expm1(Y - X))")],
    "x + log(s)": [("log(S * exp(X))", "X + jnp.log(S)")],
    "exp(n * log1p(x))": [("(1 + X) ** N", "jnp.exp(N * jnp.log1p(X))")],
    "2 * sin(x / 2)**2": [("1 - cos(X)", "2 * jnp.sin(X / 2) ** 2")],
    "2 * arcsin(sqrt(x / 2))": [("arccos(1 - X)", "2 * jnp.arcsin(jnp.sqrt(X / 2))")],
    "2 * arcsinh(sqrt(x / 2))": [("arccosh(1 + X)", "2 * jnp.arcsinh(jnp.sqrt(X / 2))")],
    "sigmoid(-x)": [("1 - sigmoid(X)", "jax.nn.sigmoid(-X)")],
    "logaddexp(x, -x) - log(2)": [("log(cosh(X))", "jnp.logaddexp(X, -X) - jnp.log(2.0)")],
    "cumlogsumexp(x)": [
        ("log(cumsum(exp(X)))", "jax.lax.cumlogsumexp(X)"),
        ("log(cumsum(exp(X), A))", "jax.lax.associative_scan(jnp.logaddexp, X, axis=A)"),
        ("log(cumsum(exp(X), axis=A))", "jax.lax.associative_scan(jnp.logaddexp, X, axis=A)"),
    ],
    "slogdet(a)": [("log(det(X))", "jnp.linalg.slogdet(X)[1]")],
    "logsumexp(x) - log(n)": [
        ("log(mean(exp(X)))", "jax.nn.logsumexp(X) - jnp.log(jnp.size(X))"),
        ("log(mean(exp(X), axis=A))", "jax.nn.logsumexp(X, axis=A) - jnp.log(jnp.size(X, A))"),
        ("log(mean(exp(X), A))", "jax.nn.logsumexp(X, axis=A) - jnp.log(jnp.size(X, A))"),
    ],
    "sqrt((x - y) * (x + y))": [("sqrt(square(X) - square(Y))", "jnp.sqrt((X - Y) * (X + Y))")],
    "log_sigmoid(x)": [("log(sigmoid(X))", "jax.nn.log_sigmoid(X)")],
    "log_sigmoid(-x)": [("log(1 - sigmoid(X))", "jax.nn.log_sigmoid(-(X))")],
    "softplus(x)": [("log(1 + exp(X))", "jax.nn.softplus(X)")],
    "logaddexp(x, y)": [("log(exp(X) + exp(Y))", "jnp.logaddexp(X, Y)")],
    "logsumexp(x)": [("log(sum(exp(X), ...))", "jax.nn.logsumexp(X, ...)")],
    "logsumexp(x, b=w)": [("log(sum(W * exp(X), ...))", "jax.nn.logsumexp(X, ..., b=W)")],
    "log_softmax(x)": [
        ("log(softmax(X, ...))", "jax.nn.log_softmax(X, ...)"),
        ("log(exp(X) / sum(exp(X)))", "jax.nn.log_softmax(X, axis=None)"),
        ("log(exp(X) / sum(exp(X), ..., axis=A))", "jax.nn.log_softmax(X, axis=A)"),
        ("log(exp(X) / sum(exp(X), A, ...))", "jax.nn.log_softmax(X, axis=A)"),
    ],
    "softmax(x)": [
        ("exp(X) / sum(exp(X))", "jax.nn.softmax(X, axis=None)"),
        ("exp(X) / sum(exp(X), ..., axis=A)", "jax.nn.softmax(X, axis=A)"),
        ("exp(X) / sum(exp(X), A, ...)", "jax.nn.softmax(X, axis=A)"),
    ],
    "sum(x)": [("log(prod(exp(X), ...))", "jnp.sum(X, ...)")],
    "hypot": [("sqrt(square(X) + square(Y))", "jnp.hypot(X, Y)")],
    "the mean of squared deviations": [
        ("mean(square(X)) - square(mean(X))", "jnp.mean(jnp.square(X - jnp.mean(X)))"),
        (
            "mean(square(X), ..., axis=A) - square(mean(X, ..., axis=A))",
            "jnp.mean(jnp.square(X - jnp.mean(X, axis=A, keepdims=True)), ..., axis=A)",
        ),
        (
            "mean(square(X), A, ...) - square(mean(X, A, ...))",
            "jnp.mean(jnp.square(X - jnp.mean(X, A, keepdims=True)), A, ...)",
        ),
    ],
    "ops.l2_norm": [
        (
            "sqrt(sum(sum(square(X), A) for V in Y))",
            "scalewise.ops.l2_norm("
            "jnp.stack([scalewise.ops.l2_norm(X, axis=A) for V in Y]), axis=0)",
        ),
        (
            "sqrt(sum(sum(square(X), ...) for V in Y))",
            "scalewise.ops.l2_norm(jnp.stack([scalewise.ops.l2_norm(X, ...) for V in Y]))",
        ),
        *(
            (
                f"{norm}(X)",
                "scalewise.ops.l2_norm("
                "jnp.stack([*map(scalewise.ops.l2_norm, jax.tree.leaves(X))]))",
            )
            for norm in ("global_norm", "tree_norm", "tree_l2_norm")  # of optax
        ),
        ("sqrt(sum(square(X), A, ...))", "scalewise.ops.l2_norm(X, ..., axis=A)"),
        ("sqrt(sum(square(X), ...))", "scalewise.ops.l2_norm(X, ...)"),
        ("sqrt(sum(square(X), A, ...) + E)", "scalewise.ops.l2_norm(X, E, ..., axis=A)"),
        ("sqrt(sum(square(X), ...) + E)", "scalewise.ops.l2_norm(X, E, ...)"),
        *(
            (f"sqrt({mean} + E)", f"scalewise.ops.l2_norm(X, E * {n}, {own}) / {n} ** 0.5")
            for mean, own, n in MEANS
        ),
        *(
            (f"sqrt({mean})", f"scalewise.ops.l2_norm(X, {own}) / {n} ** 0.5")
            for mean, own, n in MEANS
        ),
        ("norm(X, O, A, ...)", "scalewise.ops.l2_norm(X, ..., axis=A)"),
        ("norm(X, O, ...)", "scalewise.ops.l2_norm(X, ...)"),
        ("norm(X, ..., ord=O)", "scalewise.ops.l2_norm(X, ...)"),
        ("norm(X, ...)", "scalewise.ops.l2_norm(X, ...)"),
    ],
    # of a product that isn't taken the logarithm of, the meaning would change
    "sum(log(x))": [("log(prod(X, ...))", "jnp.sum(jnp.log(X), ...)")],
}
SCALED = (
    "(lambda *args: jax.tree.map(lambda g: jnp.float32(g) / {k}, "
    "{grad}(lambda *args: {k} * ({f})(*args){rest})(*args)))"
)
GRADIENTS = ("grad", "value_and_grad", "filter_grad", "filter_value_and_grad")
INLINED = 4  # names that are looked up within each other
Found = dict[str, ast.expr]  # what names stand for; of `...` a call with these arguments


def replacement(node: ast.expr, texts: Sequence[str], scope: ast.AST) -> str | None:
    """Returns the source that takes an expression's place, if it is of one of the ``PATTERNS``."""
    for pattern, template in (x for text in texts for x in PATTERNS.get(text, ())):
        found: Found = {}
        expected = ast.parse(pattern, mode="eval").body
        if _matches(expected, node, found, _definitions(scope)):
            new = _Fill(found).visit(ast.parse(template, mode="eval").body)
            loose = isinstance(new, ast.BinOp | ast.UnaryOp) and isinstance(node, ast.Call)
            return f"({ast.unparse(new)})" if loose else ast.unparse(new)
    return None


def scaled_gradient(node: ast.expr, scale: str, source: str) -> str | None:
    if not isinstance(node, ast.Call) or name_of(node.func) not in GRADIENTS or len(node.args) != 1:
        return None
    if any(x.arg in (None, "has_aux") for x in node.keywords):
        return None
    rest = "".join(f", {x.arg}={text_of(x.value, source)}" for x in node.keywords)
    grad, loss = text_of(node.func, source), text_of(node.args[0], source)
    return SCALED.format(k=scale, grad=grad, f=loss, rest=rest)


def uncast(node: ast.expr, dtype: str, source: str) -> str | None:
    match node:
        case ast.Call(ast.Attribute(value, "astype"), [to]) if dtype in ast.unparse(to):
            return text_of(value, source)
    return None


def text_of(node: ast.expr, source: str) -> str:
    """Returns an expression as a source has it."""
    return ast.get_source_segment(source, node) or ast.unparse(node)


def name_of(node: ast.expr) -> str:
    """Returns ``sum`` of ``jnp.sum`` and of ``sum``."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _normal(node: ast.expr) -> ast.expr:
    """Returns a square as ``square(x)``, and a method's call as a function's."""
    match node:
        case ast.Call(ast.Attribute(ast.Attribute(attr="tree"), "norm"), arguments, keywords):
            return ast.Call(ast.Name("tree_norm"), arguments, keywords)
        case ast.BinOp(left, ast.Pow(), ast.Constant(2 | 2.0)):
            return ast.Call(ast.Name("square"), [left], [])
        case ast.BinOp(left, ast.Mult(), right) if ast.dump(left) == ast.dump(right):
            return ast.Call(ast.Name("square"), [left], [])
        case ast.Call(ast.Attribute(owner, name), arguments, keywords) if not _is_module(owner):
            return ast.Call(ast.Name(name), [owner, *arguments], keywords)
    return node


def _is_module(node: ast.expr) -> bool:
    return name_of(node) in ("jnp", "np", "numpy", "jax", "lax", "nn", "linalg", "nnx", "optax")


def _definitions(scope: ast.AST) -> dict[str, ast.expr]:
    found: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, []).append(None)
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(node.value)
    return {k: x for k, own in found.items() if len(own) == 2 for x in own if x is not None}


def _matches(
    expected: ast.expr,
    node: ast.expr,
    found: Found,
    known: Mapping[str, ast.expr],
    depth: int = INLINED,
) -> bool:
    if isinstance(expected, ast.Name) and len(expected.id) == 1:
        return ast.dump(found.setdefault(expected.id, node)) == ast.dump(node)

    def same(a: ast.expr, b: ast.expr) -> bool:
        return _matches(a, b, found, known, depth)

    node = _normal(node)
    if isinstance(node, ast.Name) and node.id in known and depth:
        return _matches(expected, known[node.id], found, known, depth - 1)
    match expected, node:
        case ast.Constant(a), ast.Constant(b):
            return type(b) in (int, float) and a == b
        case ast.BinOp(a, operator, b), ast.BinOp(c, other, d) if type(operator) is type(other):
            before = dict(found)
            if same(a, c) and same(b, d):
                return True
            found.clear()
            found.update(before)
            swaps = isinstance(operator, ast.Add | ast.Mult)
            return swaps and same(a, d) and same(b, c)
        case ast.Call(), ast.Call() if name_of(expected.func) == name_of(node.func):
            return _arguments_match(expected, node, found, same)
        case (
            ast.GeneratorExp(a, [ast.comprehension(b, c)]),
            ast.GeneratorExp(d, [ast.comprehension(e, f, [])])
            | ast.ListComp(d, [ast.comprehension(e, f, [])]),
        ):
            return same(b, e) and same(c, f) and same(a, d)
    return False


def _arguments_match(expected: ast.Call, node: ast.Call, found: Found, same) -> bool:
    *first, last = expected.args
    rest = isinstance(last, ast.Constant) and last.value is ...
    own = first if rest else expected.args
    if len(node.args) < len(own) or (len(node.args) > len(own) and not rest):
        return False
    if not all(map(same, own, node.args)):
        return False
    given = {x.arg: x.value for x in node.keywords}
    for keyword in expected.keywords:
        if keyword.arg not in given or not same(keyword.value, given.pop(keyword.arg)):
            return False
    if given and not rest:
        return False
    more = ast.Call(ast.Name("f"), node.args[len(own) :], [ast.keyword(*x) for x in given.items()])
    return not rest or ast.dump(found.setdefault("...", more)) == ast.dump(more)


class _Fill(ast.NodeTransformer):
    """Puts what its names stand for into a template."""

    def __init__(self, found: Found):
        self.found = found

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.found.get(node.id, node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        kept = [x for x in node.args if not (isinstance(x, ast.Constant) and x.value is ...)]
        rest = self.found.get("...") if len(kept) < len(node.args) else None
        node.args = kept
        self.generic_visit(node)
        if isinstance(rest, ast.Call):
            node.args += rest.args
            node.keywords += rest.keywords
        return node


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Returns all but names, whose expressions are found where they are written."""
    inside = (x for x in ast.walk(node) if not isinstance(x, ast.Name))
    return (x for x in inside if isinstance(x, ast.expr))
