"""A ``shard_map`` as a program of one device, in which the mesh's axes are axes of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..._jax import Jaxpr, ShapedArray, in_mesh_of, open_jaxpr
from ...interpret import Applied, Equation, Interpretation, State, Value, interpret_jaxpr
from ...primitives import params


def on_one_device(equation: Equation) -> Jaxpr:
    """Returns the closed jaxpr of what a ``shard_map`` computes of whole arrays: ``jax.vmap`` maps
    its body over the mesh's axes, and a sum over devices is one over an axis."""
    mapping = params.shard_map(equation)
    sizes = {name: mapping.mesh.shape[name] for name in mapping.mesh.axis_names
             if name in mapping.axes}  # fmt: skip

    def run(*arrays: jax.Array) -> list[jax.Array]:
        def body(*parts: jax.Array) -> list[jax.Array]:
            return interpret_jaxpr(_Mapped(), mapping.body, (), parts, equation)[1]

        f, given = body, list(zip(arrays, mapping.in_specs, strict=True))
        for name in reversed(sizes):
            over = [0 if name in _names(spec) else None for _, spec in given]
            f = jax.vmap(f, in_axes=over, axis_name=name, axis_size=sizes[name])
        outs = f(*[_split(x, spec, sizes) for x, spec in given])
        return [_joined(y, spec, sizes) for y, spec in zip(outs, mapping.out_specs, strict=True)]

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in equation.in_avals]
    with in_mesh_of(v.aval for v in open_jaxpr(mapping.body)[0].outvars):
        return jax.make_jaxpr(run)(*shapes)


def unsplit(equation: Equation) -> Equation:
    """Returns an equation whose results belong to no mesh, as all arrays of the host."""
    if equation.name == "sharding_constraint":
        return equation
    split = {name: None for name, x in equation.params.items() if isinstance(x, NamedSharding)}
    return equation.with_params(**split) if split else equation


class _Mapped(Interpretation):
    """Collectives whose results are equal on all devices, as those of ``jax.vmap``."""

    def constant(self, x: np.ndarray, aval: ShapedArray) -> Value:
        return jnp.asarray(x, aval.dtype)  # a program as written may have a wider number

    def apply(self, state: State, equation: Equation, inputs: Sequence[Value]) -> Applied:
        if equation.name == "psum_invariant":
            return state, list(lax.psum(tuple(inputs), params.read(equation, "axes")))
        if equation.name == "all_gather_invariant":
            how = {"axis": "all_gather_dimension", "axis_name": "axis_name", "tiled": "tiled"}
            options = {name: params.read(equation, own) for name, own in how.items()}
            return state, [lax.all_gather(x, **options) for x in inputs]
        return state, equation.bind(*inputs)

    unlifted = apply


def _names(spec: PartitionSpec) -> list[str]:
    return [name for entry in spec for name in _entry(entry)]


def _entry(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _split(x: jax.Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> jax.Array:
    """Returns the parts of an array along leading axes, in the mesh's order."""
    shape, at = [], {}
    for axis, n in enumerate(x.shape):
        names = [name for name in _entry(spec[axis] if axis < len(spec) else None) if name in sizes]
        for name in names:
            at[name] = len(shape)
            shape.append(sizes[name])
            n //= sizes[name]
        shape.append(n)
    x = x.reshape(shape)
    first = [at[name] for name in sizes if name in at]
    return jnp.moveaxis(x, first, range(len(first)))


def _joined(y: jax.Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> jax.Array:
    """Returns the whole array of parts along leading axes, one for each of the mesh's."""
    named = _names(spec)
    for axis, name in reversed(list(enumerate(sizes))):
        if name not in named:  # equal on all devices
            y = lax.index_in_dim(y, 0, axis, keepdims=False)
    left = [name for name in sizes if name in named]
    parts, order, shape = y.shape[len(left) :], [], []
    for axis, n in enumerate(parts):
        names = [name for name in _entry(spec[axis] if axis < len(spec) else None) if name in sizes]
        order += [left.index(name) for name in names] + [len(left) + axis]
        for name in names:
            n *= sizes[name]
        shape.append(n)
    return y.transpose(order).reshape(shape)
