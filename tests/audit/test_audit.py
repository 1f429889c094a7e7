"""Reports name the right line, kind and measured effect; unusable arguments are rejected."""

import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

import scalewise as sw
from arrays import normal
from cases import refused

HERE = __file__


def line_of(text):
    lines = Path(HERE).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.strip().startswith(text))


def test_finding_names_the_overflow_and_not_the_nan_that_follows():
    def f(x):
        y = x * 300.0  # overflows
        z = jnp.tanh(y / y)  # NaN is seen
        return z + 1.0

    report = sw.audit(f, "fp16", trials=4)(jnp.full(4, 300.0))
    worst = report.findings[0]
    assert (worst.kind, worst.primitive, worst.file) == ("overflow", "mul", HERE)
    assert worst.line == line_of("y = x * 300.0")
    assert worst.source == "y = x * 300.0  # overflows"
    assert worst.direction == "forward"
    assert worst.error_before == np.inf > worst.error_after
    assert worst.non_finite_before == 4
    assert worst.non_finite_after == 0


@pytest.mark.parametrize(
    ("factors", "scope"),
    [((2.0, 300.0, 300.0, 300.0), "c"), ((2.0, 1e-6, 1e6, 1.0), "b")],  # inf; a subnormal number
)
def test_scope_is_that_of_the_worst_equation_of_a_line(factors, scope):
    def f(x):
        for name, factor in zip("abcd", factors, strict=True):
            with jax.named_scope(name):
                x = x * factor
        return x

    found = sw.audit(f, "fp16", trials=0)(jnp.full(4, 100 / 3)).unfixed
    assert found[0].scope == scope


def test_underflow_of_gradients_is_fixed_by_a_loss_scale():
    def loss(w, x):
        return jnp.mean(jnp.square(x @ w)) * 2.0**-20  # tiny gradients

    def step(w, x):
        return w - 5e4 * jax.grad(loss)(w, x)

    w, x = jnp.linspace(1.0, 2.0, 8), normal(0, (64, 8))
    report = sw.audit(step, "fp16", trials=8)(w, x)
    worst = report.findings[0]
    assert worst.direction == "backward"
    assert worst.kind == "underflow"
    assert str(worst.fix).startswith("loss scale 2^")
    assert worst.error_after < 0.2 * worst.error_before


def test_masks_and_guarded_nans_are_no_findings():
    """JAX's eager debug_nans and debug_infs raise on them (spurious errors: jax #5698)."""

    def masked(x):
        scores = jnp.where(x > 0, x, -jnp.inf)
        return jax.nn.softmax(scores)

    def guarded(x):
        return jnp.where(x > 0, jnp.log(x), 0.0)

    x = jnp.array([1.0, -1.0, 2.0])
    for f in (masked, guarded):
        report = sw.audit(f, "fp16", trials=6)(x)
        assert not [k for k in report.findings if k.kind in ("nan", "overflow")]
        assert report.error.non_finite == 0
    assert any("not finite in the reference run too" in line for line in report.benign)


def test_without_jit_and_under_checks_for_nan_the_audit_is_the_same():
    def masked(x):
        return jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf))

    def f(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: masked(x), x)

    x = jnp.array([1.0, -1.0, 2.0])
    expected = sw.audit(f, "fp16", trials=2)(x)
    for context in (jax.disable_jit(), jax.debug_infs(True)):
        with context:
            found = sw.audit(f, "fp16", trials=2)(x)
        assert found.error == expected.error
        assert len(found.findings) == len(expected.findings)


def test_literals_need_no_data():
    def f(x, g):
        x = jnp.where(x > 0, x, jnp.finfo(jnp.float32).min)
        y = 0.999 * x + g
        return jax.jit(lambda z: z / (jnp.abs(z) + 1e-8))(y)

    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    found = {c.number: c for c in sw.literals(f, "fp16")(shape, shape)}
    assert found[float(np.float32(1e-8))].what == "flushed to zero"
    assert found[float(jnp.finfo(jnp.float32).min)].masks
    assert [c.what for c in found.values()] == ["becomes infinite", "flushed to zero"]
    (decay,) = [c for c in sw.literals(f, "bf16")(shape, shape) if not c.masks]
    assert (decay.what, decay.rounded, decay.line) == ("becomes 1", 1.0, line_of("y = 0.999 * x"))


