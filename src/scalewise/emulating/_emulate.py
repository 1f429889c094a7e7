"""``emulate``: computes what a machine computes whose every result has one format."""

from __future__ import annotations

from collections.abc import Callable

from .._check import Result, as_decorator, checked
from .._resolve import as_format
from ..devices import MatrixUnitsLike, matrix_units
from ..formats import FP64, FormatLike, Saturation
from ..interpret import transform
from ..scaled import saturation
from ._draws import EmulationWithDraws
from ._emulation import OnDevice


@as_decorator
@checked
def emulate(
    f: Callable[..., Result],
    fmt: FormatLike | None = None,
    *,
    saturate: Saturation = False,
    device: MatrixUnitsLike | None = None,
) -> Callable[..., Result]:
    """Returns ``f`` as a machine computes it whose only floating-point format is ``fmt``.

    Arguments, constants and the float result of each equation are rounded to the nearest number of
    the format, once, subnormals and all. ``+ - * /`` and the square root are correctly rounded;
    elementary functions are, but for the one case in 2^27 or so where float64's own error decides
    a tie; a contraction or a sum is accumulated in float64 and rounded at its end.

    A Python number among the arguments is one in ``f`` too: Python computes with it, exactly, until
    it meets an array. To have it rounded, pass ``jnp.asarray(x)``.

    Random draws are computed wide from their bits on and rounded once: see
    :class:`EmulationWithDraws`.

    It models the source's operations one by one: no fused multiply-add, no rewriting, the same bits
    under ``jit`` and eagerly.

    Args:
        f: any function of pytrees made of JAX primitives.
        fmt: a format of up to 25 significant bits, or FP64; or a name or dtype of one. None, with a
            device: every operation computes in the program's own dtypes.
        saturate: what overflow does, as for :func:`scalewise.round_to`.
        device: computes every product and convolution, for whose operands the device has matrix
            units, as these add it up, bit for bit (:func:`scalewise.devices.matrix_unit`): with
            one accumulator over all of K, in ascending order;
            ``devices.MatrixUnits("h100", promote=128)`` for another schedule. Libraries such as
            cuBLAS may split K. Operands in float32 are multiplied as TF32, as XLA does by default.

    Returns:
        A function of the same signature; float results have ``f``'s own dtypes and are numbers of
        the format (NaN and infinities where the format has none come from ``saturate=False``).

    Raises:
        TypeError: ``f`` isn't callable, or returns an object that hides arrays (no pytree).
        ValueError: an unknown format or device, a format too wide, or neither of the two.

    Example:
        >>> import jax.numpy as jnp, scalewise as sw
        >>> def norm(x):
        ...     return jnp.sqrt(jnp.sum(x * x))
        >>> float(sw.emulate(norm, "fp16")(jnp.full(4096, 16.0)))
        inf
        >>> float(sw.emulate(norm, "bf16")(jnp.full(4096, 16.0)))
        1024.0
    """
    if fmt is None:
        if device is None:
            raise ValueError("emulate: expected a format, a device, or both; got neither")
        return transform(f, OnDevice(matrix_units(device)), name="emulate")
    fmt = as_format(fmt, "emulate")
    if fmt.mantissa_bits > 24 and fmt != FP64:
        raise ValueError(
            f"emulate: {fmt.name} has {fmt.precision} significant bits; expected at most 25, or "
            "FP64 itself, since results are carried in float64"
        )
    units = None if device is None else matrix_units(device)
    emulation = EmulationWithDraws(fmt, saturation(saturate, fmt), units=units)
    return transform(f, emulation, name="emulate")
