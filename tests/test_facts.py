"""Each fact of the table of primitives holds for every primitive that claims it.

A fact is tested on the primitive alone: `bound` finds its equations in the example of
`tests/primitives.py` and calls each on other operands.
"""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from primitives import FLOATS, OTHERS
from scalewise.primitives import FACTS, NANS, POLES, PRIMITIVES, Family, having, names, params

EXAMPLES = OTHERS | FLOATS


@dataclasses.dataclass(frozen=True)
class Bound:
    """An equation of an example: its parameters, its operands there, and a call of it."""

    name: str
    params: dict
    operands: list[np.ndarray]
    call: Callable

    def __call__(self, *operands):
        return [plain(x) for x in self.call(*map(jnp.asarray, operands))]

    @property
    def is_call(self):
        return PRIMITIVES[self.name].family is Family.CALL

    @property
    def converts(self):
        """Whether a parameter names the dtype of the result."""
        return bool({"new_dtype", "preferred_element_type"} & self.params.keys())

    @property
    def results(self):
        return self(*self.operands)

    @property
    def floats(self):
        """Indices of the operands that are float arrays."""
        return [i for i, x in enumerate(self.operands) if is_float(x)]

    def replaced(self, i, operand):
        return self(*self.operands[:i], operand, *self.operands[i + 1 :])


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def plain(x):
    return x if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else np.asarray(x)


def bound(name):
    """The equations of that primitive in its example."""
    f, arguments = EXAMPLES[name]
    found = []

    def evaluate(jaxpr, consts, arguments):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
        for e in jaxpr.eqns:
            inputs = [v.val if hasattr(v, "val") else values[v] for v in e.invars]

            def call(*operands, e=e):
                outs = e.primitive.bind(*operands, **e.primitive.get_bind_params(e.params))
                return list(outs) if e.primitive.multiple_results else [outs]

            if e.primitive.name in ("jit", "pjit") and name not in ("jit", "pjit"):
                outs = evaluate(params.body(e).jaxpr, params.body(e).consts, inputs)
            else:
                outs = call(*inputs)
            if e.primitive.name == name:
                found.append(Bound(name, e.params, [plain(x) for x in inputs], call))
            values.update(zip(e.outvars, outs, strict=True))
        return [v.val if hasattr(v, "val") else values[v] for v in jaxpr.outvars]

    closed = jax.make_jaxpr(f)(*map(jnp.asarray, arguments))
    evaluate(closed.jaxpr, closed.consts, [jnp.asarray(a) for a in arguments])
    assert found
    return found


def magnitudes(arrays):
    return {float(v) for x in arrays if is_float(x) for v in np.abs(x.astype(np.float64)).ravel()}


def placed(x, i, value):
    y = x.copy()
    y.ravel()[i] = value
    return y


def direct(b):
    """Traced with x64 on and lowered with x64 off, float64 operands meet no other float type."""
    if b.is_call or b.converts:
        return True
    wide = [np.float64(x) if i in b.floats else x for i, x in enumerate(b.operands)]
    with jax.enable_x64(True):
        traced = jax.jit(b.call).trace(*wide)
    types = set(re.findall(r"x?((?:bf|f)\d+)>", traced.lower().as_text()))
    return types <= {"f64"}


def instructions(b):
    """The number of instructions of the program that XLA compiles for the equation."""
    compiled = jax.jit(b.call).lower(*map(jnp.asarray, b.operands)).compile()
    return compiled.as_text().count(" = ")


def exact(b):
    filled = {np.inf, 1.0} if b.operands else set()
    return magnitudes(b.results) <= magnitudes(b.operands) | {0.0} | filled


def elementwise(b):
    shape = np.broadcast_shapes(*(x.shape for x in b.operands))
    order = np.random.default_rng(0).permutation(int(np.prod(shape)))
    shuffled = [
        np.broadcast_to(x, shape).ravel()[order].reshape(shape) if x.shape == shape else x
        for x in b.operands
    ]
    return all(
        np.array_equal(got.ravel(), want.ravel()[order], equal_nan=True) and got.shape == shape
        for got, want in zip(b(*shuffled), b.results, strict=True)
    )


def chooses(b):
    floats = {float(v) for i in b.floats for v in b.operands[i].ravel()}
    filled = {0.0} if b.params.get("fill_value", 0) is None else set()
    return all({float(v) for v in y.ravel()} <= floats | filled for y in b.results if is_float(y))