def test_a_constant_and_its_product_both_overflow():
    def grown(x):
        return (x * 1e6) @ x

    report = sw.audit(grown, "fp16", trials=8)(jnp.ones((4, 4)))
    (found,) = report.findings
    assert (found.kind, found.line) == ("overflow", grown.__code__.co_firstlineno + 1)
    assert str(found.fix) == f"float32 for line {found.line}"
    assert (found.non_finite_before, found.non_finite_after, found.error_after) == (16, 0, 0.0)


def test_literals_of_published_constants():
    """Epsilons and decay rates of optax #1754, TensorFlow #24979, sd_dreambooth #1415."""

    def f(x):
        return x * 0.9999 + 1e-12 + x * 1e-7 + x * 1e-5  # 1e-5: 1.00136e-5

    found = [(c.written, c.what) for c in sw.literals(f, "fp16")(jnp.ones(1))]
    changes = ["becomes 1", "flushed to zero", "is off by 19.2%", "is off by 0.1%"]
    assert found == list(zip(["0.9999", "1e-12", "1e-07", "1e-05"], changes, strict=True))
    assert [c.what for c in sw.literals(f, "bf16")(jnp.ones(1))] == ["becomes 1"]
    assert sw.literals(f, "fp32")(jnp.ones(1)) == ()


def test_literals_of_random_draws_are_left_out():
    def f(x, key):
        return x * 0.999 + jax.random.normal(key, x.shape)

    found = sw.literals(f, "bf16")(jnp.ones(3), jax.random.key(0))
    assert [c.number for c in found] == [np.float32(0.999)]


def test_saturation_is_fixed_by_a_scale():
    def f(x, w):
        return x @ w

    x = jnp.full((2, 8), 100.0)
    report = sw.audit(f, "e4m3fn", saturate=True, trials=3)(x, x.T)
    assert report.findings[0].kind == "saturation"
    assert str(report.findings[0].fix).startswith("float32 for line")


def test_a_finding_without_trials_says_that_no_fix_was_tried():
    def f(x):
        large = jnp.exp(x)
        return large * 1e-9

    report = sw.audit(f, "fp16", trials=1)(jnp.array([12.0]))
    (only,) = report.findings
    assert (only.kind, only.primitive, only.fix) == ("overflow", "exp", None)
    assert only.error_before == np.inf
    assert "no fix was tried: error 1 not finite" in shown(report)


def test_arguments_that_the_format_cannot_hold():
    def f(a, b, how):
        return a["w"] * b if how == "times" else a["w"] + b

    w = {"w": jnp.array([1e5, 1.0, 1e-9])}
    report = sw.audit(f, "fp16", trials=0)(w, jnp.ones(3), how="times")
    assert report.arguments == ("[0]['w']: 1 overflow, 1 flushed to zero, of 3",)
    assert "argument  [0]['w']: 1 overflow" in shown(report)
    # the product itself doesn't overflow
    assert not [stats for stats in report.equations if stats["overflowed"]]


def test_updates_lost_and_loss_scales():
    """arXiv 1710.03740: a weight 2048 times its update loses it; 2^-27 needs a scale of 8."""

    def loss(w):
        return jnp.sum(w * tiny)

    def step(w):
        return w - jax.grad(loss)(w) * 1.0

    tiny = 2.0 ** jnp.linspace(-27.0, -24.0, 64)
    report = sw.audit(step, "fp16", trials=0)(jnp.ones(64))
    assert report.updates_lost == 1.0
    scales = report.loss_scales()
    assert scales[0][0] > 0.3
    assert scales[3] == (0.0, 0.0)
    assert scales[3][0] < scales[1][0] < scales[0][0]


