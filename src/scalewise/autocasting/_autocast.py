"""``autocast``: mixed precision as an interpretation of any JAX function, and a list of dtypes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .._check import checked
from .._decorator import Params, Result
from .._jax import ShapedArray
from .._types import PyTree
from ..interpret import (
    COMPLEX,
    Applied,
    Argument,
    Boundary,
    Equation,
    Interpretation,
    State,
    check_updates,
    is_float,
    map_floats,
    rebind,
    transform,
    warn_kernel,
)
from ..primitives import Family, having, names
from ..rounding import StoredArray
from ._policy import Policy, PolicyLike
from ._policy import policy as policy_

# An operation that chooses among its operands may clip a constant to the dtype's range: a mask's
# finfo.min stands for no infinity.
KEEPS_CONSTANT, CHOOSES = having("keeps_constant"), having("chooses")
SPARSE = names(lambda row: row.family is Family.SPARSE)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A float array in whatever dtype it was computed in.

    Attributes:
        data: the array.
        constant_value: the number that every element equals, None if unknown. A constant takes the
            dtype of the other operands.
        backward: True for a result of a backward pass, which an optimizer reads in float32.
    """

    data: jax.Array
    constant_value: float | None = dataclasses.field(default=None, metadata={"static": True})
    backward: bool = dataclasses.field(default=False, metadata={"static": True})

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Returns the array in ``dtype``; a finite constant stays finite."""
        if self.constant_value is None or self.data.dtype == dtype:
            return self.data.astype(dtype)
        limit, number = float(jnp.finfo(dtype).max), self.constant_value
        if math.isfinite(number):
            number = max(-limit, min(limit, number))
        return jnp.full(self.data.shape, number, dtype)

    def fits(self, dtype: DTypeLike) -> bool:
        """Returns False for a nonzero finite constant that is no normal number of ``dtype``."""
        number = self.constant_value
        if number is None or number == 0 or not math.isfinite(number):
            return True
        info = jnp.finfo(dtype)
        return float(info.smallest_normal) <= abs(number) <= float(info.max)


@dataclasses.dataclass(frozen=True)
class Autocast(Interpretation):
    """Runs each operation in the dtype that the policy gives it."""

    policy: Policy
    record: Callable[[Equation, np.dtype], None] | None = None
    transposes: ClassVar[bool] = True

    def opens(self, equation: Equation) -> bool:
        return True

    def lift(self, x: Argument, aval: ShapedArray) -> Value:
        return Value(jnp.asarray(x))

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Value:
        return Value(jnp.asarray(x), constant_value=float(x) if x.size == 1 else None)

    def lower(self, value: Value, aval: ShapedArray) -> jax.Array:
        return value.astype(aval.dtype)

    def canonical(
        self, value: Value, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> Value:
        return Value(value.astype(aval.dtype))

    def select(self, predicate: jax.Array, on_true: Value, on_false: Value) -> Value:
        return Value(lax.select(predicate, on_true.data, on_false.data))

    def unstack(self, value: Value, aval: ShapedArray) -> Value:
        return Value(value.data)

    def apply(self, state: State, equation: Equation, inputs: Sequence[PyTree]) -> Applied:
        if equation.name in SPARSE and self._narrow and not self.policy.rule(equation):
            advice = f" If so, add Rule('full', primitive={equation.name!r}) to the policy's rules."
            warn_kernel(equation, "autocast", advice, "stays in float32: it adds narrow numbers.")
        warn_kernel(equation, "autocast")
        values = [x for x in inputs if isinstance(x, Value)]
        backward = equation.direction == "backward"
        if equation.name == "convert_element_type" and is_float(equation.out_avals[0]):
            (x,) = inputs
            dtype = equation.out_avals[0].dtype
            if self.policy.run(equation) == "full" and dtype.itemsize < 4:
                dtype = jnp.dtype(jnp.float32)
            constant_value = x.constant_value if isinstance(x, Value) else None
            data = x.astype(dtype) if isinstance(x, Value) else equation.bind(x)[0]
            return state, [Value(data, constant_value, backward)]
        if not values:
            outs = equation.bind(*inputs)
        else:
            dtype = self._dtype(equation, values)
            if self.record is not None:
                self.record(equation, dtype)
            plain = [x.astype(dtype) if isinstance(x, Value) else x for x in inputs]
            outs = rebind(equation, plain, dtype)
        kept = values[0].constant_value if values and equation.name in KEEPS_CONSTANT else None
        return state, map_floats(lambda y, _: Value(y, kept, backward), outs, equation.out_avals)

    def unlifted(self, state: State, equation: Equation, inputs: Sequence[PyTree]) -> Applied:
        if equation.of_complex and self._narrow and self.policy.run(equation) == "low":
            warn_kernel(equation, "autocast", what=COMPLEX)
        return super().unlifted(state, equation, inputs)

    @property
    def _narrow(self) -> bool:
        return self.policy.compute.itemsize < 4

    def _dtype(self, equation: Equation, values: Sequence[Value]) -> np.dtype:
        run = self.policy.run(equation)
        floats = [a.dtype for a in equation.in_avals + equation.out_avals if is_float(a)]
        full = jnp.dtype(jnp.float64 if jnp.float64 in floats else jnp.float32)
        if run != "follow":
            return self.policy.compute if run == "low" else full
        found = {v.data.dtype for v in values if v.constant_value is None}
        if not found:
            return values[0].data.dtype
        if equation.direction == "update" and any(v.backward for v in values):
            return full
        dtype = found.pop() if len(found) == 1 else widest(found)
        constants = equation.name in CHOOSES or all(v.fits(dtype) for v in values)
        return dtype if constants else full


def widest(dtypes: set[np.dtype]) -> np.dtype:
    """Returns the narrowest dtype that holds all of several: float32 for float16 with bfloat16."""
    wide = max(dtypes, key=lambda d: d.itemsize)
    same = all(d == wide or d.itemsize < wide.itemsize for d in dtypes)
    return wide if same else jnp.dtype(jnp.float32)


@checked
def autocast(
    f: Callable[Params, Result], policy: PolicyLike = "float16"
) -> Callable[Params, Result]:
    """Returns ``f`` in mixed precision: narrow products, float32 where range or long sums need it.

    Each operation runs in a dtype by its primitive: those in ``policy.low`` (contractions) in the
    narrow one, those in ``policy.full`` (exponentials, powers, sums and differences, as in softmax,
    norms and losses) in float32, all others in the widest dtype among their operands.
    Constants take the other operands' dtype, if it holds them. Loop carries and the results
    of branches have the program's own dtypes. An optimizer inside ``f`` gets its gradients in
    float32.

    Contractions accumulate as the backend does in the narrow dtype (float32 on CPU, GPU and TPU)
    and are rounded once. Nothing is scaled: FP16 gradients under 2^-24 are flushed; see
    ``training.loss_scaled``, or ``autoscale``.

    Args:
        f: any function of pytrees made of JAX primitives.
        policy: a :class:`Policy`; ``"p=f32,c=bf16,o=f32"``; or the narrow dtype alone.

    Returns:
        A function of the same signature. Float results have ``f``'s own dtypes, or the policy's.
        It composes with ``jit``, ``vmap`` and derivatives of every mode and order:
        ``grad(autocast(f))`` equals ``autocast(grad(f))``.

    Raises:
        TypeError: ``f`` isn't callable, or returns an object that hides arrays (no pytree).
        ValueError: no such policy.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> x = jnp.full((1, 4096), 16.0)
        >>> low = sw.autocast(lambda x: (x * x).sum())  # 4096 * 256: FP16 ends at 65504
        >>> float(low(x))
        1048576.0
        >>> float(sw.autocast(lambda x: (x @ x.T)[0, 0])(x))
        inf
    """
    chosen = policy_(policy)
    prepare = functools.partial(converted, policy=chosen)
    return transform(f, Autocast(chosen), name="autocast", prepare=prepare)


def converted(f: Callable, policy: Policy) -> Callable:
    """Returns ``f`` with its float arguments and results cast to the policy's dtypes.

    The casts are inside the function, so that JAX's rule for a cast gives each argument a gradient
    of its own dtype.
    """
    if not callable(f) or policy.params is policy.output is None:
        return f

    def cast(tree: PyTree, dtype: DTypeLike | None) -> PyTree:
        def leaf(x: PyTree) -> PyTree:
            array = isinstance(x, jax.Array | np.ndarray | np.generic)
            return x.astype(dtype) if array and is_float(x) else x

        if dtype is None:
            return tree
        return jax.tree.map(leaf, tree, is_leaf=lambda x: isinstance(x, StoredArray))

    @functools.wraps(f)
    def between(*args: PyTree, **kwargs: PyTree) -> PyTree:
        args, kwargs = cast((args, kwargs), policy.params)
        before = jax.tree.leaves((args, kwargs))
        out = f(*args, **kwargs)
        check_updates((args, kwargs), [*before, *jax.tree.leaves(out)], f, "autocast")
        return cast(out, policy.output)

    return between


@dataclasses.dataclass(frozen=True)
class Placement:
    """Operations of one kind from one source line, and the dtype they run in.

    Attributes:
        primitive: of the operations.
        dtype: they run in.
        direction: ``"forward"``, ``"backward"``, or ``"update"`` for a training step's optimizer.
        where: file, line and function.
        count: how many there are.
    """

    primitive: str
    dtype: str
    direction: str
    where: str
    count: int


@checked
def placements(f: Callable, policy: PolicyLike = "float16") -> Callable:
    """Returns a function of ``f``'s arguments that lists the dtype of each operation.

    Returns:
        A function that returns Placements, in program order; nothing is computed.

    Example:
        >>> import jax.numpy as jnp
        >>> show = placements(lambda x: jnp.exp(jnp.tanh(x @ x)), "bf16")
        >>> [(p.primitive, p.dtype) for p in show(jnp.ones((2, 2)))]
        [('dot_general', 'bfloat16'), ('tanh', 'bfloat16'), ('exp', 'float32')]
    """

    chosen = policy_(policy)

    def show(*args: PyTree, **kwargs: PyTree) -> tuple[Placement, ...]:
        counts: dict[tuple[str, str, str, str], int] = {}

        def record(equation: Equation, dtype: np.dtype) -> None:
            key = (equation.name, str(dtype), equation.direction, equation.where())
            counts[key] = counts.get(key, 0) + 1

        prepare = functools.partial(converted, policy=chosen)
        program = transform(f, Autocast(chosen, record), name="autocast", prepare=prepare)
        jax.eval_shape(program, *args, **kwargs)
        found = [Placement(*key, count=n) for key, n in counts.items()]
        if any(p.direction == "backward" for p in found):
            return tuple(found)
        # a program without a backward pass has no optimizer
        return tuple(dataclasses.replace(p, direction="forward") for p in found)

    return show
