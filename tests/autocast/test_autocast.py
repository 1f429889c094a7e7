"""Autocast against mixed precision written out by hand, and the laws of an interpretation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from arrays import normal
from cases import refused
from primitives import FLOATS
from programs import PROGRAMS, contractions, custom_derivatives, nested, scalar, together
from scalewise.autocasting import FULL, LOW, Policy, Rule, autocast, placements, policy

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def example(shape=(4, 4), seed=0):
    return normal(seed, shape)


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def dtypes(f, chosen, *args):
    """Primitive to the dtypes that it runs in."""
    found = {}
    for p in placements(f, chosen)(*args):
        found.setdefault(p.primitive, set()).add(p.dtype)
    return {k: v.pop() if len(v) == 1 else v for k, v in found.items()}


def test_computing_in_float32_is_the_program_itself():
    f = together(PROGRAMS)
    same(jax.jit(autocast(f, "f32"))(example()), jax.jit(f)(example()))


def test_every_control_flow_stays_near_float32():
    f = together(PROGRAMS)
    got, want = jax.jit(autocast(f, "f16"))(example()), jax.jit(f)(example())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        scale = np.abs(np.asarray(b, np.float64)).max()
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=2.0**-8 * scale)


def test_gradients_from_outside_are_the_gradients_inside():
    programs = contractions, custom_derivatives, nested
    outside = together(programs, lambda f: jax.grad(autocast(scalar(f), "f16")))
    inside = autocast(together(programs, lambda f: jax.grad(scalar(f))), "f16")
    same(outside(example()), inside(example()))


@pytest.mark.filterwarnings("ignore:.*(can.t be transformed|no units|has no rule|complex numbers)")
def test_every_primitive_takes_operands_that_a_product_left_narrow():
    """``complex`` and ``conj`` take no 16-bit numbers, library kernels neither."""
    for name, (f, args) in FLOATS.items():
        floats = [getattr(x, "dtype", None) == F32 for x in args]

        def product(x, one):
            return jnp.reshape(jnp.reshape(x, (-1, 1)) @ one, jnp.shape(x))

        def program(one, *args, f=f, floats=floats):
            pairs = zip(args, floats, strict=True)
            return f(*[product(x, one) if c else x for x, c in pairs])

        given = jnp.ones((1, 1)), *args
        want = jax.eval_shape(program, *given)
        assert jax.eval_shape(autocast(program, "bf16"), *given) == want, name


def test_vmap_outside_and_inside():
    xs = example((3, 4, 4))
    f = lambda x: jax.nn.softmax(jnp.tanh(x @ x) @ x)  # noqa: E731
    want = [autocast(f)(x) for x in xs]
    for got in (jax.vmap(autocast(f))(xs), autocast(jax.vmap(f))(xs)):
        np.testing.assert_allclose(np.asarray(got), np.stack(want), rtol=2e-3, atol=1e-6)


def model(p, x):
    h = jax.nn.relu(x @ p["a"]) @ p["b"]
    return -jnp.mean(jax.nn.log_softmax(h)[:, 0])


def by_hand(p, x):
    h = jax.nn.relu(x.astype(F16) @ p["a"].astype(F16)) @ p["b"].astype(F16)
    return -jnp.mean(jax.nn.log_softmax(h.astype(F32))[:, 0])


def test_equals_mixed_precision_written_by_hand():
    p, x = {"a": example((8, 16)), "b": example((16, 4), 1)}, example((5, 8), 2)
    same(autocast(model)(p, x), by_hand(p, x))
    same(jax.grad(autocast(model))(p, x), jax.grad(by_hand)(p, x))
    same(autocast(jax.grad(model))(p, x), jax.grad(by_hand)(p, x))


def test_compiled_code_has_narrow_dots_and_an_otherwise_wide_loss():
    p, x = {"a": example((8, 16)), "b": example((16, 4), 1)}, example((5, 8), 2)
    where = dtypes(jax.value_and_grad(model), "f16", p, x)
    assert where["dot_general"] == "float16"
    assert {where[k] for k in ("exp", "log", "reduce_sum", "sub")} == {"float32"}
    lowered = jax.jit(jax.value_and_grad(autocast(model))).lower(p, x).as_text()
    dots = [line for line in lowered.splitlines() if "stablehlo.dot_general" in line]
    assert len(dots) == 5  # two forward, three backward: x has no gradient
    assert all(line.rstrip().endswith("xf16>") for line in dots)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_contraction_accumulates_wide(jit):
    """In FP16 a sum of ones stalls at 2048, in BF16 at 256."""
    x = jnp.ones((1, 4096))
    assert float(jit(autocast(lambda x: x @ x.T, "f16"))(x)[0, 0]) == 4096
    assert float(jit(autocast(lambda x: x @ x.T, "bf16"))(x)[0, 0]) == 4096


def test_convolutions_run_low():
    x, w = example((2, 8, 8, 3)), example((3, 3, 3, 4), 1)

    def f(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    assert dtypes(f, "bf16", x, w) == {"conv_general_dilated": "bfloat16"}
    want = f(x.astype(BF16), w.astype(BF16)).astype(F32)
    same(autocast(f, "bf16")(x, w), want)
    assert jax.grad(lambda w: autocast(f, "f16")(x, w).sum())(w).dtype == F32


def test_masks_and_small_constants_survive():
    def masked(x):
        scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), x @ x, jnp.finfo(x.dtype).min)
        return jax.nn.softmax(scores)

    assert dtypes(masked, "f16", example())["select_n"] == "float16"
    got = autocast(masked)(example())
    assert np.all(np.isfinite(np.asarray(got)))
    np.testing.assert_allclose(np.asarray(got), np.asarray(masked(example())), atol=4e-3)
    # FP16 has no 1e-8: what needs it runs in float32
    assert dtypes(lambda x: (x @ x) + 1e-8, "f16", example())["add"] == "float32"
    assert dtypes(lambda x: (x @ x) * 0.5, "f16", example())["mul"] == "float16"


def test_an_optimizer_inside_sees_float32_gradients():
    def step(w, x):
        g = jax.grad(lambda w: jnp.mean(jax.nn.relu(x @ w)))(w)
        return w - 1e-3 * g

    found = placements(step, "f16")(example(), example((8, 4), 1))
    assert {p.dtype for p in found if p.direction == "update"} == {"float32"}
    got = autocast(step)(example(), example((8, 4), 1))
    assert not np.array_equal(np.asarray(got), np.asarray(got.astype(F16), np.float32))


def test_a_function_without_a_gradient_has_no_optimizer():
    found = placements(lambda x: jnp.sum(jnp.exp(x @ x)), "f16")(example())
    assert {p.direction for p in found} == {"forward"}


def test_rules_override_by_primitive_scope_and_function():
    def attention(x):
        return jnp.tanh(x @ x)

    def net(x):
        with jax.named_scope("first"):
            y = jnp.tanh(x @ x)
        return attention(y)

    def run(*rules):
        found = placements(net, dataclasses.replace(policy("f16"), rules=rules))(example())
        return [(p.primitive, p.dtype) for p in found]

    low, wide = "float16", "float32"
    names = ["dot_general", "tanh"] * 2
    assert run() == list(zip(names, [low, low, low, low], strict=True))
    by_primitive = run(Rule("full", primitive="tanh"))
    assert by_primitive == list(zip(names, [low, wide, low, wide], strict=True))
    by_scope = run(Rule("full", scope=r"\bfirst\b"))
    assert by_scope == list(zip(names, [wide, wide, low, low], strict=True))
    by_function = run(Rule("full", function="attention"))
    assert by_function == list(zip(names, [low, low, wide, wide], strict=True))
    both = run(Rule("low", primitive="tanh", scope="first"), Rule("full", scope="first"))
    assert both == list(zip(names, [wide, low, low, low], strict=True))


def test_a_scope_rule_holds_in_the_backward_pass():
    def net(x):
        with jax.named_scope("head"):
            return jnp.sum(x @ x)

    chosen = Policy("f16", rules=(Rule("full", scope="head"),))
    same(jax.jit(autocast(jax.grad(net), chosen))(example()), jax.jit(jax.grad(net))(example()))


def test_a_rule_keeps_what_the_program_converts_to_fewer_bits():
    """Without one its own conversions stay as they are."""

    def f(x):
        return (x * 1000).astype(jnp.float16).astype(jnp.float32)

    x = jnp.array([1.0, 100.0])
    rule = Rule("full", primitive="convert_element_type", function="f")
    np.testing.assert_array_equal(autocast(f, "bf16")(x), [1000.0, np.inf])
    np.testing.assert_array_equal(autocast(f, Policy("bf16", rules=(rule,)))(x), x * 1000)


def test_the_lists_are_data():
    assert "dot_general" in LOW
    assert {"exp", "reduce_sum", "rsqrt"} <= FULL
    assert not LOW & FULL
    everything_low = Policy("bf16", low=LOW | {"exp"}, full=FULL - {"exp"})
    assert dtypes(lambda x: jnp.exp(x @ x), everything_low, example())["exp"] == "bfloat16"


def test_the_policy_converts_arguments_and_results():
    f = lambda x: {"y": x @ x, "n": jnp.int32(3)}  # noqa: E731
    out = autocast(f, "p=bf16,c=f16,o=bf16")(example())
    assert out["y"].dtype == BF16
    assert out["n"].dtype == jnp.int32
    x = example().astype(BF16).astype(F16)
    want = (x @ x).astype(BF16)
    same(out["y"], want)


def test_gradients_have_their_arguments_dtype_whatever_the_policy_converts():
    x = example().astype(F16)
    for text in ("c=f16,o=f32", "p=f32,c=f16,o=f32", "p=bf16,c=bf16,o=f16"):
        outside = jax.grad(lambda x, t=text: autocast(lambda x: (x @ x).sum(), t)(x).astype(F32))(x)
        assert outside.dtype == F16
        want = jax.grad(lambda x: (x @ x).sum())(example())
        np.testing.assert_allclose(np.asarray(outside, np.float32), want, atol=0.05)


def test_a_program_written_in_bfloat16_keeps_its_types():
    x = example().astype(BF16)
    out = jax.jit(autocast(lambda x: jax.nn.softmax(x @ x), "f16"))(x)
    assert out.dtype == BF16
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(jax.nn.softmax(x @ x), np.float32), atol=0.05
    )


def test_strings_say_policies():
    assert policy("p=f32, c=bf16, o=f32") == Policy(BF16, params=F32, output=F32)
    assert policy("compute=half") == Policy(F16)
    assert policy(jnp.bfloat16) == policy("bf16")
    chosen = Policy(F16, rules=(Rule("full", primitive="tanh"),))
    assert policy(chosen) is chosen


test_invalid_arguments_are_refused = refused(
    (lambda: policy("c=int8"), "'int8' is no dtype to compute in; expected one"),
    (lambda: policy("p=f32"), "lacks c=, the dtype to compute in"),
    (lambda: policy("c=f16,c=f32"), "can't read 'c=f32'.*each of p, c, o at most"),
    (lambda: policy("c=f16,q=f32"), "can't read 'q=f32'"),
    (lambda: policy(3), TypeError, "text is 3; expected a dtype or a Policy or a string"),
    (lambda: Policy(low=LOW | {"exp"}), "exp: both in low and in full"),
    (lambda: Rule("low"), "at least one of primitive, scope and function"),
)  # fmt: skip