def selects(b):
    shape = b.results[0].shape
    given = [np.broadcast_to(b.operands[i], shape) for i in b.floats]
    return bool(np.any([b.results[0] == x for x in given], axis=0).all())


def same_order(b):
    return np.array_equal(b.results[0].ravel(), b.operands[0].ravel())


def keeps_constant(b):
    constant = [np.full_like(x, 3) if i in b.floats else x for i, x in enumerate(b.operands)]
    return all(set(y.ravel().tolist()) <= {3.0} for y in b(*constant))


def own_dtype(b):
    """It has no equal in bfloat16: another result, none, or code for one dtype among its params."""
    holds_code = any("jaxpr" in type(x).__name__.lower() or callable(x) for x in b.params.values())
    if holds_code or not b.floats:
        return True
    narrow = [x.astype(jnp.bfloat16) if i in b.floats else x for i, x in enumerate(b.operands)]
    try:
        got = b(*narrow)
    except Exception:  # not defined for 16 bits, as linear algebra
        return True
    wide = b(*(x.astype(np.float32) if i in b.floats else x for i, x in enumerate(narrow)))
    pairs = zip(got, wide, strict=True)
    return any(not np.array_equal(x, np.asarray(y).astype(x.dtype)) for x, y in pairs)


def single(b):
    """It isn't defined for bfloat16, takes complex numbers, or is a solver, whose parameters hold
    functions."""
    if any(map(np.iscomplexobj, b.operands)):
        return True
    narrow = [x.astype(jnp.bfloat16) if i in b.floats else x for i, x in enumerate(b.operands)]
    try:
        b(*narrow)
    except Exception:
        return True
    return any(callable(x) or "jaxpr" in type(x).__name__.lower() for x in b.params.values())


def packed(b):
    """Parts of its first result grow by different factors with its operand."""
    before, after = b.results[0], b.replaced(0, 4 * b.operands[0])[0]
    factors = after[before != 0] / before[before != 0]
    return len(np.unique(np.round(factors, 2))) > 1


def drops(b):
    """Some element that isn't finite reaches no result, for indices of 0."""
    first = [x if i in b.floats else np.zeros_like(x) for i, x in enumerate(b.operands)]
    for i in b.floats:
        for value in (np.nan, np.inf, -np.inf):
            for j in range(first[i].size):
                outs = b(*first[:i], placed(first[i], j, value), *first[i + 1 :])
                if all(np.isfinite(y).all() for y in outs if is_float(y)):
                    return True
    return False


def keeps_scale(b):
    return max(magnitudes(b.results)) <= max(magnitudes(b.operands))


def reduces(b):
    x = b.operands[b.floats[0]]
    hit = np.zeros_like(b.results[0], int)
    for j in range(x.size):
        hit += np.isnan(b.replaced(b.floats[0], placed(x, j, np.nan))[0])
    return hit.max() > 1


def stable(b):
    """A relative error in an operand grows by a factor of at most 8."""
    signs = np.random.default_rng(0)
    for i in b.floats:
        x = b.operands[i]
        moved = (x * (1 + 2.0**-16 * signs.choice([-1, 1], x.shape))).astype(x.dtype)
        for got, want in zip(b.replaced(i, moved), b.results, strict=True):
            if np.any(np.abs(got - want) > 8 * 2.0**-16 * np.abs(want)):
                return False
    return True


def masks(b):
    """A large negative number becomes 0."""
    return all(not np.any(y) for y in b.replaced(0, np.full_like(b.operands[0], -1e4)))


def in_norms(b):
    positive = [np.abs(x) if i in b.floats else x for i, x in enumerate(b.operands)]
    return all(bool((y >= 0).all()) for y in b(*positive))


def adds(b):
    a, c = b.operands
    return np.array_equal(b.results[0], a + c) or np.array_equal(b.results[0], a - c)


def accumulates(b):
    x = b.operands[0]
    added = b.replaced(0, np.zeros_like(x))[0]
    return np.any(added == 0) and np.any(added != 0) and np.allclose(b.results[0], x + added)


def bilinear(b):
    """Twice one operand gives twice the result, for at least two operands or one."""
    want = b.results[0]
    doubled = [np.allclose(b.replaced(i, 2 * b.operands[i])[0], 2 * want) for i in b.floats]
    return any(doubled)


def indexes(b):
    """Reordering the operand reorders the integers that it returns."""
    x = b.operands[0]
    return not np.array_equal(b(*(y[..., ::-1] for y in b.operands))[-1], b.results[-1]) or (
        is_float(b.results[0]) and np.array_equal(np.sort(x), b.results[0])
    )


