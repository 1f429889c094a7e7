"""Low-precision arithmetic for JAX: what a narrow float format does to a program, and the cure.

Importing this package imports neither JAX nor any of its own subpackages. A public name is imported
when it is first used; `__init__.pyi` lists all of them.
"""

import lazy_loader as _lazy_loader

_attribute, _, __all__ = _lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "__version__":
        return _attribute(name)
    from importlib.metadata import version

    return version("scalewise")


def __dir__() -> list[str]:
    return sorted(__all__)
