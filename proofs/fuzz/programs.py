"""Random programs of JAX primitives on special values: transformed, and in float32.

A program is a list of operations on 4 by 4 matrices and vectors of 4, each of which is bounded, or
keeps away from poles, so that float32 is finite wherever its operands are. Inputs have ordinary,
huge, tiny, subnormal, zero and non-finite elements. Shapes are few and programs run eagerly, one
primitive at a time, so that nearly everything is compiled once.

What has to hold, of a value and (in some programs) of gradients:

- nothing raises;
- a result is finite where float32's is, whatever non-finite elements stand beside it;
- a NaN of the input that reaches a result in float32 reaches it;
- finite results are as close to float32's as the format allows: within what a program's results
  move if each operation is disturbed at random by the format's unit roundoff;
- ``emulate`` gives the same bits under ``jit`` as eagerly.
"""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import scalewise as sw

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


def _of(takes: Any, gives: tuple[int, ...], **functions: Callable) -> dict[str, Operation]:
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
    **_of((MATRIX,), MATRIX, **ELEMENTWISE),
    **_of((MATRIX, MATRIX), MATRIX, **BINARY),
    **_of(
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
    **_of(
        (MATRIX,), VECTOR,
        mean=lambda x: jnp.mean(x, 1), top=lambda x: jnp.max(x, 0), low=lambda x: jnp.min(x, 1),
        logsumexp=lambda x: jax.nn.logsumexp(x, 1), first=lambda x: x[0],
        diagonal=jnp.diagonal, square=lambda x: jnp.mean(jnp.square(jnp.tanh(x)), 0),
    ),
    **_of((VECTOR,), MATRIX, spread=lambda x: jnp.broadcast_to(x[:, None], MATRIX)),
    **_of((VECTOR, VECTOR), MATRIX, outer=lambda x, y: jnp.tanh(x)[:, None] * y[None, :]),
    **_of((MATRIX, MATRIX), MATRIX, dot=lambda x, y: x @ y / SIZE,
          dot_t=lambda x, y: lax.dot_general(x, y, (((0,), (1,)), ((), ()))) / SIZE),
    **_of((MATRIX, VECTOR), VECTOR, matvec=lambda x, y: x @ y / SIZE),
    **_of((VECTOR,), VECTOR, vector_tanh=jnp.tanh, vector_softmax=jax.nn.softmax),
}  # fmt: skip
LOOPS = ("scan", "loop", "branch", "remat", "apply")  # compiled anew in each program
NOT_DIFFERENTIABLE = ("apply",)


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation of a program and which of the values before it takes."""

    name: str
    reads: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations on three inputs, two matrices and a vector; its results are its last values."""

    steps: tuple[Step, ...]
    gradient: bool

    def values(self, inputs: Sequence[Any], disturb: Callable = lambda x: x) -> list[Any]:
        """The inputs and each operation's result, which ``disturb`` may change."""
        values = list(inputs)
        for step in self.steps:
            operation = OPERATIONS[step.name].function
            values.append(disturb(operation(*[values[i] for i in step.reads])))
        return values

    def __call__(self, *inputs: Any, disturb: Callable = lambda x: x) -> Any:
        """The last two values; with ``gradient``, that of their mean for each input as well."""

        def results(*inputs: Any) -> list[Any]:
            return self.values(inputs, disturb)[-2:]

        def loss(*inputs: Any) -> jax.Array:
            return sum((jnp.mean(y) for y in results(*inputs)), jnp.float32(0))

        if not self.gradient:
            return results(*inputs)
        return [*results(*inputs), *jax.grad(loss, (0, 1, 2))(*inputs)]


def program(rng: random.Random) -> Program:
    """A random program of 3 to 10 operations, at most one of them a loop."""
    shapes = [MATRIX, MATRIX, VECTOR]
    steps: list[Step] = []
    gradient = rng.random() < 0.4
    names = [n for n in OPERATIONS if not (gradient and n in NOT_DIFFERENTIABLE)]
    for _ in range(rng.randint(3, 10)):
        name = rng.choice(names)
        if name in LOOPS:
            names = [n for n in names if n not in LOOPS]
        takes = OPERATIONS[name].takes
        # later values more often, so that programs are deep rather than wide
        reads = tuple(rng.choice([i for i, s in enumerate(shapes) if s == t][-3:]) for t in takes)
        steps.append(Step(name, reads))
        shapes.append(OPERATIONS[name].gives)
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


