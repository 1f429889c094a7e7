"""Stores values, states and weights narrow, with scales."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._check import checked, is_array, shown
from .._jax import Format as Placed
from .._jax import Layout, ShapedArray, Tracer
from .._types import PyTree
from ..formats import BlockFormat
from ..interpret import (
    CONTRACTIONS,
    Applied,
    Argument,
    Boundary,
    Equation,
    Interpretation,
    State,
    is_float,
    run,
    trace,
)
from ..primitives import Family, having, names, params
from ..scaled import (
    Amax,
    ScaledArray,
    is_stored,
    quantize,
    quantize_measured,
    storage_of,
    store_array,
)
from ._operand_settings import CURRENT, Operand
from ._recipe import Recipe, RecipeLike
from .recipes import products_of
from .recipes import recipe as recipe_

MOVES = names(lambda row: row.family is Family.STRUCTURAL)
TAKES = MOVES & having("drops")
Use = Literal["product", "lookup", "other"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class _Parameter:
    """An array; ``path`` is that of the parameter whose elements it has, None for others."""

    data: jax.Array
    path: str | None = dataclasses.field(default=None, metadata={"static": True})


@dataclasses.dataclass(frozen=True, eq=False)
class _Reads(Interpretation):
    uses: dict[str, set[Use]]

    def lift(self, x: Argument, aval: ShapedArray) -> _Parameter:
        return _Parameter(x)

    def lower(self, value: _Parameter, aval: ShapedArray) -> jax.Array:
        return value.data

    def canonical(
        self, value: _Parameter, aval: ShapedArray, boundary: Boundary, equation: Equation
    ) -> _Parameter:
        return _Parameter(value.data)

    def select(self, predicate: jax.Array, on_true: _Parameter, on_false: _Parameter) -> _Parameter:
        return _Parameter(lax.select(predicate, on_true.data, on_false.data))

    def apply(self, state: State, equation: Equation, inputs: Sequence[PyTree]) -> Applied:
        values = [x for x in inputs if isinstance(x, _Parameter)]
        use = _use(equation)
        for x in values:
            if x.path is not None and use is not None:
                self.uses.setdefault(x.path, set()).add(use)
        kept = values[0].path if use is None and len(values) == 1 else None
        outs = equation.bind(*[x.data if isinstance(x, _Parameter) else x for x in inputs])
        pairs = zip(outs, equation.out_avals, strict=True)
        return state, [_Parameter(y, kept) if self.lifts(a) else y for y, a in pairs]


def _use(equation: Equation) -> Use | None:
    """Returns what an equation does with an operand; None if it moves the elements of one.

    A gather or a slice of vectors looks them up, as in an embedding; one of matrices selects
    weights, as of a layer or an expert.
    """
    if equation.name in CONTRACTIONS:
        return "product"
    if equation.name not in MOVES:
        return "other"
    is_gather = equation.name == "gather"
    taken = params.slice_sizes(equation) if is_gather else equation.out_avals[0].shape
    return "lookup" if equation.name in TAKES and sum(n != 1 for n in taken) < 2 else None


def parameter_uses(f: Callable, tree: PyTree, name: str) -> dict[str, set[Use]]:
    """Returns what a function of a pytree does with each array, by ``keystr``; it isn't run."""
    reads = _Reads({})
    traced = trace(f, reads, (tree,), {}, name=name)

    def arrays(given: Sequence[jax.Array]) -> list[PyTree]:
        values = [
            _Parameter(x, path.removeprefix("[0]")) if is_float(aval) else x
            for x, path, aval in zip(given, traced.arguments, traced.in_avals, strict=True)
        ]
        return run(traced, reads, 0, values=values)[1]

    jax.eval_shape(arrays, list(traced.arrays))
    return reads.uses