def test_each_step_continues_from_the_last():
    def step(state, batch):
        return {"w": state["w"] * batch}, jnp.sum(state["w"])

    args = {"w": jnp.ones(3)}, jnp.full(3, 16.0)
    report = sw.audit(step, "fp16", trials=0, steps=5)(*args)
    (mul,) = [stats for stats in report.equations if stats.primitive == "mul"]
    assert mul["visits"] == 5
    assert mul["first"] == 3  # 16^4 = 65536 at the fourth step
    assert report.error.non_finite == 4  # three weights, and the sum of the step before
    assert sw.audit(step, "fp16", trials=0, steps=3)(*args).error.non_finite == 0
    with pytest.raises(
        ValueError, match=r"result of <lambda> at test_audit.py:.* has other shapes"
    ):
        sw.audit(lambda w: jnp.sum(w), "fp16", steps=2)(jnp.ones(3))


def test_each_step_gets_its_batch():
    def step(w, batch):
        return w + batch["x"] * 1e-3, jnp.sum(w)

    made = [{"x": jnp.full(4, 10.0**n)} for n in range(6)]  # 1e5 at the sixth: beyond FP16
    w = jnp.ones(4)
    report = sw.audit(step, "fp16", trials=0, steps=5, batches=iter(made))(w)
    want = np.float16(1)
    for n in range(5):
        want += np.float16(10.0**n) * np.float16(1e-3)
    plain = 1.0 + 1e-3 * sum(10.0**n for n in range(5))
    assert report.error.non_finite == 0
    assert report.outputs[0][1].relative == pytest.approx(abs(float(want) / plain - 1), rel=1e-2)
    report = sw.audit(step, "fp16", trials=0, steps=6, batches=lambda n: made[n])(w)
    assert report.error.non_finite == 4  # the sum is of the step before
    for batches, message in (
        (made[:2], "steps=3, but batches has 2"),
        ([made[0], {"x": jnp.ones(5)}, made[2]], "batch 1 has other shapes or dtypes than batch 0"),
    ):
        with pytest.raises(ValueError, match=message):
            sw.audit(step, "fp16", steps=3, batches=batches)(w)


def shown(report, **options):
    stream = io.StringIO()
    report.show(Console(file=stream, width=100), **options)
    return stream.getvalue()


def test_a_library_line_names_its_callers_and_labels_may_be_int64():
    def loss(x, labels):
        chosen = jnp.take_along_axis(x, labels[:, None], -1)
        return optax.tree.norm(chosen * 300.0)

    report = sw.audit(loss, "fp16")(np.full((8, 4), 2.0), np.arange(8) % 4)
    assert "optax" in report.findings[0].file
    where, called = f"test_audit.py:{line_of('return optax.tree')}", report.findings[0].called
    assert report.findings[0].where == where
    assert called.startswith("optax/tree_utils/")
    assert called.endswith(f", called at {where}")
    assert report.findings[0].called in str(report)
    assert len(repr(report)) < 200


def test_terminal_output():
    def norm(x):
        return jnp.sqrt(jnp.sum(x * x))

    text = shown(sw.audit(norm, "fp16")(jnp.full(4096, 16.0)), everything=True)
    assert text.startswith("audit  norm  fp16 beside a run in float64")
    assert "overflow  test_audit.py:" in text
    assert "exceeds FP16's maximum by 2^4.0 (largest value 2^20.0)" in " ".join(text.split())
    assert "return jnp.sqrt(jnp.sum(x * x))" in text
    assert "error 1 not finite -> 0" in text
    assert "one by one" in text


