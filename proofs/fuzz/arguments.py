"""Wrong arguments to public functions and classes: refused at the entrance, by name.

A call raises a TypeError or ValueError, in scalewise and not in a library below, whose message
names the argument or shows the value. ``accepted`` lists the values that are right, apart from
``scalewise._check``.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import traceback
import warnings
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import optax

import scalewise as sw
from scalewise import training

OBJECT = object()
POOL = [
    None, "", "no such name", -1, 0, 1.5, math.nan, math.inf, True, [], {}, OBJECT, ("a", 1),
    np.array(["a"]), int,
]  # fmt: skip
X = np.ones((4, 32), np.float32)
S = sw.quantize(X, "e4m3fn")
SGD = optax.sgd(0.1)
STORED = sw.Recipe(state=((".*", sw.Storage(sw.formats.E4M3FN)),))
LOSS = training.StaticLossScale().init()


def loss(params, batch):
    return jnp.mean((batch @ params) ** 2)


# The required arguments of each entry; others have defaults.
ENTRIES = {
    "formats": {
        "Format": {"name": "f", "exponent_bits": 4, "mantissa_bits": 3},
        "BlockFormat": {"name": "b", "element": sw.formats.E2M1FN},
        "format": {"spec": "fp16"},
        "block_format": {"spec": "mxfp4"},
        "next_up": {"fmt": "fp16", "x": 1.0},
        "ulp": {"fmt": "fp16", "x": 1.0},
        "bits": {"x": 1.0, "fmt": "fp16"},
        "p3109": {"bits": 8, "precision": 4},
    },
    "rounding": {
        "saturation": {"rule": "onnx", "fmt": "e4m3fn"},
        "cast": {"x": X, "fmt": "fp16"},
        "round_to": {"x": X, "fmt": "fp16"},
        "decode": {"codes": np.zeros(4, np.uint8), "fmt": "e4m3fn"},
        "encode": {"x": X, "fmt": "e4m3fn"},
        "pack": {"codes": np.zeros(4, np.uint8), "fmt": "e2m1fn"},
        "unpack": {"packed": np.zeros(2, np.uint8), "fmt": "e2m1fn", "size": 4},
    },
    "scaled": {
        "ScaledArray": {"data": X},
        "quantize": {"x": X, "fmt": "e4m3fn"},
        "dequantize": {"a": S},
        "rebalance": {"a": S, "factor": 2.0},
        "as_scaled": {"tree": X},
        "asarray": {"tree": S},
        "dynamic_rescale": {"tree": S}, "find_optimal_scaling": {"x": X, "fmt": "e4m3fn"},
        "matmul": {"a": S, "b": X.T},
        "dot_general": {"a": S, "b": X.T, "dimension_numbers": (((1,), (0,)), ((), ()))},
        "conv": {
            "a": X[None, None], "kernel": X[None, None], "window_strides": (1, 1),
            "padding": "SAME",
        },
        **{
            name: {"a": S}
            for name in (
                "abs", "cos", "exp", "gelu", "log", "max", "mean", "min", "neg", "relu",
                "rsqrt", "sigmoid", "sin", "softmax", "sqrt", "square", "sum", "tanh", "clip",
                "cumsum", "erf", "log_softmax",
            )
        },
        **{
            name: {"a": S, "b": S}
            for name in (
                "add", "sub", "mul", "div", "maximum", "minimum",
            )
        },
        "cast_data": {"a": S, "fmt": "e4m3fn"},
        "concatenate": {"xs": [S, S]},
        "integer_pow": {"a": S, "n": 2},
        "where": {"condition": X > 0, "a": S, "b": S},
        "save_safetensors": {"path": "/nowhere/x", "arrays": {"a": X}},
        "load_safetensors": {"path": "/nowhere/x"},
        **{
            name: {}
            for name in (
                "Amax", "Delayed", "Fixed", "LeastSquares", "MsEden", "Mx", "Quest", "Unit",
            )
        },
    },
    "ops": {
        "Accumulator": {"fmt": "fp16"},
        "Arithmetic": {"fmt": sw.formats.FP16},
        "beta_high": {"fmt": "fp16", "n": 4},
        "beta_low": {"fmt": "fp16"},
        "ulp_bound": {"fmt": sw.formats.FP16, "n": 4},
        "cross_entropy": {"logits": X, "labels": np.zeros(4, int)},
        "matmul": {"a": X, "b": X.T},
        **{
            name: {"x": X}
            for name in (
                "l2_norm", "layer_norm", "rms_norm", "log_softmax", "softmax", "logsumexp",
                "mean", "sum", "var", "isinf_sign",
            )
        },
    },
    "emulating": {"emulate": {"f": jnp.sin, "fmt": "fp16"}, "Emulation": {"fmt": sw.formats.FP16}},
    "autocasting": {
        "autocast": {"f": jnp.sin}, "placements": {"f": jnp.sin}, "policy": {"text": "bf16"},
        "Policy": {}, "Rule": {"run": "low", "primitive": "tanh"},
    },
    "autoscaling": {
        "autoscale": {"f": jnp.sin}, "explain": {"f": jnp.sin},
        "store": {"tree": X, "recipe": STORED},
        "quantize_params": {"params": {"w": X}, "recipe": "fp8"},
        "Operand": {"format": "e4m3fn"}, "Attention": {},
        "Products": dict.fromkeys(("forward", "input_gradient", "weight_gradient"), (None, None)),
        "Recipe": {},
        "Storage": {"format": "e4m3fn"},
    },
    "scalifying": {"scalify": {"f": jnp.sin}, "Scalify": {}},
    "autoscaling.recipes": {
        "recipe": {"name": "fp8"},
        "to_dict": {"given": "fp8"},
        "from_dict": {"data": {"recipe": "fp8"}},
    },
    "devices": {
        "device": {"name": "h100"}, "MatrixUnits": {"device": "h100"},
        "matrix_unit": {"device": "h100", "left": "bf16"},
        "MatrixUnit": {
            "architecture": "hopper", "instruction": "wgmma", "left": sw.formats.BF16,
            "right": sw.formats.BF16, "terms": 16, "fraction_bits": 25,
        },
    },
    "auditing": {
        "audit": {"f": jnp.sin}, "record": {"f": jnp.sin},
        "literals": {"f": jnp.sin, "fmt": "fp16"},
        "compare": {"a": "/nowhere/a.safetensors", "b": "/nowhere/b.safetensors"},
        "load_recording": {"path": "/nowhere/a.safetensors"},
        "readings": {"tree": X}, "exponents": {"tree": X}, "Monitor": {},
    },
    "training": {
        "DynamicLossScale": {}, "StaticLossScale": {}, "ExpandedStorage": {}, "TableStorage": {},
        "all_finite": {"tree": X}, "apply_updates": {"params": X, "updates": X},
        "compensated": {"optimizer": SGD}, "master_weights": {"optimizer": SGD},
        "stochastic_rounding": {"optimizer": SGD}, "loss_scaled": {"optimizer": SGD},
        "store_state": {"optimizer": SGD},
        "scale_loss": {"loss": jnp.float32(1), "state": LOSS},
        "unscale": {"gradients": X, "state": LOSS},
        "mean_over": {"tree": X, "axis_name": "i"},
        "step": {"loss": loss, "optimizer": SGD},
    },
}  # fmt: skip
# Any value may stand in a pytree, and JAX allows any hashable name of an axis.
FREE = {"tree", "gradients", "params", "updates", "axis_name"}
TEXTS = {
    "name", "what", "function", "primitive", "scope", "path", "out", "data", "before", "after", "a",
    "architecture", "instruction", "source",
}  # fmt: skip
ARRAY = [-1, 0, 1.5, math.nan, math.inf, True, []]


def accepted(annotation: str, name: str) -> list:
    """Returns the values of the pool that an argument may have."""
    found = [None] if "None" in annotation or name in FREE else []
    for part, values in {
        "ArrayLike": ARRAY, "Operand": ARRAY, "jax.Array": [], "Callable": [int], "Mapping": [{}],
        "Sequence": [[]], "Iterable": [[], {}], "bool": [True], "Saturation": [True],
        "NonNegative": [0, 1.5], "Positive": [1.5], "Natural": [0], "AnyFloat": ARRAY[:5],
        "float": [-1, 0, 1.5], "int": [-1, 0], "Axis": [None, -1, 0, []], "growth": [1.5],
        "Groups": [0, {}], "Step": [int], "Watch": [int], "Set": [[]], "PathLike": ["no such name"],
        "Path": ["no such name"], "ComputeDtype": [None], "StorageFormat": [None],
        "Static": [1.5, int],
    }.items():  # fmt: skip
        if re.search(rf"\b{part}\b", annotation):
            found += values
    if name in TEXTS and re.search(r"\bstr\b", annotation):
        found += ["", "no such name"]
    return found


# Where an annotation says more or less than the table: the values of the pool that are right.
EXACT = {
    ("Policy", "compute"): [], ("audit", "batches"): [None, [], {}, int, ("a", 1), np.ndarray],
    ("cast_data", "fmt"): [], ("concatenate", "xs"): [], ("conv", "window_strides"): [[]],
    ("conv", "padding"): [[]], ("Rule", "scope"): [None, "", "no such name"],
    ("compare", "b"): ["", "no such name"],
    ("Format", "exponent_bits"): [],
    ("Format", "mantissa_bits"): [], ("BlockFormat", "element"): [], ("p3109", "precision"): [],
    ("p3109", "bits"): [], ("Storage", "root"): [],
    **{(name, "rescale"): [None] for name in ("Scalify", "scalify")},
    **{(name, "keep"): [{}] for name in ("Scalify", "scalify")},
    ("BlockFormat", "tensor_scale"): [None], ("MsEden", "clip"): [1.5], ("device", "name"): [],
    ("recipe", "name"): [],
    ("DynamicLossScale", "growth"): [1.5], ("DynamicLossScale", "backoff"): [],
    ("TableStorage", "bits"): [], ("Products", "backward_from"): [],
    ("Mx", "exponent"): [], ("readings", "groups"): [0],
    ("find_optimal_scaling", "axis"): [[], -1, 0],
    ("save_safetensors", "arrays"): [{}], ("store_state", "storages"): [{}],
    ("softmax", "axis"): [-1, 0],
    ("ScaledArray", "scale"): [None, *ARRAY[:5]],
    ("as_scaled", "scale"): [None, *ARRAY],
    ("step", "moments"): [None, {}], ("Recipe", "keep"): [{}],
}  # fmt: skip


def is_accepted(value, allowed) -> bool:
    if isinstance(value, np.ndarray):
        return np.ndarray in allowed
    return any(
        value is x or (type(value) is type(x) and (value == x or value != value != x != x))
        for x in allowed
    )


def wrong_calls(package):
    for name, given in ENTRIES[package].items():
        entry = getattr(importlib.import_module(f"scalewise.{package}"), name)
        for p in inspect.signature(entry).parameters.values():
            if p.name in FREE or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                continue
            allowed = EXACT.get((name, p.name), accepted(str(p.annotation), p.name))
            for value in POOL:
                if not is_accepted(value, allowed):
                    yield entry, given, p.name, value


# What messages say instead of the entry's name: the function that it calls, what a format lacks.
WORDS = {
    "encode": "cast",
    "dot": "matmul: ",
    "Storage": "storage dtype",
}


def fault(entry, given, argument, value) -> str | None:
    """Returns what is wrong about a refusal; None if it is as it should be."""
    call = f"{entry.__name__}({argument}={value!r})"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entry(**{**given, argument: value})
    except (TypeError, ValueError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        text = str(error)
        known = argument in text or repr(value)[:60] in text or entry.__name__ in text
        known |= getattr(value, "name", None) is not None and str(value.name) in text
        known |= WORDS.get(entry.__name__, "\n") in text
        known |= any(isinstance(x, str) and x in text for x in given.values())
        if Path(sw.__file__).parent not in Path(where).parents:
            return f"{call}: raised in {where}: {text}"
        return None if known else f"{call}: doesn't name it: {text}"
    except Exception as error:
        return f"{call}: {type(error).__name__}: {error}"
    return f"{call} is accepted"


# Calls that take long if a random number of steps, say, is a right one, or need a mapped axis.
EXPENSIVE = {"mean_over"}


SCALARS = st.one_of(
    st.sampled_from(POOL),
    st.integers(-40, 40),
    st.floats(),
    st.sampled_from(("", "fp16", "e8m0", "mxfp4", "(", "max", "p=f32", "\ud800", "é", b"fp16", 1j)),
    st.sampled_from((2**31, 2**70, 10**400, 1e308, 5e-324, np.uint32(1), [np.int8(1), 300])),
    st.sampled_from((Path("x"), np.int64(3), np.float16(2), np.bool_(1))),
    st.sampled_from((sw.formats.E8M0, sw.formats.NVFP4, sw.recipes.fp8, np.float16, len, S)),
    st.builds(np.ones, st.lists(st.integers(0, 3), max_size=3), st.sampled_from([*"fdiI?FSO"])),
)
VALUES = st.recursive(
    SCALARS,
    lambda x: st.lists(x, max_size=2) | st.lists(x, max_size=2).map(tuple)
    | st.dictionaries(st.sampled_from(("a", "(", 1)), x, max_size=1),
    max_leaves=4,
)  # fmt: skip
CALLS = [
    (package, name) for package, names in ENTRIES.items() for name in names if name not in EXPENSIVE
]


@hypothesis.given(st.sampled_from(CALLS), st.data())
def random_arguments_are_taken_or_refused(call: tuple[str, str], data) -> None:
    """A call with one random argument: it succeeds, or the argument is refused."""
    package, name = call
    entry = getattr(importlib.import_module(f"scalewise.{package}"), name)
    parameters = inspect.signature(entry).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    named = [p for p in named if p.name not in FREE and p.name not in ("path", "out")]
    if not named:
        return
    parameter = data.draw(st.sampled_from(named))
    found = fault(entry, ENTRIES[package][name], parameter.name, data.draw(VALUES))
    arrays = re.search("ArrayLike|Operand|Array|Sequence", str(parameter.annotation))
    # of arrays that don't fit each other JAX tells, which shows their shapes
    fits = found is None or found.endswith("is accepted") or (arrays and "raised in" in found)
    assert fits, found


PROPERTIES = {"random arguments": random_arguments_are_taken_or_refused}