@checked
def store(tree: PyTree, recipe: RecipeLike) -> PyTree:
    """A pytree with the leaves that the recipe's ``state`` names stored narrow.

    Args:
        tree: a training state, say; leaves are arrays.
        recipe: a recipe, or the name of one that stores some of the state; its ``state`` patterns
            are matched against each leaf's path within ``tree``.

    Returns:
        The same tree; leaves whose path matches are :class:`ScaledArray` or :class:`SqrtStored`.
        Leaves that are no float arrays, or are stored already, stay as they are.

    Raises:
        ValueError: the name of a recipe without ``state``, under which nothing would be stored.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> recipe = sw.Recipe(state=((r"\\['w'\\]", sw.Storage("fp16")),))
        >>> sw.store({"w": jnp.ones(3), "n": jnp.int32(1)}, recipe)["w"].data.dtype
        dtype('float16')
    """
    named, recipe = recipe, recipe_(recipe)
    if isinstance(named, str) and not recipe.state:
        raise ValueError(
            f"store: the recipe {named!r} has no state patterns, so nothing would be stored; set "
            f"them by dataclasses.replace(recipes.{named}, state=...)"
        )

    def leaf(path, x):
        if is_stored(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return x
        storage = storage_of(recipe.state, jax.tree_util.keystr(path), jnp.size(x))
        return x if storage is None else store_array(jnp.asarray(x), storage)

    return jax.tree_util.tree_map_with_path(leaf, tree, is_leaf=is_stored)


EMBEDDING = "(?i)emb|wte|wpe"
WIDE = (EMBEDDING, "(?i)norm|bias|scale|router")


@checked
def quantize_params(
    params: PyTree,
    recipe: RecipeLike,
    *,
    wide: Sequence[str] = WIDE,
    axis: int | Mapping[str, int] = -2,
    program: Callable[[PyTree], object] | None = None,
) -> PyTree:
    """Returns parameters with their weights quantized, as a recipe's forward products read them.

    A function under :func:`autoscale` multiplies such weights as they are stored: nothing of them
    is measured, rounded or written again. Call it once before inference, or for weights that stay
    frozen. Under another recipe, or without one (``array.value()``), they are the same numbers.

    Args:
        params: a pytree of arrays, also a model with other leaves, which stay as they are.
        recipe: whose ``forward`` format, scaling and blocks weights get; a :class:`Recipe` or the
            name of one. A scale that would depend on earlier steps, or on shapes, is found from the
            weight's largest magnitude.
        wide: regular expressions; arrays in whose path (as ``jax.tree_util.keystr`` prints it) one
            is found stay as they are, and so do arrays with fewer than two axes. By default these
            are embeddings, norms, biases and routers, as far as their names say it.
        axis: the axis that products sum over, along which blocks lie: ``-2`` of a kernel
            ``[inputs, outputs]``, also of stacked ones. Or pairs of a regular expression and an
            axis, the first found decides, ``-2`` for all others.
        program: a function of ``params`` that calls the model, which is traced, not run. Arrays
            that it looks up by index, or that no product reads, then stay as they are, whatever
            their names; arrays that products alone read are quantized although a default pattern
            of ``wide`` takes them for embeddings.

    Returns:
        The same tree with :class:`ScaledArray` in place of the weights. To the program each is an
        array of the dtype that it had.

    Raises:
        TypeError: there is no array in ``params``, or ``program`` isn't callable.
        ValueError: the recipe's weights have 16 bits or more, or are transformed before they are
            rounded; or an array lacks the axis.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> params = {"w": jnp.ones((64, 32), jnp.bfloat16), "bias": jnp.zeros(32)}
        >>> stored = sw.quantize_params(params, "fp8")
        >>> stored["w"].data.dtype.name, stored["bias"].dtype.name
        ('float8_e4m3fn', 'float32')
        >>> model = sw.autoscale(lambda p, x: x @ p["w"], "fp8")
        >>> y = model(stored, jnp.ones((4, 64), jnp.bfloat16))
        >>> y.dtype.name, float(y[0, 0])
        ('bfloat16', 64.0)
    """
    setting = weight_setting(products_of(recipe, "quantize_params"))
    axes = {"": axis} if isinstance(axis, int) else axis
    if not any(is_stored(x) or is_array(x) for x in jax.tree.leaves(params, is_leaf=is_stored)):
        raise TypeError(f"quantize_params: params is {shown(params)}; expected a pytree of arrays")

    uses = {} if program is None else parameter_uses(program, params, "quantize_params")

    def leaf(path: jax.tree_util.KeyPath, x: PyTree) -> PyTree:
        name = jax.tree_util.keystr(path)
        if is_stored(x) or not is_array(x) or jnp.ndim(x) < 2:
            return x
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return x
        seen = uses.get(name, set())
        if seen and ("product" not in seen or "lookup" in seen):
            return x
        if any(re.search(p, name) for p in wide if not (seen and p == EMBEDDING)):
            return x
        own = next((a for pattern, a in axes.items() if re.search(pattern, name)), -2)
        if not -jnp.ndim(x) <= own < jnp.ndim(x):
            raise ValueError(
                f"quantize_params: {name} of shape {jnp.shape(x)} has no axis {own}; name the axis "
                "that its products sum over"
            )
        return summed_last(_quantized(jnp.asarray(x), setting, own % jnp.ndim(x)), own)

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_stored)


def weight_setting(recipe: Recipe) -> Operand:
    setting = recipe.products.operand("forward", "weight")
    if setting is not None and setting.scaling.source in ("history", "shapes"):
        setting = dataclasses.replace(setting, scaling=Amax(setting.scaling.power_of_two))
    if setting is None or setting.format.element.bits > 8:
        raise ValueError(
            "quantize_params: the recipe's forward products multiply weights of 16 bits or more; "
            "expected a recipe such as 'fp8', 'mxfp8' or 'nvfp4'"
        )
    if setting.hadamard > 1:
        raise ValueError(
            "quantize_params: the recipe's forward products transform weights before they round "
            "them; expected a recipe without Hadamard transforms in its forward product"
        )
    return setting


def summed_last(array: ScaledArray, axis: int) -> ScaledArray:
    """Returns an array on a CUDA device with the axis that products sum over innermost in memory.

    Hopper's FP8 products read their operands so; XLA would transpose a weight in each call.
    """
    data = array.data
    if not isinstance(data, jax.Array) or isinstance(data, Tracer):
        return array
    if {d.platform for d in data.devices()} - {"cuda", "gpu"}:
        return array
    placed = jax.device_put(data, Placed(Layout(memory_order(data.ndim, axis)), data.sharding))
    return dataclasses.replace(array, data=placed)


def memory_order(ndim: int, axis: int) -> tuple[int, ...]:
    axis %= ndim
    return (*(a for a in range(ndim) if a != axis), axis)


def _quantized(x: jax.Array, setting: Operand, axis: int) -> ScaledArray:
    kept = tuple(a for a in range(x.ndim) if a != axis)
    fmt, scaling = setting.format, setting.scaling
    if isinstance(fmt, BlockFormat):
        tile = (kept[-1], setting.tile) if setting.tile > 1 else None
        wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        found = quantize_measured(wide, wide, fmt, scaling.of_blocks(), axis, tile=tile)
        return dataclasses.replace(found, value_dtype=np.dtype(x.dtype))
    per = kept if setting.per == "channel" else None
    return quantize(x, fmt, scaling=None if scaling == CURRENT else scaling, axis=per)
