"""Strict harness: no silent promotion of dtypes or ranks anywhere in scalewise."""

import os

import jax
import pytest

# Packages whose tests run with most of XLA's optimizations off, unless `make prove` asks for them.
QUICK = set() if os.environ.get("OPTIMIZED") else {"autocast", "autoscale", "cli", "training"}


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Most of a run is XLA compiling, much of it what this process has compiled before.

    The folder is the process's own: entries aren't written atomically.
    """
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def quick_compiles(request, monkeypatch):
    """Leaves LLVM's expensive passes out where hundreds of programs run a few times each.

    XLA's own rewriting and fusing stay. Tests of single roundings, which have to hold in the code
    that users run, are not among them, and share no compiled program with them.
    """
    quick = request.path.parent.name in QUICK
    if quick:
        monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # in processes that a test starts
    if quick != jax.config.read("jax_disable_most_optimizations"):
        jax.config.update("jax_disable_most_optimizations", quick)
        jax.clear_caches()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as ``gate`` the cases of ``thorough`` tests that ``make test`` leaves out.

    Of a test marked ``thorough(keep=k)``, k cases stay, evenly spaced; without ``keep``, none.
    """
    cases = {}
    for item in items:
        if item.get_closest_marker("thorough"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        keep = group[0].get_closest_marker("thorough").kwargs.get("keep", 0)
        kept = {i * len(group) // keep for i in range(keep)}
        for i, item in enumerate(group):
            if i not in kept:
                item.add_marker("gate")
