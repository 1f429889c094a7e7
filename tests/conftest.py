"""Strict harness: no silent promotion of dtypes or ranks anywhere in scalewise."""

import contextlib
import gc
import hashlib
import os
import platform
import tempfile
import time
from pathlib import Path

import jax
import pytest
from jax._src import lru_cache

# Packages and files whose tests run with most of XLA's optimizations off, but with OPTIMIZED in
# make nightly.
QUICK = {"audit", "autocast", "autoscale", "cli", "layers", "planning", "tests", "training"}
QUICK |= {f"scaled/test_{x}" for x in ("operations", "pytree", "scale_kinds", "scaled", "scaling")}
QUICK |= {f"pytorch/test_{x}" for x in ("backward", "control", "edits", "gradients", "programs",
                                        "recipes", "reference")}  # fmt: skip
QUICK = set() if os.environ.get("OPTIMIZED") else QUICK

ROOT = Path(__file__).parents[1]
LONG_EXAMPLES = [ROOT / "src/scalewise" / name for name in ("auditing", "planning")]


def processor() -> str:
    """Returns a name of the kind of processor, by its model and its instructions."""
    about = Path("/proc/cpuinfo")
    if not about.exists():
        return platform.processor() or platform.machine()
    lines = about.read_text().splitlines()
    kind = sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join(kind).encode()).hexdigest()[:12]


# A program that is compiled for other instructions doesn't run, and JAX's key of it says nothing of
# them.
COMPILED = ROOT / ".compiled" / f"jax-{jax.__version__}-{processor()}"


with contextlib.suppress(ImportError):  # torch's tests need no hypothesis
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
    settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def users_promotion(strict_promotion):
    """Users' programs, and those of libraries, have JAX's standard promotion."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def put_atomically(cache, key, value):
    """``LRUCache.put``, which another process may read meanwhile."""
    path = Path(cache.path) / f"{key}-cache"
    if path.exists():
        return
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(value)
    os.replace(file.name, path)


def pytest_configure(config):
    """Keeps compiled programs, those of modules' constants, too, and deletes those of a week ago.

    Most of a run is XLA compiling, much of it what another process or run has compiled before. A
    program is found by its code, the options and the release it was compiled with.
    """
    jax.config.update("jax_compilation_cache_dir", str(COMPILED))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    lru_cache.LRUCache.put = put_atomically
    if hasattr(config, "workerinput"):
        return
    for path in COMPILED.parent.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # another run renames its files
            if path.stat().st_mtime < time.time() - 7 * 24 * 3600:
                path.unlink()


@pytest.fixture(scope="module", autouse=True)
def compiled_for_one_file(request):
    """Leaves LLVM's expensive passes out where hundreds of programs run a few times each.

    XLA's own rewriting and fusing stay. Tests of single roundings, which have to hold in the code
    that users run, are not among them, and share no compiled program with them.

    Programs of other files are deleted: they took gigabytes, and a tenth of a run went into
    Python's search for garbage among them.
    """
    package = request.path.parent.name
    quick = bool(QUICK & {package, f"{package}/{request.path.stem}"})
    with pytest.MonkeyPatch.context() as patch:
        if quick:
            patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # in processes that a test starts
        jax.config.update("jax_disable_most_optimizations", quick)
        yield
    jax.clear_caches()
    gc.collect()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leaves the examples in docstrings of the audit and of plans to ``make nightly``: each of them
    runs a program many times."""
    for item in items:
        if any(map(item.path.is_relative_to, LONG_EXAMPLES)):
            item.add_marker("slow")
