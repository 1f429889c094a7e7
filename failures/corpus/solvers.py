"""Solvers: differential equations, filters, decompositions, recurrences, optimizers."""

import jax
import jax.numpy as jnp
import optax

from failures.programs import failing, normal, uniform


@failing(
    "https://docs.kidger.site/diffrax/further_details/faq/", "float32", "cancellation",
    "error = fine - coarse", "coarse = velocity + h * slope", "slope = -jnp.sin(position)",
    "fine = velocity + 0.5 * h * (slope + middle)", "middle = -jnp.sin(",
    args=lambda: (uniform(8, low=0.5, high=1.5), uniform(8, seed=1, low=0.5, high=1.5)),
)  # fmt: skip
def step_control(position, velocity):
    """The step size from the difference of an Euler-Heun pair, for a small step."""
    h = 1e-4
    slope = -jnp.sin(position)
    middle = -jnp.sin(position + h * velocity)
    coarse = velocity + h * slope
    fine = velocity + 0.5 * h * (slope + middle)
    error = fine - coarse
    return h * jnp.sqrt(1e-6 / jnp.abs(error))


def step_control_fixed(position, velocity):
    h = 1e-4
    shift = h * velocity
    change = 2.0 * jnp.cos(position + 0.5 * shift) * jnp.sin(0.5 * shift)
    return h * jnp.sqrt(1e-6 / jnp.abs(0.5 * h * change))


@failing(
    "https://github.com/pykalman/pykalman/pull/211", "float32", "cancellation",
    "after = before - gain @ observe @ before", "gain = jnp.linalg.solve(within,",
    "within = observe @ before",
    args=lambda: (spread(4), normal(2, 4, seed=1),),
)  # fmt: skip
def kalman_filter_step(before, observe):
    """The covariance after a very precise measurement."""
    within = observe @ before @ observe.T + 1e-6 * jnp.eye(2, dtype=before.dtype)
    gain = jnp.linalg.solve(within, observe @ before).T
    after = before - gain @ observe @ before
    return observe @ after @ observe.T


def spread(size):
    a = normal(size, size)
    return a @ a.T + jnp.eye(size, dtype=a.dtype)


def kalman_filter_step_fixed(before, observe):
    """H P H' (H P H' + R)^-1 R, without the difference."""
    noise = 1e-6 * jnp.eye(2, dtype=before.dtype)
    inner = observe @ before @ observe.T
    return inner @ jnp.linalg.solve(inner + noise, noise)


@failing(
    "https://arxiv.org/abs/2303.06349", "bf16", "cancellation precision",
    "radius = jnp.exp(-jnp.exp(log_rate))", "gain = jnp.sqrt(1.0 - radius**2)",
    args=lambda: (uniform(16, low=-7.0, high=-5.5), normal(40, 16)),
)  # fmt: skip
def linear_recurrent_unit(log_rate, inputs):
    radius = jnp.exp(-jnp.exp(log_rate))
    gain = jnp.sqrt(1.0 - radius**2)

    def body(state, x):
        state = radius * state + gain * x
        return state, state

    return jax.lax.scan(body, jnp.zeros(16, inputs.dtype), inputs)[1]


@failing(
    "https://doi.org/10.1137/1.9780898718027", "float32",
    "cancellation precision",
    "v = v - jnp.dot(q, a[:, i]) * q", "columns.append(v / jnp.sqrt(jnp.dot(v, v)))",
    args=lambda: (nearly_dependent(3e-4),),
)  # fmt: skip
def gram_schmidt(a):
    """Q' Q - I after classical Gram-Schmidt, of columns that are nearly dependent."""
    columns = []
    for i in range(a.shape[1]):
        v = a[:, i]
        for q in columns:
            v = v - jnp.dot(q, a[:, i]) * q
        columns.append(v / jnp.sqrt(jnp.dot(v, v)))
    basis = jnp.stack(columns, axis=1)
    return basis


def nearly_dependent(small):
    return jnp.ones((6, 4), jnp.float32) + small * normal(6, 4)


def gram_schmidt_fixed(a):
    return jnp.linalg.qr(a)[0] * jnp.sign(jnp.diag(jnp.linalg.qr(a)[1]))


@failing(
    "https://arxiv.org/abs/2010.07468", "fp16", "underflow nan overflow",
    "updates, state = optimizer.update(gradients, state, params)",
    args=lambda: ({"w": normal(6, 4)}, normal(32, 6, seed=1, scale=0.005),
                  normal(32, 4, seed=2, scale=0.02)),
)  # fmt: skip
def belief_update(params, x, y):
    """AdaBelief, whose epsilons of 1e-16 are zero in FP16."""
    optimizer = optax.adabelief(1e-2)
    state = optimizer.init(params)
    gradients = jax.grad(lambda p: jnp.mean((x @ p["w"] - y) ** 2))(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates)


