"""Training steps that are compiled ahead of time: a deep MLP's and the example GPT's, in bfloat16.

Each step keeps float32 parameters and casts them to bfloat16, as mixed-precision programs are
written. `variant` returns a step under a recipe, or as other people write it:

- ``plain``: the step itself, in bfloat16;
- ``hand``: FP8 products written by hand (MLP): current scaling, JAX's converts, a custom VJP;
- ``flax``: Flax's ``Fp8DirectDotGeneralOp``, delayed scaling (MLP);
- ``jax_mxfp8``: ``jax.nn.scaled_dot_general``, MXFP8 blocks (MLP).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import scalewise as sw
from benchmarks.models import MODELS, model
from scalewise.autoscaling._narrow import memory_order

Tree = Any
Step = Callable[..., Any]
Dot = Callable[[jax.Array, jax.Array], jax.Array]

BY_HAND = ("plain", "hand", "flax", "jax_mxfp8")


@dataclass(frozen=True)
class Program:
    """A training step and how to make its arguments: state, then batch."""

    step: Step
    make: Callable[[], tuple[Tree, ...]]
    batched: int = 1  # index of the first argument of the batch

    @property
    def arguments(self) -> tuple[Tree, ...]:
        """Shapes and dtypes of the arguments; nothing is computed."""
        return jax.eval_shape(self.make)

    def loss(self, outputs: Any) -> float:
        """The loss among a step's outputs, which a history comes behind."""
        return float((outputs if self.batched == 1 else outputs[0])[1])

    def after(self, outputs: Any, arguments: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """The next step's arguments: the state that a step returns, and the same batch."""
        states = (outputs[0],) if self.batched == 1 else (outputs[1], outputs[0][0])
        return *states, *arguments[self.batched :]


def half(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)


# -- the MLP -------------------------------------------------------------------------------------


def mlp(width: int, layers: int, batch: int, dot: Dot = jnp.matmul) -> Program:
    """Loss, gradients and SGD of square layers with GELU between them."""

    def loss(weights, x, y):
        for w in weights[:-1]:
            x = jax.nn.gelu(dot(x, w))
        return jnp.mean(jnp.square(dot(x, weights[-1]) - y))

    def step(weights, x, y):
        value, grads = jax.value_and_grad(lambda w: loss(half(w), half(x), half(y)))(weights)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), value

    def make():
        *keys, last = jax.random.split(jax.random.key(0), layers + 1)
        x = jax.random.normal(last, (batch, width))
        return [jax.random.normal(k, (width, width)) * width**-0.5 for k in keys], x, -x

    return Program(step, make)


def dot_by_hand() -> Dot:
    """An FP8 product as one would write it: a scale from each operand's largest magnitude."""
    forward, backward = jnp.float8_e4m3fn, jnp.float8_e5m2

    def quantized(x, dtype):
        top = float(jnp.finfo(dtype).max)
        amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
        scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.maximum(amax, 1e-30) / top)))
        return jnp.clip(x * (1 / scale).astype(x.dtype), -top, top).astype(dtype), scale

    def product(a, b, axes):
        (x, s), (y, t) = a, b
        z = lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.bfloat16)
        return z * (s * t).astype(z.dtype)

    def run(x, w):
        operands = quantized(x, forward), quantized(w, forward)
        return product(*operands, ((1,), (0,))), operands

    def gradients(operands, g):
        (x, w), g = operands, quantized(g, backward)
        return product(g, w, ((1,), (1,))), product(x, g, ((0,), (0,)))

    dot = jax.custom_vjp(lambda x, w: run(x, w)[0])
    dot.defvjp(run, gradients)
    return dot


def dot_in_blocks() -> Dot:
    """JAX's own MXFP8 product, for devices with block-scaled units."""
    config = jax.nn.get_scaled_dot_general_config("mxfp8")

    def dot(x, w):
        axes = (((1,), (0,)), ((), ()))
        return jax.nn.scaled_dot_general(
            x, w, axes, preferred_element_type=x.dtype, configs=[config] * 3
        )

    return dot


def mlp_of_flax(width: int, layers: int, batch: int) -> Program:
    """The MLP of Flax's dense layers with Flax's FP8 products and their histories."""
    from flax import linen as nn
    from flax.linen import fp8_ops

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(layers):
                x = nn.Dense(
                    width, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.float32,
                    dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp,
                )(x if i == 0 else jax.nn.gelu(x))  # fmt: skip
            return x

    model, own = Mlp(), fp8_ops.OVERWRITE_WITH_GRADIENT

    def step(variables, x, y):
        def loss(v):
            return jnp.mean(jnp.square(model.apply(v, half(x)) - half(y)))

        value, grads = jax.value_and_grad(loss)(variables)
        updated = {
            k: grads[k] if k == own else jax.tree.map(lambda w, g: w - 1e-3 * g, v, grads[k])
            for k, v in variables.items()
        }
        return updated, value

    def make():
        x = jax.random.normal(jax.random.key(0), (batch, width))
        return model.init(jax.random.key(1), x), x, -x

    return Program(step, make)


# -- the GPT -------------------------------------------------------------------------------------


