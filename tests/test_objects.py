"""Public objects are values: copied, pickled, hashed, compared, in threads and forked processes."""

import copy
import inspect
import multiprocessing
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

import scalewise as sw
from arrays import normal

NAMES = re.findall(r" as (\w+)", Path(sw.__file__).with_suffix(".pyi").read_text())
MODULES = [sw, *(m for m in (getattr(sw, n) for n in NAMES) if inspect.ismodule(m))]
# their attributes are functions, which have no equality beyond identity
OF_FUNCTIONS = {"Algebra", "PrimitiveRule", "RuleTable", "Method", "ScaleRule"}


def public():
    """Returns the public objects that aren't functions, classes or modules, those in tables, and
    one of each class that needs no argument."""
    found = {}
    for module in MODULES:
        for name in dir(module):
            value = getattr(module, name)
            if name.startswith("_") or inspect.ismodule(value) or inspect.isroutine(value):
                continue
            if inspect.isclass(value):
                try:
                    parameters = inspect.signature(value).parameters.values()
                except ValueError:
                    continue
                needed = [p for p in parameters if p.default is p.empty and p.kind < 2]
                value = [] if needed or inspect.isabstract(value) else [value]
                value = [cls() for cls in value if cls.__init__ is not object.__init__]
            elif isinstance(value, dict):
                value = list(value.values())
            for x in value if isinstance(value, list) else [value]:
                own = type(x).__module__.startswith("scalewise")
                if own and type(x).__name__ not in OF_FUNCTIONS and not isinstance(x, Exception):
                    found.setdefault(f"{type(x).__name__}-{getattr(x, 'name', name)}-{name}", x)
    return found


OBJECTS = public()


def test_the_objects_are_those_that_users_make():
    kinds = {type(x).__name__ for x in OBJECTS.values()}
    assert len(OBJECTS) > 100
    assert kinds >= {"Format", "BlockFormat", "Recipe", "Policy", "Rounding", "Device", "Amax",
                     "Delayed", "DynamicLossScale", "StaticLossScale"}  # fmt: skip


def test_copies_are_equal_and_hash_alike():
    for name, x in OBJECTS.items():
        for copied in (pickle.loads(pickle.dumps(x)), copy.copy(x), copy.deepcopy(x)):
            assert type(copied) is type(x), name
            if type(x).__eq__ is not object.__eq__:
                assert copied == x, name
                if type(x).__hash__ is not None:
                    assert hash(copied) == hash(x), name
        assert x != "another", name


def test_a_report_is_copied():
    report = sw.audit(lambda x: jnp.sqrt(jnp.sum(x * x)), "fp16", trials=2)(jnp.full(4096, 16.0))
    for copied in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert copied.verdict == report.verdict
        assert str(copied) == str(report)


def test_objects_of_one_class_that_print_alike_are_equal():
    values = list(OBJECTS.values())
    for x in values:
        for y in values:
            if type(x) is type(y) and type(x).__eq__ is not object.__eq__:
                assert (x == y) == (repr(x) == repr(y)), (x, y)


X = normal(0, (8, 32))
STORED = {
    "scaled": lambda: sw.quantize(X, "e4m3fn"),
    "blocks": lambda: sw.quantize(X, "mxfp8_e4m3"),
    "packed": lambda: sw.quantize(X, "nvfp4"),
    "no scale": lambda: sw.ScaledArray(X, None),
    "state": lambda: sw.autoscale(
        lambda x: x, sw.Recipe(state=((".*", sw.Storage("fp16", root=2)),))
    )(jnp.abs(X)),
}


@pytest.mark.parametrize("name", STORED)
def test_stored_arrays_are_copied_and_serialised(name):
    stored = STORED[name]()
    tree = {"w": stored}
    target = jax.tree.map(jnp.zeros_like, tree)
    for got in (
        copy.deepcopy(tree),
        pickle.loads(pickle.dumps(tree)),
        serialization.from_bytes(target, serialization.to_bytes(tree)),
    ):
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(tree), strict=True):
            assert a.dtype == b.dtype
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_four_threads_compute_as_one():
    def f(w, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ w)))

    w = normal(1, (32, 32))
    makers = (
        lambda: jax.jit(sw.autoscale(jax.grad(f), "fp8"))(w, X),
        lambda: jax.jit(sw.autocast(jax.grad(f), "bf16"))(w, X),
        lambda: sw.emulate(jax.grad(f), "fp16")(w, X),
        lambda: sw.quantize(X, "mxfp8_e4m3").value(),
    )
    alone = [np.asarray(make()) for make in makers]
    jax.clear_caches()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda make: np.asarray(make()), makers * 2))
    for got, want in zip(together, alone * 2, strict=True):
        np.testing.assert_array_equal(got, want)


def _decode(queue):
    fmt = sw.format("e4m3fn")
    queue.put((fmt, fmt.encode(np.array([1.06, 500.0]), rounding="nearest_even").tolist()))


@pytest.mark.filterwarnings("ignore:.*fork")
def test_formats_work_in_a_forked_process():
    """JAX doesn't run in a forked process; formats need only NumPy."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_decode, args=(queue,))
    process.start()
    got = queue.get(timeout=60)
    process.join()
    assert got == (
        sw.format("e4m3fn"),
        sw.format("e4m3fn").encode(np.array([1.06, 500.0])).tolist(),
    )
