"""Findings reduced to files of a few operations, which are run."""

import ast
import contextlib
import dataclasses
import io
import re
import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scalewise as sw
from scalewise.auditing import Reduction
from scalewise.auditing._reduce._render import _comment
from scalewise.autocasting import Policy, Rule


def reduced(f, low, *args, kind, trials=12, **options):
    report = sw.audit(f, low, trials=trials, **options)(*args)
    i = next(i for i, x in enumerate(report.findings) if x.kind == kind)
    found = report.reduce(i)
    assert report.findings[i].evidence in found.finding
    return found


def run(found, tmp_path):
    """Runs the saved file; returns the results and what it prints."""
    path = found.save(tmp_path / "case.py")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        names = runpy.run_path(str(path), run_name="__main__")
    low, wide = names["results"]()
    np.testing.assert_array_equal(low, found.low)
    np.testing.assert_array_equal(wide, found.wide)
    return np.asarray(low), np.asarray(wide), out.getvalue()


def imports(found):
    lines = found.code.splitlines()
    return {line.split()[1] for line in lines if line.startswith(("import ", "from "))}


def norm(x):
    x = jnp.sin(x) * 300.0
    return jnp.sqrt(jnp.sum(x * x, axis=1))


def test_an_overflow_is_cut_to_its_operation_and_worst_elements(tmp_path):
    x = jnp.linspace(0.1, 3, 40).reshape(4, 10)
    found = reduced(norm, "fp16", x, kind="overflow", trials=2)
    assert len(found.piece.lines) == 1
    assert found.piece.lines[0].startswith("v0 = cast(x0 * x0)  # test_reduce.py:")
    assert [x.shape for x in found.inputs.values()] == [(4,)]
    low, wide, printed = run(found, tmp_path)
    assert np.isinf(low).any()
    assert np.isfinite(wide).all()
    assert "FP16: [inf" in printed
    assert "float32: [" in printed
    assert imports(found) == {"jax.numpy", "numpy"}
    assert not (tmp_path / "case.npz").exists()


@pytest.mark.thorough
def test_a_sum_and_a_product_keep_one_row_and_what_overflows(tmp_path):
    x = jnp.asarray(np.random.default_rng(0).uniform(100, 200, (3, 4096)), jnp.float32)
    found = reduced(lambda x: jnp.sum(x, axis=1), "fp16", x, kind="overflow", trials=2)
    (rest,) = found.inputs.values()
    assert rest.shape[0] == 1
    assert 328 <= rest.size <= 512  # of 100 to 200 each, which is 65,536 and more
    low, _, _ = run(found, tmp_path)
    assert np.isinf(low).all()
    assert (tmp_path / "case.npz").exists()
    y = jnp.full((4096, 2), 1.0)
    product = reduced(lambda x, y: x @ y, "fp16", x, y, kind="overflow", trials=2)
    row, column = sorted(x.shape for x in product.inputs.values())
    assert row == column[::-1]
    assert (row[0], 328 <= row[1] <= 512) == (1, True)
    run(product, tmp_path)


def test_a_constant_that_vanishes(tmp_path):
    def inverse(v):
        return jnp.mean(1.0 / (jnp.sqrt(v) + 1e-8))

    found = reduced(inverse, "fp16", jnp.array([0.0, 1.0, 4.0]), kind="underflow", trials=6)
    assert "cast(1e-08)" in found.code
    low, wide, _ = run(found, tmp_path)
    assert (low == 0).any()
    assert (wide > 0).all()


@pytest.mark.thorough
def test_a_mask_that_overflows(tmp_path):
    def masked(s, mask):
        return jax.nn.softmax(jnp.where(mask, s, -1e9), axis=-1)

    mask = jnp.zeros((2, 4), bool).at[0, 1].set(True)
    found = reduced(masked, "fp16", jnp.ones((2, 4)), mask, kind="overflow", trials=8)
    assert re.search(r"jnp.where\(x., x., cast\(-1000000000.0\)\)", found.code)
    low, _, _ = run(found, tmp_path)
    assert np.isinf(low).any()


@pytest.mark.thorough
def test_additions_that_change_nothing_in_a_loop(tmp_path):
    def total(x):
        return jax.lax.scan(lambda c, x: (c + x, None), jnp.float32(0), x)[0]

    found = reduced(total, "bf16", jnp.ones(300), kind="swamping", trials=4)
    assert len(found.piece.lines) == 1
    low, wide, _ = run(found, tmp_path)
    assert abs(low - wide) >= 1


@pytest.mark.thorough
def test_flushed_numbers_in_a_format_without_a_dtype_of_its_own(tmp_path):
    def small(x):
        return jnp.exp(-x) * 100.0

    found = reduced(small, "e4m3fn", jnp.linspace(6.5, 8, 32), kind="underflow", trials=4)
    assert imports(found) >= {"scalewise"}
    low, wide, _ = run(found, tmp_path)
    assert ((low == 0) & (wide != 0)).any()


