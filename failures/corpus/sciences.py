"""Finance, climate, chemistry, populations, astronomy: formulas as their textbooks write them."""

import jax
import jax.numpy as jnp
import numpy as np

from failures.programs import WRITTEN, failing, integers, normal, uniform


@failing(
    WRITTEN, "bf16", "cancellation",
    "return (discount[:-1] / discount[1:] - 1.0) / (times[1:] - times[:-1])",
    "discount = jnp.exp(-rates * times)",
    args=lambda: (0.0234375 + 0.0009765625 * np.arange(16, dtype=np.float32),
                  np.float32([0.25 * i for i in range(16)])),
)  # fmt: skip
def forward_rates(rates, times):
    """Rates between two dates, of a curve of rates from the first date on."""
    discount = jnp.exp(-rates * times)
    return (discount[:-1] / discount[1:] - 1.0) / (times[1:] - times[:-1])


def forward_rates_fixed(rates, times):
    grown = rates[1:] * (times[1:] - times[:-1]) + (rates[1:] - rates[:-1]) * times[:-1]
    return jnp.expm1(grown) / (times[1:] - times[:-1])


@failing(
    WRITTEN, "float32", "cancellation",
    "return (1.0 - (1.0 + rate) ** -months) / rate",
    args=lambda: (uniform(24, low=1e-6, high=1e-5), np.float32(36.0)),
)  # fmt: skip
def annuity(rate, months):
    """The present value of monthly payments of 1, at nearly no interest."""
    return (1.0 - (1.0 + rate) ** -months) / rate


def annuity_fixed(rate, months):
    return -jnp.expm1(-months * jnp.log1p(rate)) / rate


@failing(
    WRITTEN, "fp16", "overflow nan",
    "pressure = 101325.0 * jnp.exp(-height / 8400.0)",
    "return 0.622 * vapour / (pressure - vapour)",
    args=lambda: (uniform(24, low=50.0, high=4000.0), uniform(24, seed=1, low=-10.0, high=25.0)),
)  # fmt: skip
def mixing_ratio(height, celsius):
    """The mass of vapour in saturated air, in kilograms per kilogram; pressures in pascals."""
    pressure = 101325.0 * jnp.exp(-height / 8400.0)
    vapour = 611.2 * jnp.exp(17.67 * celsius / (celsius + 243.5))
    return 0.622 * vapour / (pressure - vapour)


def mixing_ratio_fixed(height, celsius):
    pressure = 1013.25 * jnp.exp(-height / 8400.0)
    vapour = 6.112 * jnp.exp(17.67 * celsius / (celsius + 243.5))
    return 0.622 * vapour / (pressure - vapour)


@failing(
    WRITTEN, "fp16", "underflow overflow nan",
    "return stability / shear**2",
    args=lambda: (uniform(24, low=0.002, high=0.01), uniform(24, seed=1, low=1e-4, high=4e-4)),
)  # fmt: skip
def richardson_number(warming, shear):
    """Stability of stratified water beside its shear, both per second squared."""
    stability = 9.81 / 290.0 * warming
    return stability / shear**2


def richardson_number_fixed(warming, shear):
    stability = 9.81 / 290.0 * warming
    return stability / shear / shear


@failing(
    WRITTEN, "fp16", "overflow nan",
    "rate = 1e13 * jnp.exp(-energy / (8.314 * temperature))",
    args=lambda: (uniform(24, low=6.0e4, high=6.5e4), uniform(24, seed=1, low=280.0, high=320.0)),
)  # fmt: skip
def reaction_rates(energy, temperature):
    """The decay within a second, by Arrhenius' law."""
    rate = 1e13 * jnp.exp(-energy / (8.314 * temperature))
    return 1.0 - jnp.exp(-0.01 * rate)


def reaction_rates_fixed(energy, temperature):
    rate = jnp.exp(29.9336 - energy / (8.314 * temperature))
    return -jnp.expm1(-0.01 * rate)


@failing(
    WRITTEN, "float32", "underflow overflow",
    "return 6.62607e-34 / jnp.sqrt(2.0 * jnp.pi * mass * 1.380649e-23 * temperature)",
    args=lambda: (uniform(16, low=2e-27, high=3e-25), uniform(16, seed=1, low=100.0, high=900.0)),
)  # fmt: skip
def thermal_wavelength(mass, temperature):
    """De Broglie's wavelength of atoms in a gas, in SI units."""
    return 6.62607e-34 / jnp.sqrt(2.0 * jnp.pi * mass * 1.380649e-23 * temperature)


