"""Subpackages that are called like the function of the same name.

`scalewise.audit` is a function to most users and a package to Python: whoever imports anything from
the package replaces the attribute of its parent by the package. So that ``sw.audit(f, "fp16")``,
``sw.audit.Monitor`` and ``import scalewise.audit as a`` all work in any order, the package itself
can be called.
"""

import inspect
import sys
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A module `name` whose call is that of its function `name`."""

    @property
    def _function(self) -> Any:
        return vars(self)[self.__name__.rpartition(".")[2]]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def make_callable(name: str) -> None:
    """Lets the imported module `name` be called as the function that it is named after."""
    sys.modules[name].__class__ = CallableModule
