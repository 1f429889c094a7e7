"""underflow in add at transform.py:300: the constant 1e-08 flushed to zero.

Reduced by scalewise's audit to 1 of 52 operations.
The inputs are what the float32 run had there. FP16 is emulated: each
operation is computed in float32, and its result rounded by `low`.
Run this file: it prints the result in both.
"""

import jax.numpy as jnp
import numpy as np

inputs = {
    "x0": np.array([5.2360766e-10, 2.0944306e-09, 4.7124686e-09, 8.3777225e-09], np.float32),
}


def program(x0, cast):
    v0 = cast(x0 + 0.0)  # audit.md:25
    return v0


def low(x):
    return jnp.asarray(x, jnp.float32).astype(jnp.float16).astype(jnp.float32)


def wide(x):
    return jnp.asarray(x, jnp.float32)


def results():
    a = program(low(inputs['x0']), low)
    b = program(wide(inputs['x0']), wide)
    return a, b


if __name__ == "__main__":
    a, b = results()
    print("FP16:", a)
    print("float32:", b)
