"""Settings of tests that run other people's libraries."""

import jax
import pytest


@pytest.fixture
def users_promotion():
    """optax, Orbax and users' programs promote as they like."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
