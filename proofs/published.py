"""Computes figures that papers have published, and prints ours beside theirs.

Each paper states an algorithm that needs no data: errors of normal numbers in FP4, averages of
stochastic products, a harmonic sum in a narrow format. ``python -m proofs.published`` computes all
and fails where one differs by more than its tolerance; names of groups restrict it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

import scalewise as sw
from scalewise.formats import E8M0, NVFP4, BlockFormat, Format
from scalewise.scaled import ScaledArray, quantize
from scalewise.scaled._quantize import quantize_measured

SIZE = 1024  # rows and columns of normal numbers; a mean of their squares is known to 0.2 %


@dataclass(frozen=True)
class Figure:
    """A published figure.

    Attributes:
        name: what is measured.
        published: the figure.
        ours: the same, computed here.
        tolerance: the largest relative difference: of the sample, and of the rounding in print.
    """

    name: str
    published: float
    ours: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return abs(self.ours - self.published) <= self.tolerance * abs(self.published)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def squared_error(x: jax.Array, stored: ScaledArray) -> float:
    """Returns 1000 times the mean squared error over the mean square."""
    error = jnp.mean(jnp.square(stored.value() - x)) / jnp.mean(jnp.square(x))
    return 1e3 * float(error)


def quartet2(size: int = SIZE) -> Iterator[Figure]:
    """Quartet II (arXiv 2601.22813), table 1: errors of normal numbers in NVFP4."""
    x, key = normal(0, size, size), jax.random.key(1)
    stochastic = {"rounding": "stochastic", "key": key}
    # stochastic rounding needs room above the largest number: a scale may be rounded down by 1/17
    room = sw.Amax(power_of_two=False, headroom=17 / 16)
    cases = {
        "nearest": (9.0, quantize(x, "nvfp4")),
        "nearest, 4/6": (7.6, quantize(x, "nvfp4", scaling=sw.FourOverSix())),
        "nearest, 16 x 16 blocks": (12.4, quantize_measured(x, x, NVFP4, None, 1, tile=(0, 16))),
        "stochastic": (23.5, quantize(x, "nvfp4", scaling=room, **stochastic)),
        "stochastic, 4/6": (17.5, quantize(x, "nvfp4", scaling=sw.FourOverSix(), **stochastic)),
        "MS-EDEN": (9.4, quantize(x, "nvfp4", scaling=sw.MsEden(), key=key)),
    }
    for name, (published, stored) in cases.items():
        yield Figure(
            f"NVFP4, {name}: squared error / 1000", published, squared_error(x, stored), 0.02
        )


def averages(most: int = 1024) -> Iterator[Figure]:
    """Quartet II, bits of the mean of stochastic products: a bit for each factor of four."""
    a, b = normal(2, 128, 128), normal(3, 128, 128)
    room = sw.Amax(power_of_two=False, headroom=17 / 16)

    @jax.jit
    def product(key: jax.Array) -> jax.Array:
        rounded = [
            quantize(x, "nvfp4", scaling=room, rounding="stochastic", key=k).value()
            for x, k in zip((a, b), jax.random.split(key), strict=True)
        ]
        return rounded[0] @ rounded[1].T

    exact, total = a @ b.T, jnp.zeros((128, 128))
    published: dict[int, float] = dict(
        zip((1, 4, 16, 64, 256, 1024), (2.197, 3.196, 4.196, 5.197, 6.197, 7.196), strict=True)
    )
    for i in range(most):
        total += product(jax.random.fold_in(jax.random.key(4), i))
        if i + 1 in published:
            error = jnp.mean(jnp.square(total / (i + 1) - exact)) / jnp.mean(jnp.square(exact))
            bits = -math.log2(float(error)) / 2
            yield Figure(f"mean of {i + 1} stochastic products: bits", published[i + 1], bits, 0.02)


def integers() -> Format:
    """Returns the integers of magnitudes below 2^14: one binade and as many subnormals."""
    return Format("integers", exponent_bits=1, mantissa_bits=13, bias=-12, infinities=False,
                  nan="none")  # fmt: skip


def endless(fmt: Format) -> Format:
    """Returns the format with more exponents at the top: the paper's model cuts nothing off."""
    return replace(fmt, name=f"endless {fmt.name}", exponent_bits=6, bias=fmt.bias, nan="none")


