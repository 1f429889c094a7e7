"""An audit releases its compiled code, so that a notebook can make any number of them."""

import subprocess
import sys

import pytest

# Another function each time, of the same shapes: a shape that is new to JAX's own functions
# (`jnp.ones`) would be compiled and kept by JAX. glibc keeps memory that was freed, most after an
# audit that tried fixes, which holds hundreds of compiled programs at once: it is returned first.
AUDITS = """
import ctypes, gc, resource, sys
import jax, jax.numpy as jnp
import scalewise as sw

w, x = jnp.full((12, 9), 0.5), jnp.full((4, 12), 0.5)
count, *lows = int(sys.argv[1]), *sys.argv[2:]
for n in range(count):
    def step(w, x, n=n):
        def loss(w):
            return jnp.mean(jnp.square(jnp.tanh(x @ w) * (300.0 + n)) @ w.T)
        return w - 0.1 * jax.grad(loss)(w)
    sw.audit(step, lows[n % len(lows)], trials=4)(w, x)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(open("/proc/self/statm").read().split()[1])
    print(sum(1 for _ in open("/proc/self/maps")), pages * resource.getpagesize() >> 20)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts mappings in /proc")


def audited(count, *lows):
    """Returns the process's mappings and its memory in MB after each audit."""
    command = [sys.executable, "-c", AUDITS, str(count), *lows]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("low", "audits"), [("fp16", 5), ("fp8", 5)])
@pytest.mark.slow
def test_mappings_stay_within_three_for_each_audit(low, audits):
    states = audited(audits, low)
    assert states[-1][0] - states[0][0] <= 3 * audits


@pytest.mark.slow
def test_a_hundred_audits_stay_within_300_mappings_and_300_mb():
    states = audited(100, "fp16", "fp8", "fp16_every_op", "mxfp8")
    assert len(states) == 100
    assert max(m for m, _ in states) - states[0][0] <= 300
    assert max(mb for _, mb in states) - states[0][1] <= 300
