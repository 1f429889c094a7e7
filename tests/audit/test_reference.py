"""The reference run computes each operation in float64, in linear algebra too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from cases import nightly
from primitives import FLOATS, arguments, together
from scalewise.auditing._run._outcome import Outcome
from scalewise.auditing._run._session import Session
from scalewise.auditing._tape._interpretations import TableEmulation
from scalewise.interpret import trace

SQUARE = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
POSITIVE = SQUARE @ SQUARE.T + np.eye(6, dtype=np.float32)
LINEAR_ALGEBRA = {
    "lu": lambda a: jax.scipy.linalg.lu(a)[2],
    "qr": lambda a: jnp.linalg.qr(a)[1],
    "svd": lambda a: jnp.linalg.svd(a)[1],
    "eigh": lambda a: jnp.linalg.eigh(a)[0],
    "cholesky": jnp.linalg.cholesky,
    "solve": lambda a: jnp.linalg.solve(a, a[:, 0]),
    "gradient of solve": jax.grad(lambda a: jnp.linalg.solve(a, a[:, 0] * a[:, 1]).sum()),
    "triangular": lambda a: jax.scipy.linalg.solve_triangular(a, a[:, 0]),
    "conjugate gradients": lambda a: jax.scipy.sparse.linalg.cg(a, a[0])[0],
    "tridiagonal": lambda a: jax.lax.linalg.tridiagonal_solve(a[0], a[1], a[2], a[:, :2]),
    "determinant": lambda a: jnp.linalg.slogdet(a)[1],
}


def outcome(f, x: np.ndarray) -> Outcome:
    low = TableEmulation(sw.format("fp16"))
    return Session(trace(f, low, (jnp.asarray(x),), {}, name="audit"), low).run()


@pytest.mark.parametrize("name", nightly(LINEAR_ALGEBRA, but=[*LINEAR_ALGEBRA][:2]))
def test_linear_algebra_of_the_reference_run_is_float64(name):
    f = LINEAR_ALGEBRA[name]
    with jax.enable_x64(True):
        expected = np.asarray(f(jnp.asarray(POSITIVE, jnp.float64)))
    found = outcome(f, POSITIVE)
    np.testing.assert_allclose(found.reference[0], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(can.t be transformed|no units|complex numbers)")
@pytest.mark.parametrize(
    ("run", "low", "within"),
    [(sw.emulate, "bfloat16", 0.05), (sw.autocast, "p=f32,c=bf16,o=f32", 0.5)],
)
def test_the_error_of_each_primitive_is_that_of_the_run_beside_jax(run, low, within):
    """A product in 16 bits differs in the additions, whose order is the CPU's."""
    f, given = together(FLOATS), arguments(FLOATS)
    errors = dict(sw.audit(f, low, trials=0)(given).outputs)
    got, want = (jax.jit(g)(given) for g in (run(f, low), f))
    compared = 0
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        own = errors.get(name := jax.tree_util.keystr(path))
        if own is not None:  # of floats
            error = np.linalg.norm(a - b) / np.linalg.norm(b)
            assert own.non_finite == 0
            assert own.relative == pytest.approx(error, rel=within, abs=2e-6), name
            compared += 1
    assert compared > 100


def test_a_solver_is_audited_as_one_operation_and_rounded_once():
    found = outcome(lambda a: jax.scipy.linalg.solve_triangular(a, a[:, 0]), POSITIVE)
    (solve,) = [e for e in found.recorded if e.name == "triangular_solve"]
    rounded = sw.round_to(jnp.asarray(POSITIVE), "fp16")
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(rounded), jnp.float64)
        exact = jax.scipy.linalg.solve_triangular(wide, wide[:, 0])
        expected = sw.round_to(exact, "fp16")
        np.testing.assert_array_equal(np.asarray(found.low[0], np.float64), np.asarray(expected))
    assert solve.out_avals[0].dtype == jnp.float32


N = 10
HILBERT = (1 / (np.arange(N)[:, None] + np.arange(N) + 1)).astype(np.float32)
TURN = np.linalg.qr(np.random.default_rng(1).normal(size=(N, N)))[0]
CLUSTER = ((TURN * [1, 1 + 1e-6, 1 - 1e-6, *range(2, N - 1)]) @ TURN.T).astype(np.float32)
ILL_CONDITIONED = {
    "qr": (lambda a: jnp.abs(jnp.linalg.qr(a)[1][-1, -1]), HILBERT),
    "svd": (lambda a: jnp.linalg.svd(a, compute_uv=False)[-3], HILBERT),
    "eigh": (lambda a: jnp.abs(jnp.linalg.eigh(a)[1]), CLUSTER),
    "lu": (lambda a: jnp.linalg.slogdet(a)[1], HILBERT),
}


@pytest.mark.parametrize("name", nightly(ILL_CONDITIONED, but=[*ILL_CONDITIONED][:1]))
def test_a_decomposition_in_float32_has_the_errors_of_its_kernel(name):
    f, a = ILL_CONDITIONED[name]
    report = sw.audit(f, "float32")(a)
    computed = np.asarray(f(jnp.asarray(a)), np.float64)
    with jax.enable_x64(True):
        exact = np.asarray(f(jnp.asarray(a, jnp.float64)))
    error = np.linalg.norm(computed - exact) / np.linalg.norm(exact)
    assert error > 1e-3
    assert float(report.error) == pytest.approx(error, rel=1e-3)
    worst = report.findings[0]
    assert worst.kind in ("amplified", "precision")
    assert worst.primitive == name
    assert "float64 for" in str(worst.fix)
    assert float(report.error_fixed) < 1e-6


def _turns(z):
    def body(z, t):
        return z * jax.lax.complex(jnp.cos(1e3 * t), jnp.sin(1e3 * t)), jnp.abs(z + z * z)

    return jax.lax.scan(body, z[0], jnp.abs(z))[1]


COMPLEX = {
    "literal": lambda z: jnp.real(z + jnp.full_like(z, 1e4) - jnp.full_like(z, 1e4)),
    "loop": _turns,
    "solver": lambda z: jnp.abs(jnp.linalg.solve(z.reshape(4, 4), z[:4])),
    "fft": lambda z: jnp.fft.irfft(jnp.fft.rfft(jnp.abs(z) + 1e5)) - 1e5,
    "product": lambda z: jnp.imag(z.reshape(4, 4) @ z.reshape(4, 4)),
}


@pytest.mark.parametrize("name", nightly(COMPLEX, but=[*COMPLEX][:1]))
def test_complex_numbers_stay_as_they_are_and_are_wide_in_the_reference_run(name):
    f, draw = COMPLEX[name], np.random.default_rng(0).normal
    z = (draw(size=16) + 1j * draw(size=16)).astype(np.complex64)
    report = sw.audit(f, "float32")(z)
    computed = np.asarray(f(jnp.asarray(z)), np.float64)
    with jax.enable_x64(True):
        exact = np.asarray(f(jnp.asarray(z, jnp.complex128)))
    error = np.linalg.norm(computed - exact) / np.linalg.norm(exact)
    assert float(report.error) == pytest.approx(error, rel=0.1)
    if error > 1e-6:
        assert "and complex numbers, which stay in fp32 and complex64" in report.verdict


def test_the_reference_has_more_digits_than_the_format():
    assert sw.audit(jnp.sin, "float32", trials=0)(jnp.ones(3)).reference == "float64"
    for low, reference in (("float32", "float32"), ("float64", "float64"), ("float64", None)):
        with pytest.raises(ValueError, match="has the errors of fp"):
            sw.audit(jnp.sin, low, reference=reference)