def thermal_wavelength_fixed(mass, temperature):
    momentum = jnp.sqrt(2.0 * jnp.pi * mass) * jnp.sqrt(1.380649e-23 * temperature)
    return 6.62607e-34 / momentum


@failing(
    WRITTEN, "bf16", "swamping precision",
    "susceptible = susceptible - caught",
    args=lambda: (0.75 + 0.0078125 * np.arange(16, dtype=np.float32),
                  np.full(16, 2.0**-11, np.float32)),
    change=True,
)  # fmt: skip
def epidemic(susceptible, infected):
    """The first hours of an epidemic."""

    def hour(state, _):
        susceptible, infected = state
        caught = 0.25 * susceptible * infected
        susceptible = susceptible - caught
        infected = infected + caught - 0.125 * infected
        return (susceptible, infected), None

    return jax.lax.scan(hour, (susceptible, infected), None, length=24)[0][0]


@failing(
    WRITTEN, "fp16", "underflow nan overflow",
    "partial = partial * (leaf @ change.T)", "return jnp.log(jnp.sum(0.25 * partial, axis=-1))",
    args=lambda: (normal(24, 12, 4, scale=0.5), normal(4, 4, seed=1, scale=0.3)),
)  # fmt: skip
def tree_likelihood(observed, rates):
    """Felsenstein's pruning of a caterpillar tree: the likelihood of a site, of 24 leaves."""
    change = jax.nn.softmax(rates + 1.5 * jnp.eye(4, dtype=rates.dtype))

    def join(partial, leaf):
        partial = partial * (leaf @ change.T)
        return partial, None

    leaves = jax.nn.softmax(observed)
    partial = jax.lax.scan(join, jnp.ones_like(leaves[0]), leaves)[0]
    return jnp.log(jnp.sum(0.25 * partial, axis=-1))


def tree_likelihood_fixed(observed, rates):
    change = jax.nn.softmax(rates + 1.5 * jnp.eye(4, dtype=rates.dtype))

    def join(state, leaf):
        partial, scale = state
        partial = partial * (leaf @ change.T)
        largest = jnp.max(partial, axis=-1)
        return (partial / largest[:, None], scale + jnp.log(largest)), None

    leaves = jax.nn.softmax(observed)
    first = jnp.ones_like(leaves[0]), jnp.zeros_like(leaves[0, :, 0])
    partial, scale = jax.lax.scan(join, first, leaves)[0]
    return scale + jnp.log(jnp.sum(0.25 * partial, axis=-1))


@failing(
    WRITTEN, "bf16", "cancellation",
    "return 1.0 / (1.0 / focal - 1.0 / distance)",
    args=lambda: (1.0 + 0.0625 * np.arange(14, dtype=np.float32),
                  1.0625 + 0.0625 * np.arange(14, dtype=np.float32)),
)  # fmt: skip
def thin_lens(focal, distance):
    """Where a lens shows what is just beyond its focus."""
    return 1.0 / (1.0 / focal - 1.0 / distance)


def thin_lens_fixed(focal, distance):
    return focal * distance / (distance - focal)


@failing(
    WRITTEN, "fp16", "underflow overflow nan",
    "flux = jnp.sum(10.0 ** (-0.4 * magnitudes), axis=-1)",
    args=lambda: (normal(8, 40, mean=23.5),),
)  # fmt: skip
def cluster_magnitude(magnitudes):
    """How bright all galaxies of a cluster are together."""
    flux = jnp.sum(10.0 ** (-0.4 * magnitudes), axis=-1)
    return -2.5 * jnp.log10(flux)


def cluster_magnitude_fixed(magnitudes):
    brightest = jnp.min(magnitudes, axis=-1)
    flux = jnp.sum(10.0 ** (-0.4 * (magnitudes - brightest[:, None])), axis=-1)
    return brightest - 2.5 * jnp.log10(flux)


@failing(
    WRITTEN, "fp16", "underflow overflow nan",
    "return -jnp.log10(1e-14 / hydrogen)",
    args=lambda: (uniform(24, low=2e-4, high=2e-2),),
)  # fmt: skip
def hydroxide_exponent(hydrogen):
    """The pOH of an acid, from its hydrogen ions."""
    return -jnp.log10(1e-14 / hydrogen)


def hydroxide_exponent_fixed(hydrogen):
    return 14.0 + jnp.log10(hydrogen)