def signal_to_noise(fmt: Format, largest: float, crest: float, overhead: float) -> float:
    """Returns the decibels of normal numbers with the scale ``overhead * crest / largest``.

    The overhead is 1.5 on average where a scale is rounded up to a power of two, and 1 where it
    isn't rounded.
    """
    x = np.linspace(-6, 6, 400_001).astype(np.float32)
    weight = np.exp(-(x.astype(np.float64) ** 2) / 2)
    scale = np.float32(overhead * crest / largest)
    rounded = np.asarray(sw.round_to(x / scale, fmt, saturate=True)) * scale
    error = np.sum(weight * (rounded - x.astype(np.float64)) ** 2) / np.sum(weight * x**2)
    return -10 * math.log10(error)


def formula(fmt: Format, crest: float, overhead: float, block: int = 0) -> float:
    """Returns the paper's model of the relative squared error of normal numbers in a float format.

    Numbers above the smallest normal one have the relative error of a fraction whose density is
    uniform; of those below, errors are uniform, and what is under half of the smallest is lost.

    Args:
        fmt: the format.
        crest: largest magnitude over standard deviation.
        overhead: of the scale.
        block: numbers that share a scale that isn't a power of two: the largest is exact. 0: none.
    """
    scale = overhead * crest / float(fmt.max)
    step = scale * float(fmt.smallest)
    lost, normal = step / 2, step * 2.0**fmt.mantissa_bits
    energy = 1 - share_below(normal)[1] - (crest**2 / block if block else 0)
    among = share_below(normal)[0] - share_below(lost)[0]
    fraction = max(energy, 0) / (24 * 4.0**fmt.mantissa_bits)
    return fraction + step**2 / 12 * among + share_below(lost)[1]


def share_below(t: float) -> tuple[float, float]:
    """Returns the shares of normal numbers, and of their squares' sum, below ``t`` deviations."""
    count = math.erf(t / math.sqrt(2))
    return count, count - math.sqrt(2 / math.pi) * t * math.exp(-t * t / 2)


def crossover(gain: Callable[[float], float]) -> float:
    """Returns the crest factor where a gain becomes positive."""
    crests = np.geomspace(1, 10, 70)
    gains = [gain(c) for c in crests]
    return next(
        float(a - g * (b - a) / (h - g))
        for a, b, g, h in zip(crests, crests[1:], gains, gains[1:], strict=False)
        if g <= 0 < h
    )


def crest_factors() -> Iterator[Figure]:
    """INT v.s. FP (arXiv 2510.25602): the crest factor from which on FP is the better format.

    The published crossovers are those of a formula, whose largest integer is 2^(b-1) and whose
    scales are 1.5 (E8M0) or 1.05 (E4M3) times larger than needed. Numbers of 4 bits that are really
    rounded cross at 2.08 with that integer, 8, and at 1.77 with the format's own, 7.
    """
    pairs = {
        "MXINT8 and MXFP8": (7.55, 8, "e4m3fn", 1.5, 0),
        "MXINT6 and MXFP6": (1.96, 6, "e2m3fn", 1.5, 0),
        "MXINT4 and MXFP4": (2.04, 4, "e2m1fn", 1.5, 0),
        "NVINT4 and NVFP4": (2.39, 4, "e2m1fn", 1.05, 16),
    }
    for name, (published, bits, spec, overhead, block) in pairs.items():
        fmt = sw.format(spec)
        share = 1 - 1 / block if block else 1  # of the numbers that have an error

        def gain(crest, fmt=fmt, bits=bits, overhead=overhead, block=block, share=share):
            integers = share * (overhead * crest / 2.0 ** (bits - 1)) ** 2 / 12
            return integers - formula(fmt, crest, overhead, block)

        yield Figure(f"crest factor where {name} cross", published, crossover(gain), 0.002)
    e2m1, e4m3 = sw.format("e2m1fn"), sw.format("e4m3fn")

    def rounded(crest):
        float_ = signal_to_noise(endless(e2m1), 6, crest, 1.5)
        return float_ - signal_to_noise(integers(), 8, crest, 1.5)

    yield Figure("numbers rounded to 4 bits, integers to 8", 2.04, crossover(rounded), 0.02)
    yield Figure(
        "MXFP8: signal to noise, dB", 31.5, signal_to_noise(endless(e4m3), 448, 6, 1.5), 0.01
    )