def test_saved_json(tmp_path):
    report = sw.audit(jnp.exp, "fp16", trials=2)(jnp.array([12.0, 1.0]))
    path = report.save(tmp_path / "audit.json")
    data = json.loads(path.read_text())
    assert data["findings"][0]["kind"] == "overflow"
    assert data["findings"][0]["error_before"] == "inf"
    assert data["equations"][0]["numbers"]["overflowed"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["audit.json"]


def masked_softmax(x, mask):
    scores = jnp.where(mask, x, -jnp.inf)
    powers = jnp.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def drawn(x):
    """Noise that isn't a function of its arguments."""
    draw = np.random.default_rng(0).random
    return x + jax.pure_callback(lambda x: draw(2, np.float32), x, x)


test_unusable_arguments_are_rejected = refused(
    (lambda: sw.audit(jnp.sin, "fp17"), ValueError, "format or recipe is called 'fp17'"),
    (lambda: sw.audit(jnp.sin, "e8m0"), ValueError, "audit: e8m0 isn't supported; expected"),
    (lambda: sw.audit(jnp.sin, None), TypeError, "low is None; expected a dtype or a Format"),
    (lambda: sw.audit(jnp.sin, "fp9"), ValueError, "'fp9'; did you mean 'fp8'"),
    (lambda: sw.audit(drawn, "fp16", trials=0)(jnp.ones(2)), ValueError,
     "drawn calls back to the host, and gets other numbers at each call"),
    (lambda: sw.audit(lambda i: i + 1, "fp16")(jnp.arange(2)), ValueError,
     "returns no float, and nothing that floats decide, so that there is no error"),
    (lambda: sw.audit(lambda x: 2 * x, "fp16")(3.0), ValueError,
     r"A Python number among the arguments is a constant: pass jnp.asarray\(x\)"),
    (lambda: sw.audit(jnp.log, "fp16")(jnp.array([-1.0])), ValueError,
     r"log gives NaN in the reference run too .*\(of a negative number\); fix that first$"),
    (lambda: sw.audit(jnp.sum, "fp16")({"a": jnp.array([1.0, jnp.nan])}["a"]), ValueError,
     r"argument \[0\] has NaN; replace it first"),
    (lambda: sw.audit(lambda x: x / x, "fp16")(jnp.zeros(2)), ValueError,
     r"\(0 / 0, or infinity / infinity\); fix that first$"),
    (  # of a wholly masked row: the NaN isn't made in the mask's line
        lambda: sw.audit(masked_softmax, "fp16")(jnp.ones((2, 4)), jnp.zeros((2, 4), bool)),
        ValueError,
        rf"comes from sub at \S*:{line_of('powers = jnp.exp(')} \(infinity minus infinity\)",
    ),
    (lambda: jax.jit(sw.audit(jnp.sin, "fp16"))(jnp.ones(2)), TypeError,
     "was called under jit"),
    (lambda: jax.jit(lambda c: sw.audit(lambda x: x * c, "fp16")(np.ones(2)))(2.0), TypeError,
     "closes over an array that another transformation traces"),
    (lambda: sw.audit(jnp.sin, "fp16", reference="bf16")(jnp.ones(2)), ValueError,
     "reference='bf16'; expected 'float32' or 'float64'"),
    (lambda: sw.audit(jnp.sin, "fp16", trials=0)(jnp.ones(2)).save("report.pdf"), ValueError,
     "expected a name that ends with .html, .json or .csv"),
)  # fmt: skip


def test_the_name_of_a_recipe_is_the_recipe_unless_it_names_a_format():
    from scalewise.auditing._audit import low_interpretation
    from scalewise.emulating import Emulation

    assert low_interpretation("fp8").recipe is sw.recipes.fp8
    assert isinstance(low_interpretation("fp16"), Emulation)


class Grown(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(3))
        self.count = nnx.Variable(jnp.int32(0))


def grow(model, other, factor):
    model.w[...] = model.w[...] * factor
    model.count[...] = model.count[...] + 1
    other.w[...] = other.w[...] + model.w[...].mean()
    return jnp.sum(model.w[...])


def test_nnx_objects_are_carried_from_step_to_step():
    model, other = Grown(), Grown()
    report = sw.audit(grow, "fp16", trials=0, steps=5)(model, other, jnp.full(3, 16.0))
    (mul,) = [stats for stats in report.equations if stats.primitive == "mul"]
    assert (mul["visits"], mul["first"]) == (5, 3)  # 16^4 = 65536 at the fourth step
    assert (float(model.w[0]), int(model.count[...]), float(other.w[0])) == (1, 0, 1)
    batches = [jnp.full(3, 16.0), jnp.full(3, 1.0), jnp.full(3, 16.0)]
    finite = sw.audit(grow, "fp16", trials=0, steps=3, batches=batches)
    assert finite(model, other).error.non_finite == 0
    with pytest.raises(TypeError, match="expected all objects first"):
        sw.audit(lambda x, m: jnp.sum(m.w * x), "fp16", steps=2)(jnp.ones(3), model)
