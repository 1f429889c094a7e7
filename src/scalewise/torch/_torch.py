"""The ``torch`` module; where it is missing, an error that says what to install."""

from typing import Any, TypeAlias

from .._extras import require

torch: Any = require("torch", "torch", "scalewise.torch")

# Names of torch's types, for annotations: type checkers run without torch.
Tensor: TypeAlias = Any  # torch.Tensor
Dtype: TypeAlias = Any  # torch.dtype
Module: TypeAlias = Any  # torch.nn.Module
Node: TypeAlias = Any  # torch.fx.Node, an operation of an exported graph
GraphModule: TypeAlias = Any  # torch.fx.GraphModule, an exported graph
Overload: TypeAlias = Any  # an overload of an operator: torch.ops.aten.add.Tensor
GradScaler: TypeAlias = Any  # torch.amp.GradScaler