def harmonic_sum(name: str) -> tuple[float, int]:
    """Returns the sum of ``1/k`` in a format's arithmetic, and its first term without effect."""
    total, k = 0.0, 0
    while True:
        k += 1
        term = float(sw.round_to(np.float32(1) / np.float32(k), name))
        new = float(sw.round_to(np.float32(total + term), name))
        if new == total:
            return total, k
        total = new


def harmonic() -> Iterator[Figure]:
    """Higham and Pranesh, "Simulating low precision floating-point arithmetic" (2019)."""
    for name, total, terms in (("bf16", 5.0625, 65), ("fp16", 7.0859, 513)):
        ours, count = harmonic_sum(name)
        yield Figure(f"harmonic sum in {name}", total, ours, 1e-5)
        yield Figure(f"harmonic sum in {name}: terms", terms, count, 0)


def unit_scaling() -> Iterator[Figure]:
    """Unit scaling (arXiv 2303.11257): standard deviations of GELU and of its gradient."""
    x = jnp.linspace(-8, 8, 32_001, dtype=jnp.float32)
    weight = np.exp(-(np.asarray(x, np.float64) ** 2) / 2)
    weight /= weight.sum()
    gelu = np.asarray(sw.scaled.gelu(ScaledArray(x), approximate=False).value(), np.float64)
    slope = np.asarray(
        jax.vmap(jax.grad(lambda x: sw.scaled.gelu(ScaledArray(x)).value()))(x), np.float64
    )
    mean = np.sum(weight * gelu)
    yield Figure(
        "GELU of normal numbers: deviation",
        0.588,
        math.sqrt(np.sum(weight * gelu**2) - mean**2),
        0.002,
    )
    yield Figure(
        "its gradient: root mean square", 0.675, math.sqrt(np.sum(weight * slope**2)), 0.002
    )


def requantised(size: int = SIZE) -> Iterator[Figure]:
    """E4M3 blocks with float32 scales stored again with powers of two (DeepSeek's checkpoints)."""
    x = normal(5, size, size)
    blocks = BlockFormat("fp8", sw.format("e4m3fn"), scale=sw.format("fp32"), size=128)
    first = quantize(x, blocks).value()
    second = quantize(first, replace(blocks, name="e8m0", scale=E8M0), scaling=sw.Mx("rceil"))
    yield Figure(
        "E4M3 blocks to E8M0 scales: relative error",
        0.0265,
        math.sqrt(squared_error(first, second) / 1e3),
        0.02,
    )


GROUPS: dict[str, Callable[..., Iterator[Figure]]] = {
    f.__name__: f for f in (quartet2, averages, crest_factors, harmonic, unit_scaling, requantised)
}


def main(names: list[str]) -> int:
    failed = 0
    for name in names or GROUPS:
        print((GROUPS[name].__doc__ or "").splitlines()[0])
        for figure in GROUPS[name]():
            mark = "" if figure.agrees else "  differs"
            failed += not figure.agrees
            print(
                f"  {figure.name:<52} published {figure.published:<8g} ours {figure.ours:.5g}{mark}"
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
