"""Additions to elements that indices choose round one by one, as XLA's kernels do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import arrays
import scalewise as sw
from cases import nightly

SEVERAL = np.array([3, 0, 3, 1, 3, 3, 7, 0, -1])
PAIRS = np.array([[0, 1], [2, 3], [0, 1], [4, 4], [0, 1]])


def normal(*shape):
    return arrays.normal(sum(shape), shape) * 3


def window(x, y):
    """Windows of two rows, of which the last reaches beyond the end."""
    dimensions = jax.lax.ScatterDimensionNumbers((1, 2), (), (0,))
    return jax.lax.scatter_add(x, jnp.array([[0], [1], [0], [4]]), y, dimensions, mode="clip")


PROGRAMS = {
    "rows": (lambda x, y: x.at[SEVERAL].add(y), normal(5, 4), normal(9, 4)),
    "differences": (lambda x, y: x.at[SEVERAL].subtract(y), normal(5, 4), normal(9, 4)),
    "clipped": (lambda x, y: x.at[SEVERAL].add(y, mode="clip"), normal(5, 4), normal(9, 4)),
    "elements": (lambda x, y: x.at[tuple(PAIRS.T)].add(y), normal(5, 5), normal(5)),
    "columns": (lambda x, y: x.at[:, SEVERAL].add(y), normal(3, 5), normal(3, 9)),
    "windows": (window, normal(5, 3), normal(4, 2, 3)),
    "segments": (lambda y: jax.ops.segment_sum(y, abs(SEVERAL), 8), normal(9, 2)),
    "batched": (jax.vmap(lambda x, y, i: x.at[i].add(y)), normal(3, 5), normal(3, 6),
                np.arange(18).reshape(3, 6) % 5),
    "gradient": (jax.grad(lambda x: (jnp.sin(x[SEVERAL]) * 3).sum()), normal(5, 4)),
    "no update": (lambda x, y: x.at[SEVERAL[:0]].add(y), normal(5), normal(0)),
}  # fmt: skip


@pytest.mark.parametrize("fmt", ["bfloat16", *nightly(["float16"])])
def test_bits_are_those_of_the_dtype(fmt):
    given = {
        name: [jnp.asarray(x).astype(fmt) if x.dtype == np.float32 else x for x in arguments]
        for name, (_, *arguments) in PROGRAMS.items()
    }
    every = {name: lambda x, f=f: sw.emulate(f, fmt)(*x) for name, (f, *_) in PROGRAMS.items()}
    got = jax.jit(lambda given: {name: f(given[name]) for name, f in every.items()})(given)
    for name, (f, *_) in PROGRAMS.items():
        np.testing.assert_array_equal(got[name], f(*given[name]), err_msg=name)


@pytest.mark.parametrize(
    ("fmt", "end", "n"),
    [("e4m3fn", 16, 64), *nightly([("fp16", 2048, 3000), ("bf16", 256, 3000)])],
)
def test_counts_stop_at_the_formats_last_odd_number(fmt, end, n):
    def count(x):
        return jnp.zeros(2).at[jnp.zeros(n, int)].add(x)

    np.testing.assert_array_equal(sw.emulate(count, fmt)(jnp.ones(n)), [end, 0])
    report = sw.audit(count, fmt)(jnp.ones(n))
    (finding,) = report.findings
    assert (finding.kind, finding.primitive) == ("swamping", "scatter-add")
    assert finding.evidence.startswith("the only sum has lost additions")
    assert float(report.error) > 0.3
    assert float(report.error_fixed) < 0.01


def test_the_few_sums_that_lose_much_are_seen():
    """They are most of the result's norm, but few of its numbers."""
    index = np.arange(6000) % 5000
    index[::2] = 777

    def count(x):
        return jnp.zeros(5000).at[index].add(x)

    (finding,) = sw.audit(count, "bf16")(jnp.ones(6000)).findings
    assert (finding.kind, finding.primitive) == ("swamping", "scatter-add")
    assert "1 of 1,024 sums has lost additions" in finding.evidence


@pytest.mark.parametrize("method", ["add", "subtract"])
def test_a_policy_adds_in_float32(method):
    def count(x):
        return getattr(jnp.zeros(2, x.dtype).at[jnp.zeros(300, int)], method)(x)

    ones = jnp.ones(300, jnp.bfloat16)
    assert abs(count(ones)[0]) == 256
    assert abs(sw.autocast(count, "bf16")(ones)[0]) == 300
