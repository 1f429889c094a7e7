"""Linear algebra."""

import jax
import jax.numpy as jnp

from failures.programs import failing, normal, uniform


@failing(
    "https://github.com/pykalman/pykalman/pull/211", "bf16", "cancellation",
    "corrected = covariance - gain @ covariance", "gain = covariance / (covariance + noise)",
    args=lambda: (jnp.float32([[900.0]]), jnp.float32([[0.25]])), limit=0.2,
)  # fmt: skip
def corrected_covariance(covariance, noise):
    gain = covariance / (covariance + noise)
    corrected = covariance - gain @ covariance
    return corrected


def corrected_covariance_fixed(covariance, noise):
    return covariance / (covariance + noise) * noise


@failing(
    "https://github.com/acts-project/traccc/issues/975",
    "float32",
    "cancellation precision",
    "filtered = (jnp.eye(2) - gain @ observe) @ covariance",
    "gain = covariance @ observe.T / innovation",
    "innovation = observe @ covariance @ observe.T + noise",
    args=lambda: (jnp.float32([[4e5, 1.2e5], [1.2e5, 9e5]]), jnp.float32(1e-3)),
)
def gain_update(covariance, noise):
    observe = jnp.array([[1.0, 0.5]])
    innovation = observe @ covariance @ observe.T + noise
    gain = covariance @ observe.T / innovation
    filtered = (jnp.eye(2) - gain @ observe) @ covariance
    return (observe @ filtered @ observe.T)[0, 0]


@failing(
    "https://github.com/jax-ml/jax/issues/13105",
    "float32",
    "cancellation precision",
    "gram = design.T @ design",
    "moments = design.T @ y",
    "slope = n * moments[1] - gram[0, 1] * moments[0]",
    "gram[0, 0] * gram[1, 1] - gram[0, 1] ** 2",
    args=lambda: (20000.0 + jnp.arange(64.0), normal(64, scale=0.3)),
)
def normal_equations(x, noise):
    """Fits a line by the normal equations in closed form."""
    y = 0.5 * (x - 20000.0) + noise
    design = jnp.stack([jnp.ones_like(x), x], axis=-1)
    gram = design.T @ design
    moments = design.T @ y
    n = gram[0, 0]
    slope = n * moments[1] - gram[0, 1] * moments[0]
    return slope / (gram[0, 0] * gram[1, 1] - gram[0, 1] ** 2)


def normal_equations_fixed(x, noise):
    y = 0.5 * (x - 20000.0) + noise
    centred = x - jnp.mean(x)
    return jnp.sum(centred * y) / jnp.sum(centred**2)


@failing(
    "https://github.com/TomMaullin/BLMM/issues/10", "float32", "overflow nan",
    "volume = jnp.prod(diagonal)", "return 2.0 * jnp.log(volume)",
    args=lambda: (uniform(64, low=20.0, high=60.0),),
)  # fmt: skip
def log_determinant(diagonal):
    volume = jnp.prod(diagonal)
    return 2.0 * jnp.log(volume)


def log_determinant_fixed(diagonal):
    return 2.0 * jnp.sum(jnp.log(diagonal))


@failing(
    "https://github.com/tky823/ssspy/issues/77", "fp16", "underflow nan overflow",
    "product = product * pivot",
    args=lambda: (uniform(40, low=0.3, high=0.8),),
)  # fmt: skip
def demixing_volume(pivots):
    def body(product, pivot):
        product = product * pivot
        return product, None

    product, _ = jax.lax.scan(body, jnp.ones((), pivots.dtype), pivots)
    return -jnp.log(product)


def demixing_volume_fixed(pivots):
    return -jnp.sum(jnp.log(pivots))


@failing(
    "https://github.com/JuliaSmoothOptimizers/Krylov.jl/issues/968",
    "fp16",
    "overflow nan",
    "squared = jnp.vdot(residual, residual)",
    "curvature = jnp.vdot(direction, operator @ direction)",
    args=lambda: (
        4.0 * jnp.eye(24) + jnp.eye(24, k=1) + jnp.eye(24, k=-1),
        40.0 * jnp.arange(1.0, 25.0),
    ),
)
def conjugate_gradient_step(operator, b):
    residual = direction = b
    squared = jnp.vdot(residual, residual)
    curvature = jnp.vdot(direction, operator @ direction)
    return direction * (squared / curvature)


def conjugate_gradient_step_fixed(operator, b):
    size = jnp.max(jnp.abs(b))
    direction = b / size
    step = jnp.vdot(direction, direction) / jnp.vdot(direction, operator @ direction)
    return direction * step * size


@failing(
    "https://github.com/deepspeedai/DeepSpeed/pull/8533",
    "fp16",
    "overflow nan",
    "size = jnp.sqrt(jnp.sum(gradient * gradient))",
    args=lambda: (normal(12, 16, scale=400.0),),
)
def newton_schulz(gradient):
    size = jnp.sqrt(jnp.sum(gradient * gradient))
    x = gradient / size
    for _ in range(3):
        gram = x @ x.T
        x = 1.5 * x - 0.5 * gram @ x
    return x


def newton_schulz_fixed(gradient):
    small = gradient / jnp.max(jnp.abs(gradient))
    x = small / jnp.sqrt(jnp.sum(small * small))
    for _ in range(3):
        x = 1.5 * x - 0.5 * (x @ x.T) @ x
    return x


@failing(
    "https://github.com/lattice/quda/issues/114", "bf16", "swamping",
    "solution = solution + rate * residual",
    args=lambda: (8.0 + uniform(16, 16, seed=2), 3.0 + uniform(16), 3.0 + uniform(16, seed=1)),
    steps=60, change=True,
)  # fmt: skip
def relaxation(solution, b, scale):
    rate = 0.002
    residual = b[None, :] - solution
    solution = solution + rate * residual
    return solution, jnp.sum(scale)


@failing(
    "https://github.com/GPflow/GPflow/issues/900",
    "float32",
    "cancellation precision nan",
    "pivot = kernel[1, 1] - kernel[0, 1] ** 2 / kernel[0, 0]",
    "kernel = jnp.exp(-0.5 * gaps**2 / 4.0)",
    args=lambda: (jnp.float32([0.3, 0.3006, 1.0]), jnp.float32([0.1, 0.4, 0.2])),
)
def kernel_pivot(x, y):
    """The second pivot of the Cholesky factor of a kernel of two close points."""
    gaps = x[:, None] - x[None, :]
    kernel = jnp.exp(-0.5 * gaps**2 / 4.0)
    pivot = kernel[1, 1] - kernel[0, 1] ** 2 / kernel[0, 0]
    return (y[1] - kernel[0, 1] * y[0]) / pivot


def kernel_pivot_fixed(x, y):
    gap = x[1] - x[0]
    pivot = -jnp.expm1(-(gap**2) / 4.0)
    return (y[1] - jnp.exp(-0.5 * gap**2 / 4.0) * y[0]) / pivot
