"""The methods of a comparison, as data: what each does to a program's state and step."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._resolve import near
from .._types import PyTree
from .._user_file import InputError
from ..autoscaling import Recipe, WithHistory, autoscale, recipes, store
from ..formats import E4M3FN, FP16
from ..scaled import Storage
from ..scalifying import Scalify
from ..training import NARROW_ADAM, STATES, DynamicLossScale, StaticLossScale, step
from ._program import StepFunction, TrainingProgram


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to run a training step: at most one of the three is not None."""

    name: str  # on the command line and in reports
    what: str = ""  # a short description
    recipe: Recipe | Scalify | None = None  # for the whole step and its stored state
    options: Mapping[str, Any] | None = None  # of `training.step`, of `loss_of` and `OPTIMIZER`
    dtype: Any = None  # of all floats

    def build(
        self, program: TrainingProgram
    ) -> tuple[Callable[[PyTree, PyTree], PyTree], StepFunction]:
        """Returns the function from a program's state and a batch to this method's; its step."""
        if self.options is not None:
            if program.loss_of is None or program.optimizer is None:
                lacks = f"{program.name} defines no loss_of(params, batch) or no OPTIMIZER"
                raise InputError(f"{self.name} scales the loss, and {lacks}")
            train = step(program.loss_of, program.optimizer, **self.options)

            def made(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
                state, metrics = train(state, batch)
                return state, metrics.loss

            return lambda state, batch: train.init(params_of(state), batch), made
        if self.dtype is not None:
            cast = functools.partial(_cast, dtype=self.dtype)
            narrow = lambda state, batch: program.train_step(state, cast(batch))  # noqa: E731
            return lambda state, batch: cast(state), narrow
        if self.recipe is None:
            return lambda state, batch: state, program.train_step
        recipe, changed = self.recipe, autoscale(program.train_step, self.recipe)
        if not isinstance(changed, WithHistory):
            return lambda state, batch: store(state, recipe), changed

        def begin(state: PyTree, batch: PyTree) -> PyTree:
            state = store(state, recipe)
            return {"state": state, "history": changed.init(state, batch)}

        def remembered(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            (after, loss), history = changed.step(state["history"], state["state"], batch)
            return {"state": after, "history": history}, loss

        return begin, remembered


def params_of(state: PyTree) -> PyTree:
    return state.get("params") if isinstance(state, dict) else getattr(state, "params", None)


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    arrays = jax.tree.map(jnp.asarray, tree)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, arrays)


NARROW_STATE = (  # except for biases and a norm's gains, half a percent of the example's parameters
    (re.escape("['params']"), Storage(FP16, min_size=2048)),
    (r"\.mu\b", Storage(E4M3FN, min_size=2048)),
    (r"\.nu\b", Storage(FP16, root=2, min_size=2048)),
)
RECIPES = {
    "fp16": "autoscale, FP16 operands",
    "fp8": "automatic bias selection: E4M3 forward, E5M2 backward, a bias a tensor from its amax",
    "fp8_delayed": "fp8, biases from the last 16 steps' amaxes",
    "fp8_rowwise": "E4M3 both ways, a scale for each row of each operand",
    "fp8_rowwise_gw_hp": "fp8_rowwise, weight gradients wide",
    "fp8_blockwise": "E4M3 both ways, 1 x 128 blocks, of weights 128 x 128",
    "mxfp8": "E4M3 both ways, a scale for each 32 elements, rounded up",
    "mxfp8_floor": "mxfp8, scales rounded down",
    "mxfp8_hybrid": "mxfp8, E5M2 backward",
    "mxfp4_forward": "MXFP4 forward, MXFP8 backward",
    "mxfp4": "BF16 forward; MXFP4 backward, transformed, rounded stochastically",
    "nvfp4": "NVFP4, gradients rounded stochastically, Hadamard transform of weight gradients",
    "fp4_all_the_way": "NVFP4, gradients rounded stochastically",
    "quartet": "MXFP4 after Hadamard transforms: QuEST forward, stochastic backward",
    "quartet2": "NVFP4, 4/6 forward, MS-EDEN backward",
    "tetrajet2": "NVFP4, nearest forward, unbiased stochastic rounding backward",
    "unit_scaling": "fp8, scales from shapes alone",
    "mu_s": "fp8 without scales, for programs of unit variance",
    "fp16_every_op": "each result in FP16, scales found anew by the maximum",
    "scalify": "each result in FP16, scales propagated",
}
METHODS = {method.name: method for method in (
    Method("float32", "the program as it is"),
    Method("fp16-plain", "all of it cast to FP16, nothing else done", dtype=jnp.float16),
    *(Method(name, what, recipes.CATALOGUE[name]) for name, what in RECIPES.items()),
    Method("scalify-l2", "each result in FP16, scales found anew by L2 norms",
           Scalify(rescale="l2")),
    Method("scalify-loss", "scalify of loss and gradients, which a float32 optimizer takes",
           options={"policy": recipes.scalify}),
    Method("fp8-narrow-state", "fp8; FP16 weights, E4M3 first and FP16 root of second moment",
           dataclasses.replace(recipes.fp8, state=NARROW_STATE)),
    Method("static-scale", "autocast FP16, a constant loss scale of 32768",
           options={"policy": "c=f16", "scaling": StaticLossScale(2.0**15)}),
    Method("dynamic-scale", "autocast FP16, automatic loss scaling, doubled after 100 steps",
           options={"policy": "c=f16", "scaling": DynamicLossScale(interval=100)}),
    Method("autocast-fp16", "autocast FP16, automatic loss scaling", options={"policy": "c=f16"}),
    Method("autocast-bf16", "autocast BF16", options={"policy": "c=bf16"}),
    Method("master-fp16", "FP16 weights beside a float32 copy, automatic loss scaling",
           options={"policy": "p=f16,c=f16", "weights": "master"}),
    Method("master-bf16", "BF16 weights beside a float32 copy",
           options={"policy": "p=bf16,c=bf16", "weights": "master"}),
    Method("stochastic-bf16", "BF16 weights rounded stochastically",
           options={"policy": "p=bf16,c=bf16", "weights": "stochastic"}),
    Method("compensated-bf16", "BF16 weights with the rounding error of each update carried on",
           options={"policy": "p=bf16,c=bf16", "weights": "compensated"}),
    Method("five-bytes",
           "FP16 weights rounded stochastically, narrow moments, automatic loss scaling",
           options={"policy": "p=f16,c=f16", "weights": "stochastic", "moments": NARROW_ADAM}),
    *(Method(f"state-{name}", f"float32, the optimizer's state as {name}",
             options={"moments": name}) for name in STATES),
    *(Method(name, f"autoscale, recipes.{name}", each)
      for name, each in recipes.CATALOGUE.items() if name not in RECIPES),
)}  # fmt: skip
DEMO = ("float32", "fp16-plain", "fp16", "fp8", "fp8-narrow-state")  # what runs if none is named


def method(name: str) -> Method:
    """Returns the method of that name, in which ``-`` and ``_`` are the same."""
    spellings = {known.replace("_", "-"): found for known, found in METHODS.items()}
    if found := spellings.get(name.replace("_", "-")):
        return found
    expected = f"{near(name, METHODS)}expected one of {', '.join(METHODS)}"
    raise InputError(f"method: no method of training is called {name!r}; {expected}")
