"""Transformed functions inside ``jax.shard_map`` with its default checks, and on a mesh."""

import pytest

from cases import nightly
from devices import run_on_devices


@pytest.mark.slow
def test_transforms_inside_a_checking_shard_map():
    run_on_devices(4, PROGRAM)


PROGRAM = """
import dataclasses
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import scalewise as sw
from scalewise import training

mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
X = jax.random.normal(jax.random.key(1), (16, 16))


def mapped(f, out=P()):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P(), P("d")), out_specs=out))


def loss(w, x):
    h, sums = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w) + h, jnp.sum(h)), x, None, length=2)
    h = jax.lax.cond(jnp.sum(h) > 0, lambda h: h * 2, lambda h: jnp.where(h > 0, h, 0.1), h)
    return jax.lax.pmean(jnp.mean(h @ w.T) + jnp.mean(sums), "d")


def near(got, want, bound, *what):
    distance = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    assert distance <= bound, (*what, distance)


names = sw.recipes.CATALOGUE
transforms = dict((name, lambda f, name=name: sw.autoscale(f, name)) for name in names)
transforms["autocast"] = sw.autocast
transforms["emulate"] = lambda f: sw.emulate(f, "fp16")
want = mapped(jax.grad(loss))(W, X)
for transform in transforms.values():  # what fails, fails while it is traced
    assert jax.eval_shape(mapped(jax.grad(transform(loss))), W, X).shape == W.shape
    assert jax.eval_shape(transform(jax.grad(mapped(loss))), W, X).shape == W.shape
near(mapped(jax.grad(transforms["quartet2"](loss)))(W, X), want, 0.5, "of stored blocks")
near(mapped(transforms["autocast"](jax.grad(loss)))(W, X), want, 0.01, "gradient inside")
near(jax.jit(jax.grad(mapped(transforms["fp8"](loss))))(W, X), want, 0.1, "gradient outside")

# stored narrow arrays go in, and gradients are sent narrow
stored = sw.quantize(W, "e4m3fn")
assert jax.eval_shape(mapped(sw.autoscale(loss, "fp8")), stored, X).shape == ()
sent = dataclasses.replace(sw.recipes.fp16, collective="fp16", min_size=1)
total = lambda w, x: jax.lax.psum(x @ w, "d")
near(mapped(sw.autoscale(total, sent))(W, X), mapped(total)(W, X), 1e-2, "collective")

# every_op around a shard_map whose body has a loop
jax.eval_shape(sw.autoscale(mapped(loss), "fp16_every_op"), W, X)

# a training step averages each member's own gradient, once
def model(p, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ p["w"]) @ p["w"].T - x))
step = training.step(model, optax.sgd(1.0), axis_name="d", comm_format="e5m2")
state = step.init({"w": W})
step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
got = W - jax.jit(step)(state, X)[0].params["w"]
near(got, jax.grad(model)({"w": W}, X)["w"], 0.2, "training.step")

# a history made on one device is that of the same program on four, where init makes the same
step = jax.value_and_grad(lambda w, x: model({"w": jax.nn.relu(w)}, x))
delayed = sw.autoscale(step, "fp8_delayed")
history = delayed.init(W, X)
placed = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
w, x = jax.device_put((W, X), (NamedSharding(placed, P()), NamedSharding(placed, P("d"))))
near(jax.jit(delayed.step)(history, w, x)[0][1], jax.jit(step)(W, X)[1], 0.2, "delayed")
there = delayed.init(w, x)
assert there.operand_ids == history.operand_ids
np.testing.assert_allclose(there.amaxes, history.amaxes, rtol=1e-5)
"""


@pytest.mark.parametrize("kinds", ["one", *nightly(["one rows blocks packed"])])
def test_gathered_weights_are_sent_as_they_are_stored(kinds):
    run_on_devices(4, GATHERED.replace("KINDS", repr(kinds)))


GATHERED = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import scalewise as sw

mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
w = jax.random.normal(jax.random.key(0), (128, 128)) * jnp.exp2(jnp.arange(128) % 7.0)[:, None]
x = jax.random.normal(jax.random.key(1), (8, 128))
stored = {
    "one": sw.quantize(w, "e4m3fn"), "rows": sw.quantize(w, "e4m3fn", axis=0),
    "blocks": sw.quantize(w, "mxfp8_e4m3", axis=0), "packed": sw.quantize(w, "nvfp4", axis=1),
}


