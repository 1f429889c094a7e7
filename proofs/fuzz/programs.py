"""Random programs of JAX primitives on special values: transformed, and in float32.

A program is a list of operations on 4 by 4 matrices and vectors of 4, each of which is bounded, or
keeps away from poles, so that float32 is finite wherever its operands are. Inputs have ordinary,
huge, tiny, subnormal, zero and non-finite elements. Shapes are few and programs run eagerly, one
primitive at a time, so that nearly everything is compiled once.

What has to hold, of a value and (in some programs) of gradients:

- nothing raises;
- a result is finite where float32's is, whatever non-finite elements stand beside it;
- a NaN of the input that reaches a result in float32 reaches it;
- finite results are as close to float32's as the transformation's roundings allow: within what a
  program's results move if exactly these are replaced by random ones (:mod:`.disturbed`);
- ``emulate`` gives the same bits under ``jit`` as eagerly.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import scalewise as sw
from proofs.fuzz.disturbed import LEAST, Model, Rounding, current, disturbed, static, traced, wide
from proofs.records import REPOSITORY
from scalewise.formats import BlockFormat
from scalewise.interpret import Program as Traced

SIZE = 4
MATRIX, VECTOR = (SIZE, SIZE), (SIZE,)
ROWS = np.asarray([2, 0], np.int32)
MASK = np.tri(SIZE, dtype=bool)


@jax.custom_vjp
def _clipped(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


_clipped.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (jnp.clip(g, -1, 1),))


def _scanned(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, row: (jnp.tanh(c + row), c * 0.5), x[0], x)[1]


def _looped(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + 0.5 * x, x)


def _branched(x: jax.Array) -> jax.Array:
    return lax.cond(jnp.isfinite(x[0, 0]), lambda y: y + 1, lambda y: y * 0.5, x)


@dataclasses.dataclass(frozen=True)
class Operation:
    """A function of arrays of given shapes, and the shape of its result."""

    takes: tuple[tuple[int, ...], ...]
    gives: tuple[int, ...]
    function: Callable[..., jax.Array]


def of(takes: Any, gives: tuple[int, ...], **functions: Callable) -> dict[str, Operation]:
    return {name: Operation(takes, gives, f) for name, f in functions.items()}


ELEMENTWISE: dict[str, Callable] = {
    "neg": jnp.negative, "abs": jnp.abs, "sin": jnp.sin, "cos": jnp.cos, "tanh": jnp.tanh,
    "decay": lambda x: jnp.exp(-jnp.abs(x)), "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "root": lambda x: jnp.sqrt(1 + jnp.abs(x)), "rsqrt": lambda x: lax.rsqrt(1 + jnp.abs(x)),
    "logistic": jax.nn.sigmoid, "erf": lax.erf, "atan": jnp.arctan, "asinh": jnp.arcsinh,
    "relu": jax.nn.relu, "half": lambda x: x * 0.5, "shifted": lambda x: x + 1e-8,
    "less": lambda x: 1 - x, "clipped": _clipped, "clamp": lambda x: jnp.clip(x, -2, 2),
    "expm1": lambda x: jnp.expm1(-jnp.abs(x)), "softplus": jax.nn.softplus,
}  # fmt: skip
BINARY: dict[str, Callable] = {
    "add": jnp.add, "sub": jnp.subtract, "max": jnp.maximum, "min": jnp.minimum,
    "mul": lambda x, y: jnp.tanh(x) * y, "div": lambda x, y: x / (1 + jnp.abs(y)),
    "atan2": lambda x, y: lax.atan2(x, 1 + jnp.abs(y)), "logaddexp": jnp.logaddexp,
}  # fmt: skip
OPERATIONS: dict[str, Operation] = {
    **of((MATRIX,), MATRIX, **ELEMENTWISE),
    **of((MATRIX, MATRIX), MATRIX, **BINARY),
    **of(
        (MATRIX,), MATRIX,
        transpose=jnp.transpose, rev=lambda x: lax.rev(x, (0,)), sort=lambda x: jnp.sort(x, 1),
        softmax=jax.nn.softmax, cumsum=lambda x: jnp.cumsum(x, 1) / SIZE,
        cummax=lambda x: lax.cummax(x, axis=0), roll=lambda x: jnp.roll(x, 1, 0),
        pad=lambda x: lax.pad(x[1:, 1:], np.float32(0), ((0, 1, 0), (1, 0, 0))),
        masked=lambda x: jnp.where(MASK, x, np.float32(0)),
        masked_softmax=lambda x: jax.nn.softmax(jnp.where(MASK, x, np.float32(-1e9))),
        norm=lambda x: x * lax.rsqrt(jnp.mean(jnp.square(jnp.tanh(x)), -1, keepdims=True) + 1e-5),
        scatter=lambda x: x.at[ROWS].add(x[:2]), put=lambda x: x.at[ROWS].set(x[1:3]),
        apply=lambda x: x.at[ROWS].apply(jnp.sin),
        remat=jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x) * 3)),
        scan=_scanned, loop=_looped, branch=_branched,
    ),
    **of(
        (MATRIX,), VECTOR,
        mean=lambda x: jnp.mean(x, 1), top=lambda x: jnp.max(x, 0), low=lambda x: jnp.min(x, 1),
        logsumexp=lambda x: jax.nn.logsumexp(x, 1), first=lambda x: x[0],
        diagonal=jnp.diagonal, square=lambda x: jnp.mean(jnp.square(jnp.tanh(x)), 0),
    ),
    **of((VECTOR,), MATRIX, spread=lambda x: jnp.broadcast_to(x[:, None], MATRIX)),
    **of((VECTOR, VECTOR), MATRIX, outer=lambda x, y: jnp.tanh(x)[:, None] * y[None, :]),
    **of((MATRIX, MATRIX), MATRIX, dot=lambda x, y: x @ y / SIZE,
          dot_t=lambda x, y: lax.dot_general(x, y, (((0,), (1,)), ((), ()))) / SIZE),
    **of((MATRIX, VECTOR), VECTOR, matvec=lambda x, y: x @ y / SIZE),
    **of((VECTOR,), VECTOR, vector_tanh=jnp.tanh, vector_softmax=jax.nn.softmax),
}  # fmt: skip
LOOPS = ("scan", "loop", "branch", "remat", "apply")  # compiled anew in each program
NOT_DIFFERENTIABLE = ("apply",)


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation of a program and which of the values before it takes."""

    name: str
    operation: Operation
    reads: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations on three inputs, two matrices and a vector; its results are its last values."""

    steps: tuple[Step, ...]
    gradient: bool

    def __str__(self) -> str:
        text = " ".join(f"{s.name}{list(s.reads)}".replace(" ", "") for s in self.steps)
        return text + " with its gradient" * self.gradient

    def __call__(self, *inputs: Any) -> Any:
        """The last two values; with ``gradient``, that of their mean for each input as well."""

        def results(*inputs: Any) -> list[Any]:
            values = list(inputs)
            for step in self.steps:
                values.append(step.operation.function(*[values[i] for i in step.reads]))
            return values[-2:]

        def loss(*inputs: Any) -> jax.Array:
            return sum((jnp.mean(y) for y in results(*inputs)), jnp.float32(0))

        if not self.gradient:
            return results(*inputs)
        return [*results(*inputs), *jax.grad(loss, (0, 1, 2))(*inputs)]


def program(rng: random.Random, operations: Mapping[str, Operation] = OPERATIONS) -> Program:
    """A random program of 3 to 10 operations, at most one of them a loop."""
    shapes = [MATRIX, MATRIX, VECTOR]
    steps: list[Step] = []
    gradient = rng.random() < 0.4
    names = [n for n in operations if not (gradient and n in NOT_DIFFERENTIABLE)]
    for _ in range(rng.randint(3, 10)):
        name = rng.choice(names)
        if name in LOOPS:
            names = [n for n in names if n not in LOOPS]
        takes = operations[name].takes
        # later values more often, so that programs are deep rather than wide
        reads = tuple(rng.choice([i for i, s in enumerate(shapes) if s == t][-3:]) for t in takes)
        steps.append(Step(name, operations[name], reads))
        shapes.append(operations[name].gives)
    return Program(tuple(steps), gradient)


SPECIAL = {
    "nan": np.float32(np.nan), "inf": np.float32(np.inf), "-inf": np.float32(-np.inf),
    "-0": np.float32(-0.0), "0": np.float32(0), "subnormal": np.float32(1e-40),
    "tiny": np.float32(1e-30), "huge": np.float32(1e18),
}  # fmt: skip


def inputs(rng: random.Random) -> tuple[list[jax.Array], str]:
    """Two matrices and a vector, one of them with a few special elements, and their kind."""
    made = []
    for shape in (MATRIX, MATRIX, VECTOR):
        scale = 2.0 ** rng.choice([0, 0, 0, -12, 8])
        flat = [rng.gauss(0, 1) * scale for _ in range(int(np.prod(shape)))]
        made.append(np.asarray(flat, np.float32).reshape(shape))
    kind = rng.choice(["ordinary", "ordinary", *SPECIAL])
    if kind in SPECIAL:
        x = made[rng.randrange(3)]
        for _ in range(rng.choice([1, 1, 3, x.size])):
            x.reshape(-1)[rng.randrange(x.size)] = SPECIAL[kind]
    return [jnp.asarray(x) for x in made], kind


def _delayed(f: Callable) -> Callable:
    """One step of delayed scaling, whose history is that of the same inputs."""
    scaled = sw.autoscale(f, "fp8_delayed")

    def step(*inputs: Any) -> Any:
        return scaled.step(scaled.init(*inputs), *inputs)[0]

    return step


def _recipe(name: str) -> tuple[Callable, Model]:
    recipe = sw.recipes.CATALOGUE[name]
    predicted = isinstance(recipe.products.scaling, sw.Unit)
    up = recipe.products.scaling == sw.Mx("rceil")
    forward, backward = (
        static(f) if predicted else current(f, up=up)
        for f in (recipe.products.formats()[0][0], recipe.products.formats()[1][0])
    )
    blocks = isinstance(recipe.products.formats()[0][0], BlockFormat)
    stacked = current(recipe.residuals)
    apply = _delayed if name == "fp8_delayed" else lambda f: sw.autoscale(f, recipe)
    few = static(recipe.residuals) if predicted else forward
    return apply, Model(
        None, forward, backward, blocks, stacked, predicted=predicted, few=few,
        features=recipe.features if predicted else 0,
    )  # fmt: skip


# `fp16_every_op` brings the largest magnitude to 2^14, so that the smallest number, 2^-24, is
# 2^-38 of it; `scalify` brings the root mean square to 1, or where it has the whole range the
# largest magnitude to 2^14.
EVERY_OP = Rounding(10, 2.0**-38, nonzero=True)
UNIT_SIZE = Rounding(10, 2.0**-24, nonzero=True, finer=14)
AUTOCAST = Model(Rounding(7), Rounding(7), Rounding(7))  # results and operands
# name: (the transformation, what it rounds)
TRANSFORMS: dict[str, tuple[Callable[[Callable], Callable], Model]] = {
    "emulate fp32": (lambda f: sw.emulate(f, "fp32"), Model()),
    "autocast bf16": (lambda f: sw.autocast(f, "bfloat16"), AUTOCAST),
    **{
        name: _recipe(name)
        for name in ("fp16", "bf16", "fp8", "fp8_delayed", "mxfp8", "mxfp4_forward")
    },
    "fp16_every_op": (lambda f: sw.autoscale(f, "fp16_every_op"), Model(EVERY_OP)),
    "scalify": (lambda f: sw.autoscale(f, "scalify"), Model(UNIT_SIZE, propagated=True)),
    "unit_scaling": _recipe("unit_scaling"),
}
# Where one rounding decides, one run explains it. Many add up at random, in the transformation as
# in the runs, and of thousands of programs the worst is off as one of a hundred runs is. A fault
# is more than three times as far off as the farthest of all.
SAMPLES, SLACK = 256, 3.0


def _arrays(values: Any) -> list[np.ndarray]:
    return [wide(v) for v in values]


KEPT = 100  # programs whose compiled code is kept: of a thousand it takes all memory
checked = itertools.count(1)


def prepare() -> None:
    """Compiles quickly, since each primitive runs a few times, and each module once: loops of equal
    bodies, and what an earlier run has compiled, are read from ``.prove/compiled``."""
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(REPOSITORY / ".prove" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def forget() -> None:
    if next(checked) % KEPT == 0:
        jax.clear_caches()


def check(seed: int, index: int) -> list[str]:
    """The properties that a random program fails under the transformations chosen for it."""
    forget()
    rng = random.Random(f"{seed}/{index}")
    made, (given, kind) = program(rng), inputs(rng)
    text = str(made)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        want, jaxpr = _arrays(made(*given)), traced(made, given)
        others = sorted(set(TRANSFORMS) - {"emulate fp32", "fp8_delayed"})
        chosen = ["emulate fp32", *rng.sample(others, 3)]
        chosen += ["fp8_delayed"] * (rng.random() < 0.1)  # its history takes a compilation
        failures = []
        for name in chosen:
            found = _failures(made, given, kind, name, (want, jaxpr), rng)
            failures += [f"{name}, inputs {kind}: {f} in {text}" for f in found]
    return failures


def _failures(
    made: Program, given: Sequence[Any], kind: str, name: str,
    float32: tuple[list[np.ndarray], Traced], rng: random.Random,
) -> list[str]:  # fmt: skip
    (transform, model), (want, jaxpr) = TRANSFORMS[name], float32
    if name == "emulate fp32":  # which has subnormal numbers; XLA takes them for zeros on a CPU
        given = [np.where(abs(x) < np.finfo(np.float32).tiny, x * 0, x) for x in given]
    try:
        got = _arrays(transform(made)(*given))
    except Exception as error:
        return [f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"]
    failures = []
    if name == "emulate fp32" and rng.random() < 0.05:
        jitted = _arrays(jax.jit(transform(made))(*given))
        if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(jitted, got, strict=True)):
            failures.append("other bits under jit")
    if kind == "nan":
        failures += [
            f"result {place} has lost a NaN"
            for place, (a, b) in enumerate(zip(got, want, strict=True))
            if np.isfinite(a[np.isnan(b)]).any()
        ]
    noise = np.random.default_rng(rng.randrange(1 << 30))
    runs: list[list[np.ndarray]] = []
    other = [""]
    while other and len(runs) < SAMPLES:  # what one run explains, all explain
        runs.append(disturbed(jaxpr, model, noise))
        found = (unlike(i, a, b, runs) for i, (a, b) in enumerate(zip(got, want, strict=True)))
        other = [sentence for sentence in found if sentence]
    return failures + other


def unlike(place: int, got: np.ndarray, want: np.ndarray, runs: Sequence[list[np.ndarray]]) -> str:
    """How a result differs by more than disturbed runs explain; nothing if it doesn't."""
    others = np.stack([outs[place] for outs in runs])
    finite = np.isfinite(want) & np.isfinite(others).all(0)
    if not np.isfinite(got[finite]).all():
        return f"result {place} is not finite where float32 is"
    bound = SLACK * np.abs(others - want).max(0) + LEAST
    off = finite & ~(np.abs(got - want) <= bound)
    if not off.any():
        return ""
    i = int(np.flatnonzero(off)[0])
    return (
        f"result {place} is {got.flat[i]:.6g} for {want.flat[i]:.6g}, "
        f"{abs(got.flat[i] - want.flat[i]) / bound.flat[i]:.3g} times the bound"
    )