@failing(
    WRITTEN, "float32", "cancellation",
    "return 1.0 / (distance - radius) ** 2 - 1.0 / distance**2",
    args=lambda: (uniform(24, low=300.0, high=600.0), uniform(24, seed=1, low=0.01, high=0.03)),
)  # fmt: skip
def tidal_pull(distance, radius):
    """How much more the near side of a body is pulled than its centre."""
    return 1.0 / (distance - radius) ** 2 - 1.0 / distance**2


def tidal_pull_fixed(distance, radius):
    return radius * (2.0 * distance - radius) / (distance * (distance - radius)) ** 2


@failing(
    WRITTEN, "float32", "cancellation",
    "return 1.0 / jnp.sqrt(1.0 - 2.95 * mass / radius) - 1.0",
    args=lambda: (uniform(24, low=0.5, high=2.0), uniform(24, seed=1, low=2e5, high=9e5)),
)  # fmt: skip
def redshift_of_stars(mass, radius):
    """The gravitational redshift; masses of the Sun and kilometres."""
    return 1.0 / jnp.sqrt(1.0 - 2.95 * mass / radius) - 1.0


def redshift_of_stars_fixed(mass, radius):
    return jnp.expm1(-0.5 * jnp.log1p(-2.95 * mass / radius))


@failing(
    WRITTEN, "fp16", "overflow nan",
    "weighted = jnp.sum(ranks * jnp.sort(incomes), axis=-1)",
    "return 2.0 * weighted / (400.0 * jnp.sum(incomes, axis=-1)) - 401.0 / 400.0",
    args=lambda: (50.0 * np.exp(0.5 * normal(4, 400)),),
)  # fmt: skip
def gini_coefficient(incomes):
    ranks = jnp.arange(1.0, 401.0, dtype=incomes.dtype)
    weighted = jnp.sum(ranks * jnp.sort(incomes), axis=-1)
    return 2.0 * weighted / (400.0 * jnp.sum(incomes, axis=-1)) - 401.0 / 400.0


def gini_coefficient_fixed(incomes):
    ranks = jnp.arange(1.0, 401.0, dtype=incomes.dtype) / 400.0
    mean = jnp.mean(incomes, axis=-1, keepdims=True)
    return 2.0 * jnp.mean(ranks * (jnp.sort(incomes) / mean), axis=-1) - 401.0 / 400.0


@failing(
    WRITTEN, "fp16", "overflow nan",
    "shares = counts / jnp.sum(counts, axis=-1, keepdims=True)",
    args=lambda: (1000.0 + 100.0 * integers(6, 64, high=60).astype(np.float32),),
)  # fmt: skip
def diversity_of_species(counts):
    """Shannon's index, of counted individuals."""
    shares = counts / jnp.sum(counts, axis=-1, keepdims=True)
    return -jnp.sum(shares * jnp.log(shares), axis=-1)


def diversity_of_species_fixed(counts):
    counts = counts / jnp.max(counts, axis=-1, keepdims=True)
    shares = counts / jnp.sum(counts, axis=-1, keepdims=True)
    return -jnp.sum(shares * jnp.log(shares), axis=-1)


@failing(
    WRITTEN, "fp16", "overflow nan",
    "powers = x[:, None] ** jnp.arange(4)", "gram = powers.T @ powers",
    "found = jnp.linalg.solve(gram, powers.T @ y)",
    args=lambda: (np.linspace(1.0, 30.0, 32, dtype=np.float32), 30.0 * normal(32, seed=1)),
)  # fmt: skip
def cubic_trend(x, y):
    """A polynomial by least squares, and its values."""
    powers = x[:, None] ** jnp.arange(4)
    gram = powers.T @ powers
    found = jnp.linalg.solve(gram, powers.T @ y)
    return powers @ found


def cubic_trend_fixed(x, y):
    centred = (x - 15.5) / 14.5
    one = jnp.ones_like(x)
    square = 1.5 * centred**2 - 0.5
    cube = centred * (2.5 * centred**2 - 1.5)
    powers = jnp.stack([one, centred, square, cube], axis=-1)
    return powers @ jnp.linalg.solve(powers.T @ powers, powers.T @ y)


@failing(
    WRITTEN, "bf16", "swamping precision",
    "return ratings + 10.0 * (score - expected)",
    args=lambda: (1520.0 + 8.0 * np.arange(24, dtype=np.float32), 1600.0 + 8.0 * integers(24),
                  np.float32(integers(24, seed=1, high=2))),
    change=True,
)  # fmt: skip
def elo_ratings(ratings, others, score):
    """Ratings of players after a game; the expected score is near the one reached."""
    expected = 1.0 / (1.0 + 10.0 ** ((others - ratings) / 400.0))
    return ratings + 10.0 * (score - expected)
