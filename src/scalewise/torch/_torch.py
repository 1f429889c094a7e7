"""The ``torch`` module; where it is missing, an error that says what to install."""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class _Absent:
    """An operator, or an overload, that the installed torch doesn't have: no graph holds it."""

    name: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.name}.{name}")

    def __call__(self, *args: Any) -> Any:
        raise AttributeError(f"torch {torch.__version__} has no {self.name}")


class _Aten:
    """``torch.ops.aten``, in which tables of rules may name operators that torch has dropped."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.aten, name, None) or _Absent(f"aten.{name}")


aten: Any = _Aten()
