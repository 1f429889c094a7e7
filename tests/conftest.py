"""Strict harness: no silent promotion of dtypes or ranks anywhere in scalewise."""

import os
from collections import Counter

import jax
import pytest

# Packages whose tests run with most of XLA's optimizations off, unless `make prove` asks for them.
QUICK = (
    set() if os.environ.get("OPTIMIZED") else {"autocast", "autoscale", "cli", "layers", "training"}
)


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


def sample(cases, count):
    """Returns ``count`` cases that between them have the most values of each parameter."""
    values = [getattr(case, "callspec", None) for case in cases]
    values = [set(spec.indices.items()) if spec else set() for spec in values]
    # multiples of the golden ratio, modulo 1: any number of the first ones is spread out
    spread = [int(i * 0.6180339887 % 1 * len(cases)) for i in range(2 * len(cases))]
    rest, seen, chosen = list(dict.fromkeys([*spread, *range(len(cases))])), Counter(), []
    for _ in range(min(count, len(cases))):
        case = min(rest, key=lambda i: sum(seen[value] for value in values[i]))
        rest.remove(case)
        seen.update(values[case])
        chosen.append(cases[case])
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as ``gate`` the cases of ``thorough`` tests that ``make test`` leaves out.

    Of a test marked ``thorough(keep=k)``, k cases stay; without ``keep``, none.
    """
    cases = {}
    for item in items:
        if item.get_closest_marker("thorough"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        keep = group[0].get_closest_marker("thorough").kwargs.get("keep", 0)
        kept = sample(group, keep)
        for item in group:
            if item not in kept:
                item.add_marker("gate")