@pytest.mark.thorough
def test_an_amplified_error_and_other_decisions(tmp_path):
    def rotary(t):
        angles = (t / 7.0) * 20.0
        return jnp.sin(angles)

    found = reduced(rotary, "bf16", jnp.arange(100.0, 140.0), kind="amplified", trials=20)
    assert len(found.piece.lines) == 2  # the product that rounds, and the sine that amplifies
    low, wide, _ = run(found, tmp_path)
    assert np.linalg.norm(low - wide) > 0.1 * np.linalg.norm(wide)

    def route(x, table):
        return table[jnp.argmax(x + 100.0, axis=1)]

    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 4)), jnp.float32)
    found = reduced(route, "bf16", x, jnp.arange(4.0) * 10, kind="decision", trials=20)
    low, wide, _ = run(found, tmp_path)
    assert (low != wide).any()


@pytest.mark.slow
def test_float32_against_float64(tmp_path):
    def difference(x):
        return jnp.log(1.0 + x)

    x = jnp.full(5, 1e-6)
    found = reduced(difference, "float32", x, kind="amplified", trials=8, reference="float64")
    assert 'jax.config.update("jax_enable_x64", True)' in found.code


def normal(seed, *shape, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def test_a_policy_that_overflows(tmp_path):
    def gated(params, x):
        def gate(x):
            return (x @ params["a"]) * (x @ params["b"])

        return gate(x) / 1e5

    policy = Policy(rules=(Rule("low", function="gate"),))
    params = {"a": normal(0, 16, 8, scale=90.0), "b": normal(1, 16, 8, scale=90.0)}
    found = reduced(gated, policy, params, normal(2, 8, 16), kind="overflow", trials=2)
    assert "policy = scalewise.Policy(compute='float16', rules=(Rule('low'" in found.code
    low, wide, printed = run(found, tmp_path)
    assert np.isinf(low).any()
    assert np.isfinite(wide).all()
    assert "policy: [" in printed


@pytest.mark.slow
def test_operands_that_a_recipe_cuts_off(tmp_path):
    def net(params, x):
        with jax.named_scope("input"):
            h = x @ params["a"]
        with jax.named_scope("elsewhere"):
            return (h - jnp.mean(h, -1, keepdims=True)) @ params["b"]

    a = jnp.asarray(np.random.default_rng(0).uniform(0.9, 0.998, (32, 16)), jnp.float32)
    scaling = sw.scaled.Mx("floor")
    recipe = sw.Recipe(sw.Products.short("mxfp8_e4m3", scaling=scaling), keep={"elsewhere": "fp16"})
    params = {"a": a, "b": normal(1, 16, 4)}
    found = reduced(net, recipe, params, jnp.abs(normal(2, 8, 32)), kind="saturation", trials=1)
    assert "with jax.named_scope('input'):" in found.code
    assert "keep" not in found.code  # the exception isn't for this product
    low, wide, _ = run(found, tmp_path)
    assert np.linalg.norm(low - wide) > 0.03 * np.linalg.norm(wide)


@pytest.mark.slow
def test_a_backward_product_of_a_recipe_keeps_its_pass(tmp_path):
    def loss(params, x, y):
        h = jax.nn.relu(x @ params["a"])
        z = h @ jnp.concatenate([params["small"], params["large"]], -1)
        return jnp.sum(jnp.square(z - y))

    params = {
        "a": normal(0, 16, 32, scale=0.3),
        "small": normal(1, 32, 1),
        "large": normal(2, 32, 3),
    }
    y = normal(4, 24, 4).at[:, 1:].add(1e11)  # gradients of 1 beside some of 1e11, in E5M2
    x = normal(3, 24, 16)
    found = reduced(jax.grad(loss), "fp8", params, x, y, kind="underflow", trials=1)
    assert "jax.named_scope('transpose(jvp" in found.code
    assert "* 1.0" in found.code
    low, wide, _ = run(found, tmp_path)
    assert ((low == 0) & (wide != 0)).any()


def test_what_can_not_be_reduced():
    report = sw.audit(lambda x: x @ x, "c=f16", trials=3)(jnp.full((4, 4), 300.0))
    other = dataclasses.replace(report, low="Halved", reducer=None)
    with pytest.raises(ValueError, match="ran in Halved, an interpretation that a file can't name"):
        other.reduce(0)
    with pytest.raises(IndexError, match="reduce: i is 7; expected a number below"):
        report.reduce(7)

    def step(x):
        return x * x

    report = sw.audit(step, "fp16", trials=2, steps=2)(jnp.full(3, 20.0))
    with pytest.raises(ValueError, match="expected an audit of one step, not of 2"):
        report.reduce(0)


def test_a_saved_report_has_no_program(tmp_path):
    report = sw.audit(norm, "fp16", trials=2)(jnp.linspace(0.1, 3, 40).reshape(4, 10))
    assert "reducer" not in report.as_dict()
    assert isinstance(report.reduce(), Reduction)
    with pytest.raises(ValueError, match=r"expected a name that ends with .py"):
        report.reduce().save(tmp_path / "case.txt")


def test_a_file_name_in_generated_code_stays_a_comment():
    names = ["a\nimport os.py", "b\r.py", "c\u2028d.py", "e\u202ef.py", "g\x00h.py", "é.py"]
    for name in names:
        equation = types.SimpleNamespace(caller=None, source=(f"/x/{name}", 3, "f"))
        text = _comment(equation)
        assert len(f"y = 1{text}".splitlines()) == 1
        assert text.isprintable()
        assert ast.dump(ast.parse(f"y = 1{text}")) == ast.dump(ast.parse("y = 1"))
