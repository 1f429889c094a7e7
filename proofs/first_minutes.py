"""From a clone to one's own training steps in FP8: seconds, and lines changed.

    python -m proofs.first_minutes

Clones this repository, installs it with the frameworks into a new environment, and runs five
training steps, written as users write them, in float32 and under `autoscale`: plain JAX with optax,
a Flax NNX model with batch norm and dropout, an Equinox model, one of Keras, and one of torch, all
of the same size. Fails if FP8's loss isn't close to float32's after 60 steps.
"""

import difflib
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DATA = """
x = jax.random.normal(jax.random.key(1), (256, 32))
y = jax.random.randint(jax.random.key(2), (256,), 0, 10)
for i in range(60):
    {step}
print(float(loss))
"""
PLAIN = """\
import jax, jax.numpy as jnp, optax

def loss_of(params, x, y):
    h = jax.nn.gelu(x @ params["up"] + params["bias"])
    return optax.softmax_cross_entropy_with_integer_labels(h @ params["down"], y).mean()

optimizer = optax.adamw(1e-2)

def train_step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

train_step = jax.jit(train_step)
k = jax.random.split(jax.random.key(0))
params = {"up": jax.random.normal(k[0], (32, 128)) / 6, "bias": jnp.zeros(128),
          "down": jax.random.normal(k[1], (128, 10)) / 11}
state = optimizer.init(params)
"""
NNX = """\
import jax, optax
from flax import nnx

class Model(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(128, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.gelu(self.norm(self.up(x)))))

def loss_of(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, grads)
    return loss

train_step = nnx.jit(train_step)
model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
"""
EQUINOX = """\
import equinox as eqx, jax, optax

model = eqx.nn.MLP(32, 10, 128, 2, key=jax.random.key(0))
optimizer = optax.adamw(1e-2)

def loss_of(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()

def train_step(model, state, x, y):
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, x, y)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss

train_step = eqx.filter_jit(train_step)
state = optimizer.init(eqx.filter(model, eqx.is_array))
"""
KERAS = """\
import os
os.environ["KERAS_BACKEND"] = "jax"
import jax, keras

model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(128, "gelu"),
                          keras.layers.BatchNormalization(), keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam(1e-2)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def train_step(params, rest, moments, x, y):
    def loss_and_rest(params):
        logits, new = model.stateless_call(params, rest, x, training=True)
        return loss_of(y, logits), new

    (loss, rest), grads = jax.value_and_grad(loss_and_rest, has_aux=True)(params)
    params, moments = optimizer.stateless_apply(moments, grads, params)
    return params, rest, moments, loss

train_step = jax.jit(train_step)
params, rest, moments = ([v.value for v in variables] for variables in (
    model.trainable_variables, model.non_trainable_variables, optimizer.variables))
"""
TORCH = """\
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

def train_step(x, y):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()

x, y = torch.randn(256, 32), torch.randint(0, 10, (256,))
for i in range(60):
    loss = train_step(x, y)
print(float(loss))
"""
JAX_LOOP = {
    "plain JAX": (PLAIN, "params, state, loss = train_step(params, state, x, y)"),
    "Flax NNX": (NNX, "loss = train_step(model, optimizer, x, y)"),
    "Equinox": (EQUINOX, "model, state, loss = train_step(model, state, x, y)"),
    "Keras": (KERAS, "params, rest, moments, loss = train_step(params, rest, moments, x, y)"),
}


def in_fp8(program: str) -> str:
    """Returns the program with two lines changed."""
    scaled = re.sub(r"(jit)\(train_step\)", r'\1(sw.autoscale(train_step, "fp8"))', program)
    if scaled != program:
        return f"import scalewise as sw\n{scaled}"
    wrapped = 'model = st.autoscale(model, "fp8")\noptimizer ='
    return f"import scalewise.torch as st\n{program.replace('optimizer =', wrapped, 1)}"


def run(*command: object) -> tuple[float, str]:
    start = time.perf_counter()
    found = subprocess.run([str(c) for c in command], check=True, stdout=subprocess.PIPE, text=True)
    return time.perf_counter() - start, found.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clone, python = folder / "scalewise", folder / "venv/bin/python"
        total, _ = run("git", "clone", "--quiet", Path(__file__).parents[1], clone)
        total += run(sys.executable, "-m", "venv", folder / "venv")[0]
        packages = (f"{clone}[train,torch]", "flax", "equinox", "keras")
        total += run(python, "-m", "pip", "install", "--quiet", "--editable", *packages)[0]
        print(f"clone and installation: {total:.0f} s", flush=True)
        programs = {n: start + DATA.format(step=step) for n, (start, step) in JAX_LOOP.items()}
        for title, wide in {**programs, "torch": TORCH}.items():
            narrow = in_fp8(wide)
            diff = difflib.ndiff(wide.splitlines(), narrow.splitlines())
            changed = [line[2:] for line in diff if line[:1] in "+-"]
            losses = {}
            for name, text in (("float32", wide), ("fp8", narrow)):
                (folder / "program.py").write_text(text)
                seconds, printed = run(python, folder / "program.py")
                losses[name] = float(printed)
                total += seconds if name == "fp8" else 0
            print(f"{title}: {len(changed)} lines changed ({'; '.join(changed)}); loss "
                  f"{losses['float32']:.4g} in float32, {losses['fp8']:.4g} in FP8; "
                  f"{total:.0f} s since the clone", flush=True)  # fmt: skip
            if not abs(losses["fp8"] - losses["float32"]) < 0.01:
                sys.exit(f"{title}: FP8 trains to another loss")


if __name__ == "__main__":
    main()
