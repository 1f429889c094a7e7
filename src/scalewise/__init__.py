"""Low-precision arithmetic for JAX: what a narrow float format does to a program, and the cure.

Importing this package imports neither JAX nor any of its own subpackages. A public name is imported
when it is first used; `__init__.pyi` lists all of them.
"""

import importlib

from ._public import MODULES as _MODULES

__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("scalewise")
    elif name in _MODULES:
        module = importlib.import_module(f".{_MODULES[name]}", __name__)
        value = module if _MODULES[name] == name else getattr(module, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