@failing(
    "https://arxiv.org/abs/1804.04235", "fp16", "underflow nan overflow",
    "squares = gradient**2 + 1e-30", "rows = jnp.mean(squares, axis=1, keepdims=True)",
    "columns = jnp.mean(squares, axis=0, keepdims=True)", "second = rows * columns",
    "return gradient / jnp.sqrt(second)",
    args=lambda: (normal(8, 12, scale=1e-5),),
)  # fmt: skip
def factored_moments(gradient):
    """Adafactor's update from the means of rows and columns."""
    squares = gradient**2 + 1e-30
    rows = jnp.mean(squares, axis=1, keepdims=True)
    columns = jnp.mean(squares, axis=0, keepdims=True)
    second = rows * columns / jnp.mean(rows)
    return gradient / jnp.sqrt(second)


def factored_moments_fixed(gradient):
    """Of a gradient divided by its largest number."""
    largest = jnp.max(jnp.abs(gradient))
    gradient = gradient / largest
    squares = gradient**2
    rows = jnp.mean(squares, axis=1, keepdims=True)
    columns = jnp.mean(squares, axis=0, keepdims=True)
    return gradient / jnp.sqrt(rows * columns / jnp.mean(rows))


@failing(
    "https://arxiv.org/abs/1802.09568", "bf16", "precision cancellation nan",
    "statistics = gradient @ gradient.T", "return root @ gradient",
    "values, vectors = jnp.linalg.eigh(statistics)", "root = vectors * values**-0.25",
    args=lambda: (graded_rows(6, 10),),
)  # fmt: skip
def preconditioned(gradient):
    """Shampoo's inverse root of the statistics, of rows that are nearly the same."""
    statistics = gradient @ gradient.T
    values, vectors = jnp.linalg.eigh(statistics)
    root = vectors * values**-0.25 @ vectors.T
    return root @ gradient


def graded_rows(rows, columns):
    shared = normal(1, columns)
    return shared + 0.06 * normal(rows, columns, seed=1)


@failing(
    "https://arxiv.org/abs/2006.10739", "bf16", "precision",
    "phase = 6.2831855 * (points @ frequencies)",
    args=lambda: (jnp.round(64.0 * uniform(32, 2)) / 64.0, jnp.round(normal(2, 24, scale=12.0)),
                  normal(48, 3, seed=2)),
)  # fmt: skip
def fourier_features(points, frequencies, w):
    phase = 6.2831855 * (points @ frequencies)
    features = jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], axis=-1)
    return features @ w


@failing(
    "https://arxiv.org/abs/1804.11188", "bf16", "swamping precision",
    "cell = keep * cell + write * jnp.tanh(x)", "keep = jax.nn.sigmoid(bias)",
    args=lambda: (jnp.full(8, 7.0), uniform(400, 8, low=0.2, high=1.0)),
)  # fmt: skip
def chrono_cell(bias, inputs):
    """A cell whose gates are set for memories of a thousand steps."""
    keep = jax.nn.sigmoid(bias)
    write = jax.nn.sigmoid(-bias)

    def body(cell, x):
        cell = keep * cell + write * jnp.tanh(x)
        return cell, None

    return jax.lax.scan(body, jnp.zeros_like(bias), inputs)[0]


@failing(
    "https://people.eecs.berkeley.edu/~wkahan/Qdrtcs.pdf", "float32", "cancellation",
    "near = (-b - jnp.sqrt(discriminant)) / (2.0 * a)",
    "discriminant = b * b - 4.0 * a * c",
    args=lambda: (uniform(12, low=0.5), -uniform(12, seed=1, low=900.0, high=2000.0),
                  uniform(12, seed=2, low=0.1)),
)  # fmt: skip
def sphere_intersection(a, b, c):
    """The nearer intersection of rays with a sphere that they start close to."""
    discriminant = b * b - 4.0 * a * c
    near = (-b - jnp.sqrt(discriminant)) / (2.0 * a)
    return near


def sphere_intersection_fixed(a, b, c):
    return 2.0 * c / (-b + jnp.sqrt(b * b - 4.0 * a * c))


@failing(
    "https://arxiv.org/abs/1710.10903", "fp16", "overflow nan",
    "raised = jnp.exp(scores)", "total = jax.ops.segment_sum(raised, targets, 40)",
    "share = raised / total[targets]",
    args=lambda: (normal(40, 8, scale=2.0), normal(8, seed=1, scale=3.0), edges(160, 40)),
)  # fmt: skip
def edges_attended(features, weight, sources):
    """Attention over the edges of a graph, each node with four."""
    targets = jnp.arange(160) // 4
    scores = jax.nn.leaky_relu((features @ weight)[sources] + (features @ weight)[targets], 0.2)
    raised = jnp.exp(scores)
    total = jax.ops.segment_sum(raised, targets, 40)
    share = raised / total[targets]
    return jax.ops.segment_sum(share[:, None] * features[sources], targets, 40)


def edges(count, nodes):
    return jnp.asarray((7 * jnp.arange(count) + 3) % nodes)


def edges_attended_fixed(features, weight, sources):
    targets = jnp.arange(160) // 4
    scores = jax.nn.leaky_relu((features @ weight)[sources] + (features @ weight)[targets], 0.2)
    raised = jnp.exp(scores - jax.ops.segment_max(scores, targets, 40)[targets])
    total = jax.ops.segment_sum(raised, targets, 40)
    share = raised / total[targets]
    return jax.ops.segment_sum(share[:, None] * features[sources], targets, 40)
