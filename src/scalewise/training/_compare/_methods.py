"""The methods of a comparison: how each changes a program's state and step."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from ..._check import checked
from ..._resolve import unknown
from ..._types import PyTree
from ..._user_file import InputError
from ...autoscaling import Recipe, Results, Storage, WithHistory, autoscale, recipes, store
from ...formats import E4M3FN, FP16
from .._gradients import floats_as
from .._loss_scale import DynamicLossScale, StaticLossScale
from .._moments import NARROW_ADAM, STATES
from .._step import step
from ._program import Program, Step, params_of


@checked
@dataclasses.dataclass(frozen=True)
class Method:
    """One way to run a training step."""

    name: str  # on the command line and in reports
    # from the float32 initial state to the one that is trained
    prepare: Callable[[PyTree], PyTree] = lambda state: state
    # from the program's step to this method's; by default it is ``training.step`` of the program's
    # ``loss_of`` and ``OPTIMIZER`` with ``step_options``, if there are any
    transform: Callable[[Step], Step] | None = None
    what: str = ""  # a short description
    # arguments of ``training.step`` with the method's effect; None: `scalewise train` refuses
    step_options: Mapping[str, Any] | None = None

    def build(self, program: Program) -> tuple[Callable[[PyTree, PyTree], PyTree], Step]:
        """Returns the function from a program's state and a batch to this method's; its step."""
        if self.transform is not None or self.step_options is None:
            changed = (self.transform or (lambda step: step))(program.train_step)
            if isinstance(changed, WithHistory):
                return with_history(changed, self.prepare)
            return lambda state, batch: self.prepare(state), changed
        if program.loss_of is None or program.optimizer is None:
            lacks = f"{program.name} defines no loss_of(params, batch) or no OPTIMIZER"
            raise InputError(f"{self.name} scales the loss, and {lacks}")
        train = step(program.loss_of, program.optimizer, **(self.step_options or {}))

        def prepare(state: PyTree, batch: PyTree) -> PyTree:
            return train.init(params_of(state), batch)

        def one(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            state, metrics = train(state, batch)
            return state, metrics.loss

        return prepare, one


def with_history(
    scaled: WithHistory, prepare: Callable[[PyTree], PyTree]
) -> tuple[Callable[[PyTree, PyTree], PyTree], Step]:
    """Returns state function and step of delayed scaling, whose history is part of the state."""

    def begin(state: PyTree, batch: PyTree) -> PyTree:
        state = prepare(state)
        return {"state": state, "history": scaled.init(state, batch)}

    def one(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        (after, loss), history = scaled.step(state["history"], state["state"], batch)
        return {"state": after, "history": history}, loss

    return begin, one


half = functools.partial(floats_as, jnp.float16)


def scaled(name: str, recipe: Recipe, what: str) -> Method:
    """Returns the method that autoscales the whole step; stored state is narrow from the start."""
    # store's paths start at the state, the step's at (state, loss): `search` serves both
    return Method(
        name, lambda state: store(state, recipe), lambda step: autoscale(step, recipe), what,
        step_options=None if recipe.state else {"policy": recipe},
    )  # fmt: skip


NARROW_STATE = (  # except for biases and a norm's gains, half a percent of the example's parameters
    (re.escape("['params']"), Storage(FP16, min_size=2048)),
    (r"\.mu\b", Storage(E4M3FN, min_size=2048)),
    (r"\.nu\b", Storage(FP16, root=2, min_size=2048)),
)

WHAT = {
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
STEPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "static-scale": ("autocast FP16, a constant loss scale of 32768",
                     {"policy": "c=f16", "scaling": StaticLossScale(2.0**15)}),
    "dynamic-scale": ("autocast FP16, automatic loss scaling, doubled after 100 steps",
                      {"policy": "c=f16", "scaling": DynamicLossScale(interval=100)}),
    "autocast-fp16": ("autocast FP16, automatic loss scaling", {"policy": "c=f16"}),
    "autocast-bf16": ("autocast BF16", {"policy": "c=bf16"}),
    "master-fp16": ("FP16 weights beside a float32 copy, automatic loss scaling",
                    {"policy": "p=f16,c=f16", "weights": "master"}),
    "master-bf16": ("BF16 weights beside a float32 copy",
                    {"policy": "p=bf16,c=bf16", "weights": "master"}),
    "stochastic-bf16": ("BF16 weights rounded stochastically",
                        {"policy": "p=bf16,c=bf16", "weights": "stochastic"}),
    "compensated-bf16": ("BF16 weights with the rounding error of each update carried on",
                         {"policy": "p=bf16,c=bf16", "weights": "compensated"}),
    "five-bytes": ("FP16 weights rounded stochastically, narrow moments, automatic loss scaling",
                   {"policy": "p=f16,c=f16", "weights": "stochastic", "moments": NARROW_ADAM}),
}  # fmt: skip
STEPPED |= {
    f"state-{name}": (f"float32, the optimizer's state as {name}", {"moments": name})
    for name in STATES
}
METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method(
            "float32", transform=lambda step: step, what="the program as it is", step_options={}
        ),
        Method(
            "fp16-plain",
            half,
            lambda step: lambda state, batch: step(state, half(batch)),
            "all of it cast to FP16, nothing else done",
        ),
        *(scaled(name, recipes.CATALOGUE[name], what) for name, what in WHAT.items()),
        *(
            scaled(
                f"scalify-{norm}",
                Recipe(results=Results(rescale=norm)),
                f"each result in FP16, scales found anew by {norm.upper()} norms",
            )
            for norm in ("l1", "l2")
        ),
        Method(
            "scalify-loss",
            what="scalify of loss and gradients, which a float32 optimizer takes",
            step_options={"policy": recipes.scalify},
        ),
        scaled(
            "fp8-narrow-state",
            dataclasses.replace(recipes.fp8, state=NARROW_STATE),
            "fp8; FP16 weights, E4M3 first and FP16 root of second moment",
        ),
        *(Method(name, what=what, step_options=own) for name, (what, own) in STEPPED.items()),
        *(
            scaled(name, recipe, f"autoscale, recipes.{name}")
            for name, recipe in recipes.CATALOGUE.items()
            if name not in WHAT
        ),
    )
}
DEMO = ("float32", "fp16-plain", "fp16", "fp8", "fp8-narrow-state")  # what runs if none is named


@checked
def method(name: str | Method) -> Method:
    """Returns the method of that name, in which ``-`` and ``_`` are the same, or a given method."""
    if isinstance(name, Method):
        return name
    spellings = {known.replace("_", "-"): found for known, found in METHODS.items()}
    if found := spellings.get(str(name).replace("_", "-")):
        return found
    raise InputError(unknown(str(name), "method", where="method"))
