"""The core runs without the packages of the extras, and errors name the extra to install."""

import subprocess
import sys

import pytest

BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.partition(".")[0])
sys.meta_path.insert(0, Blocked())
"""
TRAIN = ["optax", "orbax"]
TORCH = ["torch"]
REPORTS = ["rich", "typer", "jinja2"]


def ran(code, *blocked):
    source = BLOCK.format(blocked=list(blocked)) + code
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)


def test_arrays_and_transformations_need_jax_alone():
    code = """
import jax.numpy as jnp, scalewise as sw
x = jnp.linspace(-3, 3, 12).reshape(3, 4)
f = lambda x: jnp.tanh(x @ x.T)
print(sw.round_to(500.0, "e4m3fn", saturate=True), sw.quantize(x, "mxfp8_e4m3").scale.shape)
print(sw.autoscale(f, "fp8")(x).shape, sw.emulate(f, "fp16")(x).shape, sw.ops.l2_norm(x).dtype)
print(sw.autocast(f, "bf16")(x).dtype, sw.formats.E4M3FN.max)
"""
    done = ran(code, *TRAIN, *REPORTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("448.0 ")


@pytest.mark.slow
def test_the_audit_needs_no_optax():
    code = """
import jax.numpy as jnp, scalewise as sw
print(sw.audit(lambda x: jnp.sum(x * x), "fp16", trials=0)(jnp.full(3, 300.0)).unfixed[0].kind)
"""
    done = ran(code, *TRAIN)
    assert done.stdout.strip() == "overflow", done.stderr


WHERE = '"scalewise[{}] @ git+https://github.com/scalewise/scalewise"'


NEEDS = {
    "training": ("optax", WHERE.format("train")),
    "torch": ("torch", WHERE.format("torch")),
    "layers.nnx": ("flax", "flax"),
    "layers.linen": ("flax", "flax"),
    "layers.equinox": ("equinox", "equinox"),
}


def test_the_error_says_what_to_install():
    code = f"""
import importlib, scalewise as sw
for name in {list(NEEDS)}:
    try:
        module = importlib.import_module(f"scalewise.{{name}}")
        module.step
    except ImportError as error:
        print(error)
"""
    want = [f"scalewise.{k} needs {v}: pip install {package}" for k, (v, package) in NEEDS.items()]
    assert ran(code, *TRAIN, *TORCH, "flax", "equinox").stdout.splitlines() == want


def test_a_command_says_what_to_install():
    code = "sys.argv[1:] = ['compare', 'gpt']; from scalewise.cli import main; main()"
    done = ran(code, *TRAIN)
    assert done.returncode == 2
    message = f"scalewise: scalewise.training needs optax: pip install {WHERE.format('train')}"
    assert done.stderr.strip() == message