def gpt(width: int, context: int, vocabulary: int, batch: int, layers: int = 2) -> Program:
    """AdamW step of examples/gpt.py at another size, parameters cast to bfloat16."""
    model: Any = importlib.import_module("examples.gpt")
    model.CONFIG = model.Config(vocabulary, context, width, max(1, width // 128), layers, batch)

    def step(state, tokens):
        def loss(params):
            return model.loss_of(half(params), tokens).astype(jnp.float32)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, optimizer = model.OPTIMIZER.update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, (
            value
        )

    def make():
        return model.init(0), jax.random.randint(
            jax.random.key(0), (batch, context + 1), 0, vocabulary
        )

    return Program(step, make)


# -- variants ------------------------------------------------------------------------------------

SIZES = {
    ("mlp", "tiny"): {"width": 64, "layers": 4, "batch": 32},
    ("gpt", "tiny"): {"width": 64, "context": 32, "vocabulary": 256, "batch": 2},
    ("mlp", "small"): {"width": 1024, "layers": 3, "batch": 1024},
    ("mlp", "full"): {"width": 8192, "layers": 4, "batch": 8192},
    ("gpt", "small"): {"width": 512, "context": 512, "vocabulary": 1024, "batch": 2},
    ("gpt", "full"): {"width": 4096, "context": 2048, "vocabulary": 32768, "batch": 4},
}
PROGRAMS = ("mlp", "gpt")


def variant(
    program: str,
    size: str,
    recipe: str,
    devices: int = 1,
    device: str | None = None,
    narrow: str = "faster",
) -> Program:
    """A program at a size under a recipe, or by hand; the GPT with a sequence for each device.

    Args:
        program: one of ``PROGRAMS``, or of ``MODELS``.
        size: as in ``SIZES``.
        recipe: a name of scalewise's, with ``+attention`` for attention in FP8, or of ``BY_HAND``.
        devices: how many there are.
        device: the recipe's, for which the program is compiled.
        narrow: the recipe's, for programs of ``MODELS``; others have narrow products throughout.

    Raises:
        ValueError: if the variant is written for the MLP only.
    """
    if program in MODELS:
        return under(Program(*model(program, size, recipe)), recipe, device, narrow)
    if program == "gpt":
        if recipe in BY_HAND[1:]:
            raise ValueError(f"{recipe!r} is written for 'mlp', got 'gpt'")
        sizes = SIZES[program, size]
        return under(gpt(**sizes | {"batch": max(sizes["batch"], devices)}), recipe, device)
    sizes = SIZES[program, size]
    if recipe == "flax":
        return mlp_of_flax(**sizes)
    dots = {"hand": dot_by_hand, "jax_mxfp8": dot_in_blocks}
    return under(mlp(**sizes, dot=dots.get(recipe, lambda: jnp.matmul)()), recipe, device)


def under(
    program: Program, recipe: str, device: str | None = None, narrow: str = "always"
) -> Program:
    """A program under a recipe for a device, by default the one at hand; with delayed scaling its
    history is the first argument."""
    if recipe in BY_HAND:
        return program
    name, _, attention = recipe.partition("+")
    of_name: Any = sw.recipes.CATALOGUE[name]
    late = sw.Operand("e4m3fn", of_name.products.scaling)
    own = sw.Attention(late, gradients=late) if of_name.is_delayed else sw.Attention()
    chosen = dataclasses.replace(
        of_name,
        attention=own if attention else None,
        device=device,
        narrow=narrow,  # pyright: ignore[reportArgumentType]
    )
    wrapped: Any = sw.autoscale(program.step, chosen)
    if not hasattr(wrapped, "init"):
        return Program(wrapped, program.make)

    def make():
        arguments = program.make()
        return wrapped.init(*arguments), *arguments

    return Program(wrapped.step, make, batched=2)


# -- compilation ---------------------------------------------------------------------------------

MIN_SHARDED = 1 << 16  # smaller arrays are kept whole on each device


def compiled(
    program: Program,
    devices: list[Any],
    platform: str,
    options: dict[str, Any] | None = None,
    donate: bool = True,
) -> Any:
    """The step compiled for a device, or with its state and batch sharded over several.

    An array of state is split along its first axis that the number of devices divides, an array of
    the batch along its leading axis. The state is donated (``donate``), and keeps its sharding.
    """
    mesh = Mesh(np.array(devices), ("fsdp",))

    def sharding(leaf: Any, axes: range) -> Any:
        if len(devices) == 1:
            return SingleDeviceSharding(devices[0])
        split = [i for i in axes if leaf.shape[i] % len(devices) == 0]
        names = [None] * split[0] + ["fsdp"] if split else []
        return NamedSharding(mesh, PartitionSpec(*names))

    def of_state(leaf: Any) -> Any:
        return sharding(leaf, range(leaf.ndim if leaf.size > MIN_SHARDED else 0))

    def of_batch(leaf: Any) -> Any:
        return sharding(leaf, range(1))

    def placed(tree: Any, rule: Callable[[Any], Any]) -> Any:
        def leaf(a: Any) -> Any:
            where: Any = rule(a)
            if a.dtype.itemsize == 1 and 1 < a.ndim < 4:  # as `quantize_params` lays out weights
                where = Format(Layout(memory_order(a.ndim, -2)), where)
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where)

        return jax.tree.map(leaf, tree)

    given = program.arguments
    states, batches = given[: program.batched], given[program.batched :]
    arguments = *placed(states, of_state), *placed(batches, of_batch)
    out = jax.tree.map(of_state, jax.eval_shape(program.step, *arguments))
    donated = tuple(range(len(states))) if donate else ()
    step = jax.jit(program.step, donate_argnums=donated, out_shardings=out)
    return step.trace(*arguments).lower(lowering_platforms=(platform,)).compile(options)
