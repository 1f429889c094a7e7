"""Which device of the table a program is compiled for."""

from __future__ import annotations

import functools

import jax

from ._table import DEVICES, Device, device


def device_for(name: str | Device | None) -> Device | None:
    """The device of a name; without one, that of JAX's default backend, if the table knows it.

    A program is traced before it is lowered for a platform, so that what isn't named can only be
    the device that JAX has. To compile ahead of time for another, name it.
    """
    return present() if name is None else device(name)


@functools.cache
def present() -> Device | None:
    """The table's row for the first device of JAX's default backend; None if it has no row."""
    return by_kind(jax.devices()[0].device_kind)


def by_kind(kind: str) -> Device | None:
    """The row whose ``kinds`` has the longest beginning of a ``jax.Device.device_kind``."""
    kind = kind.lower()
    found = [(len(k), d) for d in DEVICES.values() for k in d.kinds if kind.startswith(k)]
    return max(found, key=lambda pair: pair[0])[1] if found else None
