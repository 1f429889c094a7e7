"""What a plan may cost, and what it keeps small: a divergence, a loss, or the outputs' error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from .._check import Positive, checked
from ..auditing import kl
from ..autoscaling import Operand
from ..devices import Device, device, units_for
from ..formats import BlockFormat, Format
from ._sites import Part, Product, Site

Option = Mapping[Part, Operand | None]  # how a site's operands are rounded, None where they aren't
UNITS = {"bits": "bits a {}", "bytes": "bytes of {}s", "seconds": "seconds at best"}


@checked
@dataclasses.dataclass(frozen=True)
class Budget:
    """The limit of :func:`scalewise.plan`: on the cost (bits, bytes or seconds), or on the error.

    Exactly one of these four is given.

    Attributes:
        bits: the mean number of bits of a weight, with the scales of its blocks. Where results
            are planned, too, the mean of both.
        bytes: of all weights that products read, and of results that are planned.
        seconds: for all products, a lower bound from the operations and the bytes a second of
            ``device``. Formats that its units don't multiply are widened there, and save bytes
            alone.
        error: the objective's limit; the plan is then the one of the fewest bits (or seconds, if
            ``device`` is given) that keeps it.
        device: a name of :data:`scalewise.devices.DEVICES`.

    Raises:
        ValueError: none or several of them, or an unknown device or one of unknown speed.

    Example:
        >>> import scalewise as sw
        >>> sw.Budget(bits=4.5).limit, sw.Budget(seconds=1e-3, device="h100").kind
        (4.5, 'seconds')
    """

    bits: Positive | None = None
    bytes: Positive | None = None
    seconds: Positive | None = None
    error: Positive | None = None
    device: str | None = None

    def __post_init__(self):
        names = (*UNITS, "error")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            several = f", not {' and '.join(given)}" if given else ""
            raise ValueError(f"Budget needs one of bits, bytes, seconds and error{several}")
        needed, allowed = given == ["seconds"], given[0] in ("seconds", "error")
        if needed if self.device is None else not allowed:
            raise ValueError("Budget.device is for seconds, which need it, or for error")
        if self.device is not None and not device(self.device).bandwidth:
            raise ValueError(f"Budget.device is {self.device!r}, whose speed isn't known")

    @property
    def kind(self) -> str:
        """What is counted: ``"bits"``, ``"bytes"`` or ``"seconds"``."""
        if self.seconds is not None or self.device is not None:
            return "seconds"
        return "bytes" if self.bytes is not None else "bits"

    @property
    def limit(self) -> float | None:
        """The most that the plan may cost; None if its error is limited."""
        return None if self.error is not None else getattr(self, self.kind)

    def cost(self, site: Site, option: Option, weights: int) -> float:
        """Returns what an option of a site adds; all sites together have ``weights`` numbers."""
        if self.kind == "seconds":
            assert self.device is not None
            return sum(_seconds(p, option, device(self.device)) for p in site.products)
        bits = site.elements * bits_of(site.counted(option), site.bits)
        return bits / 8 if self.kind == "bytes" else bits / max(weights, 1)


def bits_of(operand: Operand | None, own: float) -> float:
    """Returns the bits of a number, with its share of scales of blocks; ``own`` if unrounded."""
    if operand is None:
        return own
    fmt = operand.format
    return min(fmt.bits_per_element, own)


def _seconds(product: Product, option: Option, on: Device) -> float:
    """Returns a lower bound of the time in which a device computes a site's product."""
    operands = [option.get(role) for role in product.roles]
    formats = [x and x.format for x in operands]
    bits = [bits_of(x, own) for x, own in zip(operands, product.bits, strict=False)]
    bits.append(product.bits[2])
    moved = sum(n * b / 8 for n, b in zip(product.sizes, bits, strict=True))
    work = 2 * product.sizes[2] * product.terms
    at_best = max(work / (on.flops * _rate(formats, product.bits, on)), moved / on.bandwidth)
    return product.times * at_best