# name: (transformation, unit roundoff, whether a tensor has one scale, so that its largest
# element decides how far the smallest is off)
Transform = Callable[[Callable], Callable]
TRANSFORMS: dict[str, tuple[Transform, float, bool]] = {
    # of float32 XLA's elementary functions are some ulps off, and cancellation enlarges that
    "emulate fp32": (lambda f: sw.emulate(f, "fp32"), 2.0**-20, False),
    "autocast bf16": (lambda f: sw.autocast(f, "bfloat16"), 2.0**-8, False),
    "fp16": (lambda f: sw.autoscale(f, "fp16"), 2.0**-11, True),
    "bf16": (lambda f: sw.autoscale(f, "bf16"), 2.0**-9, True),
    "fp8": (lambda f: sw.autoscale(f, "fp8"), 2.0**-3, True),
    "fp8_delayed": (lambda f: _delayed(f), 2.0**-3, True),
    "mxfp8": (lambda f: sw.autoscale(f, "mxfp8"), 2.0**-3, True),
    "mxfp4": (lambda f: sw.autoscale(f, "mxfp4"), 2.0**-1, True),
    "fp16_every_op": (lambda f: sw.autoscale(f, "fp16_every_op"), 2.0**-10, True),
    "scalify": (lambda f: sw.autoscale(f, "scalify"), 2.0**-10, True),
    "unit_scaling": (lambda f: sw.autoscale(f, "unit_scaling"), 2.0**-3, True),
}  # fmt: skip
# Scales that come from shapes or from other operations, not from a tensor itself: what lies far
# from their range saturates or is flushed, as published.
STATIC = ("unit_scaling", "scalify")
SAMPLES = 4  # disturbed runs
SLACK = 32.0  # how many times as far as a disturbed run a transformed one may be


def _delayed(f: Callable) -> Callable:
    """One step of delayed scaling, whose history is that of the same inputs."""
    scaled = sw.autoscale(f, "fp8_delayed")

    def step(*inputs: Any) -> Any:
        return scaled.step(scaled.init(*inputs), *inputs)[0]

    return step


def _disturbance(rng: np.random.Generator, unit: float, shared: bool) -> Callable:
    def disturb(x: Any) -> Any:
        noise = jnp.asarray(rng.uniform(-1, 1, x.shape) * unit, jnp.float32)
        if not shared:
            return x + x * noise
        size = lax.stop_gradient(jnp.where(jnp.isfinite(x), jnp.abs(x), 0))
        return x + (jnp.abs(x) + jnp.max(size)) * noise

    return disturb


def _arrays(values: Any) -> list[np.ndarray]:
    return [np.asarray(v, np.float64) for v in values]


def prepare() -> None:
    """Compiles quickly: each primitive runs a few times."""
    jax.config.update("jax_disable_most_optimizations", True)


def check(seed: int, index: int) -> list[str]:
    """The properties that a random program fails under the transformations chosen for it."""
    rng = random.Random(f"{seed}/{index}")
    made, (given, kind) = program(rng), inputs(rng)
    text = " ".join(f"{s.name}{list(s.reads)}".replace(" ", "") for s in made.steps)
    text += " with its gradient" if made.gradient else ""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        values = [np.abs(np.asarray(v)) for v in made.values(given)]
        sizes = np.concatenate([v[np.isfinite(v) & (v > 0)] for v in values])
        want = _arrays(made(*given))
        nearly = bool(sizes.size) and sizes.max() > 1e30
        others = sorted(set(TRANSFORMS) - {"emulate fp32", "fp8_delayed"})
        chosen = ["emulate fp32", *rng.sample(others, 3)]
        chosen += ["fp8_delayed"] * (rng.random() < 0.1)  # its history takes a compilation
        failures = []
        for name in chosen:
            found = _failures(made, given, kind, name, want, nearly, rng)
            failures += [f"{name}, inputs {kind}: {f} in {text}" for f in found]
    return failures


def _failures(
    made: Program, given: Sequence[Any], kind: str, name: str, want: list[np.ndarray],
    nearly: bool, rng: random.Random,
) -> list[str]:  # fmt: skip
    transform, unit, shared = TRANSFORMS[name]
    try:
        eager = transform(made)(*given)
        got = _arrays(eager)
    except Exception as error:
        return [f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"]
    failures = []
    if name == "emulate fp32" and rng.random() < 0.05:
        jitted = _arrays(jax.jit(transform(made))(*given))
        if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(jitted, got, strict=True)):
            failures.append("other bits under jit")
    if nearly:  # at the end of float32's range, where a scale that is off by 2 decides
        return failures
    noise = np.random.default_rng(rng.randrange(1 << 30))
    disturbed = [
        _arrays(made(*given, disturb=_disturbance(noise, unit, shared))) for _ in range(SAMPLES)
    ]
    for place, (a, b) in enumerate(zip(got, want, strict=True)):
        others = [d[place] for d in disturbed]
        finite = np.isfinite(b) & np.all([np.isfinite(d) for d in others], axis=0)
        far = name in STATIC and kind in ("huge", "tiny", "subnormal", "inf", "-inf")
        if not far and not np.isfinite(a[finite]).all():
            failures.append(f"result {place} is not finite where float32 is")
        if kind == "nan" and np.isfinite(a[np.isnan(b)]).any():
            failures.append(f"result {place} has lost a NaN")
        if name in STATIC and kind != "ordinary":
            continue
        spread = np.max([np.abs(d - b) for d in others], axis=0)
        largest = np.abs(b[finite]).max(initial=0)
        bound = SLACK * np.maximum(spread, unit * np.where(shared, largest, np.abs(b))) + 1e-37
        off = finite & np.isfinite(a) & ~(np.abs(a - b) <= bound)
        if off.any():
            i = int(np.flatnonzero(off)[0])
            failures.append(
                f"result {place} is {a.flat[i]:.6g} for {b.flat[i]:.6g}, "
                f"{abs(a.flat[i] - b.flat[i]) / bound.flat[i]:.3g} times the bound"
            )
    return failures
