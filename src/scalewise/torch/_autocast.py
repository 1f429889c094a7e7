"""torch's automatic mixed precision: the dtype in which each ATen operation gets its operands.

The lists are those of ``torch.autocast("cuda")``: torch installs their header with itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._types import PyTree
from ._convert import jax_dtype
from ._torch import Node, torch


@functools.cache
def _lists() -> dict[str, frozenset[str]]:
    """Returns torch's lists by name: of overloads, ``default`` left out."""
    text = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    bodies = re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)+.*)", text)
    overload = re.compile(r"_\((\w+(?:, \w+)?)\)")
    return {name: frozenset(x.replace(", ", ".") for x in overload.findall(body))
            for name, body in bodies}  # fmt: skip


# Neither promote their operands nor are listed; fake tensors don't check their dtypes.
EQUAL_DTYPES = frozenset(["index_add", "index_copy", "index_reduce", "put"])
# Operations of a graph that torch calls inside of a listed one.
INSIDE = {
    "_prelu_kernel": "prelu",
    "_cdist_forward": "cdist",
    "_pdist_forward": "pdist",
    "grid_sampler_2d": "grid_sampler",
    "square": "pow.Tensor_Scalar",
    "upsample_nearest2d.vec": "upsample_nearest2d",
    "upsample_bilinear2d.vec": "upsample_bilinear2d",
}

Cast = Callable[[Any, np.dtype], Any]


def listed(target: Any) -> str:
    """Returns the name of an operation as the lists have it."""
    name = str(target).removeprefix("aten.").removesuffix(".default")
    return INSIDE.get(name, name)


def autocast(
    target: Any, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], low: np.dtype, cast: Cast
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns an operation's arguments as ``torch.autocast`` passes them; ``cast`` is ``x.to``."""
    name, lists = listed(target), _lists()
    if name in lists["FP32_SET_OPT_DTYPE"] and _is_eligible(args[0]):
        return _with_float32(target, args, kwargs)
    dtype = jnp.dtype(jnp.float32)
    if name in lists["PROMOTE"]:
        arrays = [x for x in jax.tree.leaves((args, kwargs)) if _is_eligible(x)]
        dtype = low if {_dtype(x) for x in arrays} <= {low} else dtype
    elif name in lists["LOWER_PRECISION_FP"]:
        dtype = low
    elif name not in lists["FP32"]:
        return args, kwargs

    def converted(x: Any) -> Any:
        return cast(x, dtype) if _is_eligible(x) and _dtype(x) != dtype else x

    return jax.tree.map(converted, (args, kwargs))


def refusal(node: Node, args: Sequence[PyTree], low: np.dtype | None) -> str:
    """Returns why torch raises in place of computing an operation, or ""."""
    name = listed(node.target)
    if name == "binary_cross_entropy" and low is not None:
        return "autocast refuses binary_cross_entropy: use binary_cross_entropy_with_logits"
    dtypes = sorted({str(_dtype(x)) for x in args if _is_eligible(x)})
    if name not in EQUAL_DTYPES or len(dtypes) == 1:
        return ""
    # a constant's dtype may be one that the model read without autocast
    made = node.args[0].op == "call_function" and not node.args[0].all_input_nodes
    if made and node.args[0].kwargs.get("dtype"):
        return ""
    return f"{name} of {' and '.join(dtypes)} raises: convert one by .to()"


def _dtype(x: Any) -> np.dtype | None:
    if isinstance(x, torch.Tensor):
        return jax_dtype(x.dtype)
    return x.dtype if isinstance(x, jax.Array | np.ndarray) else None


def _is_eligible(x: object) -> bool:
    dtype = _dtype(x)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.float64


def _with_float32(
    target: Any, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns arguments with float32 for a ``dtype`` that isn't given."""
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if given.get("dtype") is not None:
        return args, kwargs
    at = names.index("dtype")
    return args[:at], {**kwargs, "dtype": torch.float32}