def collective(b):
    return any("axis" in name or "axes" in name for name in b.params)


def costly(b):
    cost = jax.jit(b.call).lower(*map(jnp.asarray, b.operands)).cost_analysis()
    return cost.get("transcendentals", 0) > 0 or cost["flops"] > b.results[0].size


def host(b):
    return any(callable(x) for x in b.params.values())


def whole(b):
    """The results are whole numbers, though the operands aren't."""
    x = b.operands[0]
    return np.array_equal(b.results[0], np.rint(b.results[0])) and not np.array_equal(x, np.rint(x))


def linear_algebra(b):
    """Both operands are factors: of one, the result is a linear function of the other."""
    return len(b.floats) >= 2 and bilinear(b)


HOLDS = {
    "exact": exact, "elementwise": elementwise, "chooses": chooses, "selects": selects,
    "same_order": same_order, "keeps_constant": keeps_constant, "own_dtype": own_dtype,
    "single": single, "packed": packed,
    "drops": drops, "keeps_scale": keeps_scale, "reduces": reduces, "stable": stable,
    "in_norms": in_norms, "adds": adds, "accumulates": accumulates, "indexes": indexes,
    "host": host, "whole": whole, "masks": masks,
    "contraction": linear_algebra, "bilinear": bilinear, "collective": collective,
    "series": lambda b: instructions(b) > 20,
    "recomputed": lambda b: exact(b) or elementwise(b),
    "costly": costly,
    "direct": direct,
}  # fmt: skip
# Claims that no operand shows, and why they hold.
UNSEEN = {
    ("single", "triangular_solve"): "float32 at least in BLAS; XLA expands it for 16 bits",
    ("own_dtype", "reduce_precision"): "flushes what is subnormal in the carrier on some platforms",
    ("own_dtype", "select_and_gather_add"): "packs two numbers into a word of twice the bits",
}
# Facts of primitives that no example of one device binds.
ELSEWHERE = {"collective", "host", "contraction"}


def test_every_fact_has_a_test():
    assert set(HOLDS) == set(FACTS)
    assert {fact for fact in FACTS if not having(fact) & EXAMPLES.keys()} <= ELSEWHERE


@pytest.mark.parametrize("fact", sorted(FACTS.keys() - ELSEWHERE))
def test_each_primitive_has_the_facts_it_claims(fact):
    for name in sorted(having(fact) & EXAMPLES.keys()):
        false = [b for b in bound(name) if b.operands and not HOLDS[fact](b)]
        assert not false or (fact, name) in UNSEEN, f"{name} is not {fact}"


EVERYWHERE = {  # operands of which each element gives a NaN, or an infinity
    "difference": (np.inf, -np.inf), "product": (0.0, np.inf), "quotient": (0.0, 0.0),
    "negative": (-2.0, 0.5), "infinite": (np.inf,), "beyond_1": (2.0,),
    "log": (0.0,), "root": (0.0,), "power": (0.0, -1.0), "one": (1.0,), "pole": (0.0,),
}  # fmt: skip


def made(b, numbers):
    """The results where all elements of each operand are one of these numbers; of a single operand
    of a sum, elements in turn."""
    operands = [np.full_like(x, v) for x, v in zip(b.operands, numbers, strict=False)]
    if len(b.floats) == 1 and len(numbers) == 2 and b.name in having("reduces") | {"cumsum"}:
        operands = [np.resize(np.array(numbers, b.operands[0].dtype), b.operands[0].shape)]
    return [*b(*operands, *b.operands[len(operands) :])]


@pytest.mark.parametrize(
    ("word", "name"),
    [(word, name) for words, causes in (("nan", NANS), ("pole", POLES)) for word in causes
     for name in sorted(names(lambda r, t=causes[word], w=words: getattr(r, w) == t))],
)  # fmt: skip
def test_each_primitive_makes_the_nan_or_infinity_that_it_claims(word, name):
    b = bound(name)[0]
    numbers = EVERYWHERE[word]
    if name == "sub":
        numbers = numbers[:1] * 2
    if name == "log1p":
        numbers = (numbers[0] - 1,)  # of 1 + x
    if name == "integer_pow":
        assert np.isinf(jax.lax.integer_pow(jnp.zeros(2), -1)).all()
        return
    wanted = np.isinf if PRIMITIVES[name].pole == POLES.get(word) else np.isnan
    assert any(wanted(y).any() for y in made(b, numbers) if is_float(y))
