"""One program computes, once for a run, all values that depend on no float, and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from arrays import normal
from programs import PROGRAMS, together
from scalewise.interpret import Interpretation, run, trace


class Told(Interpretation):
    """Uses precomputed values, and records which equations had to be computed besides."""

    inline = True

    def __init__(self):
        self.calls = 0
        self.known = {}
        self.beside: list[str] = []

    def unlifted(self, state, equation, inputs):
        if equation.path in self.known:
            return state, self.known.pop(equation.path)
        self.beside.append(equation.name)
        return super().unlifted(state, equation, inputs)

    def __call__(self, program, arrays=None):
        def call(f, *arguments):
            self.calls += 1
            return f(*arguments)

        arrays = program.arrays if arrays is None else arrays
        with jax.enable_x64(True):
            self.known = program.integers.known(arrays, call)
        return run(program, self, (), arrays)[1]


def told(f, *args):
    told, program = Told(), trace(f, Interpretation(), args, {}, name="told")
    return told, program, told(program)


@jax.custom_vjp
def taken(table, i):
    return table[jnp.clip(i * 2, 0, 3)]


taken.defvjp(
    lambda table, i: (taken(table, i), i),
    lambda i, g: (jnp.zeros(4).at[i % 4].add(g), np.zeros((), jax.dtypes.float0)),
)


def mixed(x, i, key):
    """Masks, indices, keys; through calls, custom derivatives, remat; a dead one, an output."""
    first, second = jax.random.split(key)

    @jax.remat
    def masked(x):
        mask = jax.jit(lambda n: jnp.arange(4) + n)(i)[:, None] >= jnp.arange(4)[None]
        return jnp.where(mask, x, -1.0).sum(0)

    def loss(x):
        return taken(masked(x), i) * taken(masked(x * 2.0), i + 1)

    (i * 12345).sum()
    drawn = jax.random.bits(first, (4,)) % 7 + jax.random.key_data(second)[0]
    noise = jax.random.normal(second, (4,)) + drawn.astype(jnp.float32)
    return jax.grad(loss)(x), noise, i + 1, key


def same(got, want):
    for a, b in zip(got, jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_precomputed_equations_are_all_used_and_results_are_unchanged():
    interpretation, program, outs = told(together(PROGRAMS), normal(0, (4, 4)))
    assert interpretation.known == {}
    same(outs, run(program, Interpretation(), ())[1])


def test_one_program_for_masks_indices_and_keys_of_all_bodies():
    x, key = normal(1, (4, 4)), jax.random.key(2)
    interpretation, program, outs = told(mixed, x, jnp.int32(1), key)
    assert (interpretation.calls, interpretation.known) == (1, {})
    assert interpretation.beside == []
    same(outs, run(program, Interpretation(), ())[1])
    assert {len(path) for path in program.integers.results} > {1, 2}  # in bodies, too
    new = [x * 2, jnp.int32(0), jax.random.key(3)]  # other arguments, the same program
    same(interpretation(program, new), run(program, Interpretation(), (), new)[1])
    assert interpretation.calls == 2
    assert program.integers.compute._cache_size() == 1


def test_values_from_floats_and_values_in_loops_are_not_precomputed():
    def f(x, n):
        top = jnp.argmax(x) + n  # from a float
        shift = n * 3

        def body(c, i):
            return c + x[(i + shift) % 4], (i - n) * 2

        x, ys = jax.lax.scan(body, x.sum(), jnp.arange(4) * n)
        return x, ys, top + shift, jax.lax.cond(n > 0, lambda: n * 5, lambda: n)

    x = jnp.arange(4.0)
    interpretation, program, outs = told(f, x, jnp.int32(3))
    assert all(len(path) == 1 for path in program.integers.results)
    assert interpretation.beside.count("add") >= 2  # top, and that plus shift
    assert interpretation.calls == 1
    assert interpretation.known == {}
    same(outs, run(program, Interpretation(), ())[1])


def test_callbacks_are_called_once_each_and_in_order():
    seen = []

    def host(i):
        seen.append(("pure", int(i)))
        return np.int32(i + 1)

    def ordered(i):
        seen.append(("io", int(i)))
        return np.int32(10 * i)

    def f(x, i):
        kind = jax.ShapeDtypeStruct((), jnp.int32)
        jax.debug.callback(lambda i: seen.append(("debug", int(i))), i * 2, ordered=True)
        a = jax.experimental.io_callback(ordered, kind, i * 3, ordered=True)
        b = jax.pure_callback(host, kind, i * 4)
        c = jax.experimental.io_callback(ordered, kind, a + b, ordered=True)
        return x * c.astype(jnp.float32), i * 5

    _, program, outs = told(f, jnp.float32(2), jnp.int32(1))
    jax.effects_barrier()
    want = [("debug", 2), ("io", 3), ("pure", 4), ("io", 35)]
    assert sorted(seen) == sorted(want)
    assert [s for s in seen if s[0] != "pure"] == [s for s in want if s[0] != "pure"]
    assert [int(x) for x in outs] == [700, 5]
    names = {program.jaxpr.eqns[path[0]].primitive.name for path in program.integers.results}
    assert names == {"mul"}


def test_captured_arrays_are_passed_and_an_empty_part_is_not_compiled():
    table = np.arange(1000, dtype=np.int32)

    def f(x, i):
        return x * jnp.asarray(table)[i].astype(jnp.float32)

    interpretation, program, (y,) = told(f, jnp.float32(2), jnp.int32(7))
    assert (y, interpretation.calls) == (14, 1)
    assert [x.shape for x in program.integers.consts] == [(1000,)]
    interpretation, program, _ = told(functools.partial(jnp.multiply, 2.0), jnp.ones(3))
    assert (interpretation.calls, program.integers.results) == (0, {})


def test_complex_numbers_and_references_are_not_precomputed():
    def f(x, z, n):
        cell = jax.new_ref(jnp.zeros((), jnp.int32))
        cell[...] = n * 2
        w = z * z + z
        return x * jnp.real(w), cell[...]

    interpretation, program, (x, n) = told(f, jnp.float32(2), jnp.complex64(1 + 1j), jnp.int32(3))
    assert (x, n) == (2, 6)
    assert [program.jaxpr.eqns[p[0]].primitive.name for p in program.integers.results] == ["mul"]
    assert interpretation.beside.count("mul") == 1