def gathered(axis, tiled):
    def body(w, x):
        full = jax.lax.all_gather(w, "d", axis=axis, tiled=tiled)
        return jax.lax.pmean(x @ full.reshape(128, 128), "d")

    spec = P("d") if axis == 0 else P(None, "d")
    return jax.shard_map(body, mesh=mesh, in_specs=(spec, P()), out_specs=P())


for name in KINDS.split():
    array = stored[name]
    for axis, tiled in ((0, True), (1, True), (0, False)):
        f = sw.autoscale(gathered(axis, tiled), "bf16")
        lines = jax.jit(f).lower(array, x).compile().as_text().splitlines()
        sent = [line.partition(" all-gather(")[0] for line in lines if " all-gather(" in line]
        types = [t for before in sent for t in re.findall(r"(\\w+)\\[([\\d,]*)\\]", before)]
        numbers = max(types, key=lambda t: np.prod([int(n) for n in t[1].split(",") if n]))
        assert numbers[0] == "u8", (name, axis, tiled, types)
        want = x @ array.value()
        got = f(array, x)
        assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want), (name, axis, tiled)
"""


@pytest.mark.slow
def test_collectives_that_only_move_numbers_send_them_as_they_are_stored():
    run_on_devices(4, MOVED)


MOVED = """
import itertools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import scalewise as sw

# Each kind of scales with some of all axes, tiled or not; scales shared and of each device's own.
mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
W = jax.random.normal(jax.random.key(0), (4, 128, 128))
W = W * jnp.exp2(jnp.arange(128) % 32 - 16.0)[:, None]
W = W * jnp.exp2(8 * jnp.arange(4.0))[:, None, None]
SIZE = W.size // 8  # of the bytes of four-bit codes on one device
kinds = {
    "one": ("e4m3fn", None), "rows": ("e4m3fn", 1), "columns": ("e5m2", 2),
    "blocks": ("mxfp8_e4m3", 1), "packed": ("nvfp4", 2), "six bits": ("mxfp6_e2m3", 2),
}
# the first device gets nothing; none is cut into blocks
ppermute = {"ppermute": lambda w: jax.lax.ppermute(w, "d", [(i, i + 1) for i in range(3)])}
others = {}
for a, t in itertools.product(range(3), (True, False)):
    others[f"gather {a} {t}"] = lambda w, a=a, t=t: jax.lax.all_gather(w, "d", axis=a, tiled=t)
    for b in range(3):
        if t or a == 0:
            others[f"all_to_all {a} {b} {t}"] = (
                lambda w, a=a, b=b, t=t: jax.lax.all_to_all(w, "d", a, b, tiled=t)
            )


def collectives(w):
    return {name: move(w) for name, move in moves.items()}



def sent(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("ppermute", "all_gather", "all_to_all"):
            yield eqn.invars[0].aval
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from sent(inner)


rng = np.random.default_rng(0)
for kind, (fmt, axis) in kinds.items():
    chosen = rng.permutation([*others])[:5]
    moves = ppermute | {name: others[name] for name in chosen}
    out = {name: P("d") for name in moves}

    def own(w):  # quantized by each device
        return sw.autoscale(collectives, "bf16")(sw.quantize(w, fmt, axis=axis))

    def expected(w):
        return collectives(sw.quantize(w, fmt, axis=axis).value())

    def mapped(f, spec, check=True):
        return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=out, check_vma=check)

    spec = (P(), P(None, "d"), P(None, None, "d"))[rng.integers(3)]
    array = sw.quantize(W, fmt, axis=axis)
    given = jax.jit(sw.autoscale(mapped(collectives, spec), "bf16"))
    inside = jax.jit(mapped(own, P(None, "d"), bool(rng.integers(2))))
    pairs = [
        (given, array, jax.jit(mapped(collectives, spec))(array.value())),
        (inside, W, jax.jit(mapped(expected, P(None, "d")))(W)),
    ]
    for f, x, want in pairs:
        got = f(x)
        wrong = [name for name in want if not np.array_equal(got[name], want[name])]
        assert not wrong, (kind, f is given, spec, wrong)
        # numbers are sent in whole blocks and bytes of their own, all others decoded
        numbers = [a for a in sent(jax.make_jaxpr(f)(x).jaxpr) if a.size >= SIZE]
        wide = [a for a in numbers if a.dtype.itemsize > 1]
        cut = kind in ("blocks", "packed", "six bits")
        assert len(numbers) >= 5 and len(wide) <= 3 * cut, (kind, f is given, spec, wide)
"""


@pytest.mark.slow
def test_weights_and_tokens_move_in_half_the_bytes_and_arrive_as_they_are_rounded():
    run_on_devices(8, "from benchmarks import messages\nmessages.main()")
