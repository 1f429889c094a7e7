"""torch models and tensors: audits and emulates them, rounds and quantizes them.

This package needs torch:
``pip install "scalewise[torch] @ git+https://github.com/scalewise/scalewise"``.
"""

from ._audit import audit as audit
from ._autoscale import autoscale as autoscale
from ._convert import to_jax as to_jax
from ._convert import to_torch as to_torch
from ._emulate import emulate as emulate
from ._export import ExportError as ExportError
from ._function import function as function
from ._registry import RULES as RULES
from ._registry import MissingRuleError as MissingRuleError
from ._registry import rule as rule
from ._tensors import ScaledTensor as ScaledTensor
from ._tensors import cast as cast
from ._tensors import dequantize as dequantize
from ._tensors import quantize as quantize
from ._tensors import round_to as round_to

__all__ = [
    "RULES",
    "ExportError",
    "MissingRuleError",
    "ScaledTensor",
    "autoscale",
    "function",
    "rule",
    "to_jax",
    "to_torch",
]

# for other packages of scalewise, not for users
from ._load import is_model as is_model
from ._load import load as load
