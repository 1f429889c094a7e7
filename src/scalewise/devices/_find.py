"""Finds the device of the table that a program is compiled for."""

from __future__ import annotations

import functools

import jax

from ._table import DEVICES, Device, device


def device_for(name: str | Device | None) -> Device | None:
    """Returns the device of a name; for None that of JAX's default backend, if the table has it.

    A program is traced before it is lowered for a platform, so a device that isn't named can only
    be the one that JAX runs on. To compile ahead of time for another device, name it.
    """
    return present() if name is None else device(name)


@functools.cache
def present() -> Device | None:
    """Returns the row for the first device of JAX's default backend; None if it has no row."""
    return by_kind(jax.devices()[0].device_kind)


def by_kind(kind: str) -> Device | None:
    """Returns the row whose ``kinds`` has the longest prefix of a ``jax.Device.device_kind``."""
    kind = kind.lower()
    found = [(len(k), d) for d in DEVICES.values() for k in d.kinds if kind.startswith(k)]
    return max(found, key=lambda pair: pair[0])[1] if found else None
