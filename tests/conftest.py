"""Strict harness: no silent promotion of dtypes or ranks anywhere in scalewise."""

import contextlib
import os
import platform
import tempfile
import time
from collections import Counter
from pathlib import Path

import jax
import pytest
from jax._src import lru_cache

# Packages whose tests run with most of XLA's optimizations off, unless `make prove` asks for them.
QUICK = {"autocast", "autoscale", "cli", "layers", "planning", "tests", "training"}
QUICK = set() if os.environ.get("OPTIMIZED") else QUICK

ROOT = Path(__file__).parents[1]
LONG_EXAMPLES = [ROOT / "src/scalewise" / name for name in ("auditing", "planning")]
# Compiled programs, of this machine: one that is compiled for other instructions doesn't run.
COMPILED = ROOT / ".compiled" / platform.node()


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_once():
    """Most of a run is XLA compiling, much of it what another process or run has compiled before.

    A program is found by its code, the options and the release it was compiled with.
    """
    jax.config.update("jax_compilation_cache_dir", str(COMPILED))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lru_cache.LRUCache, "put", put_atomically)
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
    """Deletes what was compiled more than a week ago."""
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(LeftOut())
    for path in COMPILED.iterdir() if COMPILED.exists() else ():
        with contextlib.suppress(FileNotFoundError):  # another run renames its files
            if path.stat().st_mtime < time.time() - 7 * 24 * 3600:
                path.unlink()


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
    """Marks as ``gate`` the cases of ``thorough`` tests that ``make test`` leaves out, and as
    ``slow`` those that the gate leaves out.

    Of a test marked ``thorough(keep=k, gate=g)``, k cases stay in ``make test`` (without ``keep``,
    none) and g others run in the gate. Of what remains of a file's tests without ``gate``, the gate
    runs a thirtieth. The examples in docstrings of the audit and of plans, each of which runs a
    program many times, run in the gate.
    """
    tests, pools = {}, {}
    for item in items:
        if item.get_closest_marker("thorough"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        elif any(map(item.path.is_relative_to, LONG_EXAMPLES)):
            item.add_marker("gate")
    for name, cases in tests.items():
        options = cases[0].get_closest_marker("thorough").kwargs
        kept = sample(cases, options.get("keep", 0))
        pool = (name, options["gate"]) if "gate" in options else (cases[0].path, None)
        pools.setdefault(pool, []).extend(case for case in cases if case not in kept)
    for (_, count), cases in pools.items():
        gate = sample(cases, -(-len(cases) // 30) if count is None else count)
        for case in cases:
            case.add_marker("gate" if case in gate else "slow")


LEFT_OUT = pytest.StashKey[set]()


def pytest_deselected(items):
    """Remembers tests whose cases are all ``slow``; a worker of pytest-xdist sends their names."""
    if items:
        config = items[0].config
        names = {item.nodeid.partition("[")[0] for item in items}
        names -= {x.nodeid.partition("[")[0] for x in items if not x.get_closest_marker("slow")}
        config.stash[LEFT_OUT] = names
        getattr(config, "workeroutput", {})["left_out"] = sorted(names)


class LeftOut:
    """Lists, under the results, the tests of which no case ran because all are ``slow``."""

    def __init__(self):
        self.ran = set()

    def pytest_runtest_logreport(self, report):
        self.ran.add(report.nodeid.partition("[")[0])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        names = getattr(node, "workeroutput", {}).get("left_out", ())
        node.config.stash.setdefault(LEFT_OUT, set()).update(names)

    def pytest_terminal_summary(self, terminalreporter, config):
        left = sorted(config.stash.get(LEFT_OUT, set()) - self.ran)
        if left:
            terminalreporter.section(f"{len(left)} tests left to make prove")
            terminalreporter.write_line("\n".join(left))
