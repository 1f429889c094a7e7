"""An audit releases its compiled code, so that a notebook can make any number of them."""

import subprocess
import sys

import pytest

# Another function each time, of the same shapes: a shape that is new to JAX's own functions
# (`jnp.ones`) would be compiled and kept by JAX.
AUDITS = """
import gc, sys
import jax, jax.numpy as jnp
import scalewise as sw

w, x = jnp.full((12, 9), 0.5), jnp.full((4, 12), 0.5)
for n in range(int(sys.argv[2])):
    def step(w, x, n=n):
        def loss(w):
            return jnp.mean(jnp.square(jnp.tanh(x @ w) * (300.0 + n)) @ w.T)
        return w - 0.1 * jax.grad(loss)(w)
    sw.audit(step, sys.argv[1], trials=4)(w, x)
    gc.collect()
    if n in (0, int(sys.argv[2]) - 1):
        print(sum(1 for _ in open("/proc/self/maps")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts mappings in /proc")
@pytest.mark.parametrize(("low", "audits"), [("fp16", 8), ("fp8", 5)])
@pytest.mark.thorough
def test_mappings_stay_within_three_for_each_audit(low, audits):
    command = [sys.executable, "-c", AUDITS, low, str(audits)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    first, last = map(int, done.stdout.split())
    assert last - first <= 3 * audits
