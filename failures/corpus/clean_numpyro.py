"""Healthy programs after numpyro's public examples."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import log_density

from failures.programs import clean, integers, normal, uniform

EXAMPLES = "https://num.pyro.ai/en/stable/"


def density(model, params, *args):
    return log_density(model, args, {}, params)[0]


def schools(effects, errors):
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(mean, 3.0))
        numpyro.sample("seen", dist.Normal(theta, errors), obs=effects)


@clean(EXAMPLES + "getting_started.html", "float32",
       lambda: ({"mean": jnp.float32(4.0), "theta": normal(8, mean=4.0)},
                normal(8, seed=1, scale=10.0), uniform(8, low=9.0, high=18.0)))  # fmt: skip
def eight_schools(params, effects, errors):
    return density(schools, params, effects, errors)


def logistic(x, y):
    w = numpyro.sample("w", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


@clean(
    EXAMPLES + "examples/covtype.html",
    "float32",
    lambda: ({"w": normal(4)}, normal(32, 4, seed=1), jnp.float32(integers(32, high=2))),
)
def logistic_gradient(params, x, y):
    return jax.grad(lambda p: density(logistic, p, x, y))(params)


def baseball(at_bats, hits):
    phi = numpyro.sample("phi", dist.Normal(0.0, 1.0).expand([6]).to_event(1))
    numpyro.sample("hits", dist.Binomial(at_bats, logits=phi), obs=hits)


@clean(
    EXAMPLES + "examples/baseball.html",
    "float32",
    lambda: ({"phi": normal(6, scale=0.5)}, jnp.full(6, 45.0), jnp.float32(integers(6, high=30))),
)
def batting(params, at_bats, hits):
    return density(baseball, params, at_bats, hits)


def regression(x, y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.Exponential(1.0))
    numpyro.sample("y", dist.Normal(slope * x, scale), obs=y)


@clean(
    EXAMPLES + "tutorials/bayesian_regression.html",
    "bf16",
    lambda: (
        {"slope": jnp.float32(0.5), "scale": jnp.float32(0.75)},
        normal(16),
        normal(16, seed=1),
    ),
)
def line_density(params, x, y):
    return density(regression, params, x, y)
