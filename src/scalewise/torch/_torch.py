"""The ``torch`` module; where it is missing, an error that says what to install."""

from typing import Any, TypeAlias

from .._extras import require

torch: Any = require("torch", "torch", "scalewise.torch")

# Names of torch's types, for annotations: type checkers run without torch.
Tensor: TypeAlias = Any
"""A ``torch.Tensor``."""

Dtype: TypeAlias = Any
"""A ``torch.dtype``."""

Module: TypeAlias = Any
"""A ``torch.nn.Module``."""

Node: TypeAlias = Any
"""A ``torch.fx.Node``, an operation of an exported graph."""

GraphModule: TypeAlias = Any
"""A ``torch.fx.GraphModule``, an exported graph."""

Overload: TypeAlias = Any
"""An overload of an operator, such as ``torch.ops.aten.add.Tensor``."""

GradScaler: TypeAlias = Any
"""A ``torch.amp.GradScaler``."""