def _rate(formats: Sequence[Format | BlockFormat | None], bits: Sequence[int], on: Device) -> float:
    a, b = formats
    units = units_for(a, b, on) if a is not None and b is not None else None
    if units is not None:
        return units.rate
    half = all(f is not None or n <= 16 for f, n in zip(formats, bits, strict=False))
    names = ("bf16", "fp16") if half else ("tf32", "fp32")
    return max((on.rate(n, n) for n in names), default=0.0) or 0.5


ObjectiveName = Literal["auto", "kl", "loss", "error"]
WORST = 1e30  # in place of an objective that isn't finite: sums of it and others stay numbers
Outputs = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
    """A number that grows with what a plan changes."""

    words: str  # what the number is, for people
    measure: Callable[[Outputs, Outputs], jax.Array]  # of the reference's outputs and a plan's
    # Random cotangents of the outputs whose second moment is the Hessian, where the gradient is
    # zero; None to differentiate twice.
    probe: Callable[[jax.Array, Outputs], list[jax.Array]] | None
    root: bool = False  # whether people read its square root

    def shown(self, x: float) -> float:
        x = x if abs(x) < WORST else math.copysign(math.inf, x)
        return max(x, 0.0) ** 0.5 if self.root else x


def objective(name: str, outputs: Sequence[jax.ShapeDtypeStruct]) -> Objective:
    scalars = [i for i, x in enumerate(outputs) if x.shape == ()]
    if not outputs:
        raise ValueError("plan: the function returns no floats, so that no error can be measured")
    if name == "auto":
        name = "loss" if len(outputs) == 1 and scalars else "error"
    if name == "loss":
        if len(scalars) != 1:
            count = len(scalars)
            raise ValueError(f"plan: objective='loss' needs one output without axes, not {count}")
        change = lambda a, b: (b[scalars[0]] - a[scalars[0]]).astype(jnp.float32)  # noqa: E731
        return Objective("change of the loss", change, None)
    if name == "kl":
        wide = [i for i, x in enumerate(outputs) if x.ndim and x.shape[-1] > 1]
        if len(outputs) != 1 or not wide:
            shapes = ", ".join(str(tuple(x.shape)) for x in outputs)
            raise ValueError(f"plan: objective='kl' needs logits, one output; there are {shapes}")
        return Objective("KL divergence, in nats", lambda a, b: kl(a[0], b[0]).mean(), _kl_probe)
    return Objective("relative error of the outputs", _error, _error_probe, root=True)


def _kl_probe(key: jax.Array, reference: Outputs) -> list[jax.Array]:
    """The Hessian at the reference is Fisher's, diag(p) - p p^T for each position."""
    (z,) = reference
    p = jax.nn.softmax(z.astype(jnp.float32))
    root, normal = jnp.sqrt(p), jax.random.normal(key, z.shape)
    v = root * normal - p * jnp.sum(root * normal, axis=-1, keepdims=True)
    return [(v / (z.size // z.shape[-1]) ** 0.5).astype(z.dtype)]


LEAST = 1e-30  # of an output's sum of squares: the error of one that is zero is relative to this


def _squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def _error(reference: Outputs, outputs: Outputs) -> jax.Array:
    pairs = zip(reference, outputs, strict=True)
    parts = [_squares(b - a) / jnp.maximum(_squares(a), LEAST) for a, b in pairs]
    return jnp.stack(parts).mean()


def _error_probe(key: jax.Array, reference: Outputs) -> list[jax.Array]:
    keys = jax.random.split(key, len(reference))
    return [
        (jax.random.normal(k, x.shape) * (2 / (len(reference) * size)) ** 0.5).astype(x.dtype)
        for k, x in zip(keys, reference, strict=True)
        for size in [jnp.maximum(_squares(x), LEAST)]
    ]
