"""Run folders that are killed, filled up, swapped or shared: none may end in another state.

Every case resumes a damaged run of ``scalewise train`` and compares the digest of its last state
and its metrics with those of a run that nothing happened to. A run may also be refused by name; it
may never end elsewhere, lose a checkpoint, show a traceback, or leave a temporary file.

    python -m proofs.fuzz folders --count 100

A kill is a copy of the folder as it is at some operation on a file; a full or broken disk is an
error of the operating system at such an operation, or a limit on the size of files. Kills of real
processes are in ``proofs.resume``.
"""

from __future__ import annotations

import atexit
import errno
import io
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from proofs.fuzz.cases import run_case
from scalewise import training
from scalewise.training import CheckpointError, InputError, Program, TrainingError

from .files import damaged as damaged_bytes
from .files import dumped

OPTIMIZER = optax.sgd(1e-2, momentum=0.9)
STEPS, BEFORE, EVERY, KEEP = 12, 10, 2, 5
REFUSALS = (InputError, CheckpointError, TrainingError, OSError)
WIDTH = 24


def init(seed: int) -> Any:
    params = {"w": jax.random.normal(jax.random.key(seed), (WIDTH, WIDTH))}
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def loss_of(params: Any, batch: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"]) - batch))


def train_step(state: Any, batch: Any) -> Any:
    raise AssertionError("train builds its own step from loss_of")


def batches(data: bytes, seed: int) -> Iterator[Any]:
    random = np.random.default_rng(seed)
    while True:
        yield random.normal(size=(4, WIDTH)).astype(np.float32)


def program(at: int = 0, action: Callable[[], None] | None = None) -> Program:
    """The program; ``action`` is called before the batch of step ``at`` is made."""

    def acting(data: bytes, seed: int) -> Iterator[Any]:
        for number, batch in enumerate(batches(data, seed), 1):
            if number == at and action is not None:
                action()
            yield batch

    return Program("tiny", init, train_step, acting, loss_of, OPTIMIZER)


def run(out: Path, program: Program, **changes: Any) -> tuple[training.Trained, str]:
    """How a run in a folder ended, and what it printed."""
    console = Console(file=io.StringIO(), width=200)
    options = {"steps": STEPS, "every": EVERY, "keep": KEEP, "resume": True} | changes
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        ended = training.train(program, data=b"x", out=out, console=console, **options)
    return ended, console.file.getvalue()  # type: ignore


def figures(out: Path) -> list[tuple]:
    """The metrics without times."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["scale"], r["skipped"]) for r in rows]


@cache
def base() -> tuple[Path, str, list[tuple]]:
    """A folder with a run of ten steps; digest and metrics of the run of twelve."""
    root = Path(tempfile.mkdtemp(prefix="scalewise-fuzz-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    whole, _ = run(root / "whole", program())
    run(root / "base", program(), steps=BEFORE)
    return root / "base", whole.digest, figures(root / "whole")


# -- operations on files -----------------------------------------------------------------------

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}
_watching: list[Callable[[], None]] = []


def _hook(event: str, arguments: tuple) -> None:
    if _watching and event in EVENTS:
        _watching[-1]()


@contextmanager
def at_operation(folder: Path, number: int, action: Callable[[], None]) -> Iterator[None]:
    """Calls ``action`` once, at operation ``number`` on a file after the folder has come to be."""
    if not base.__dict__.get("hooked"):
        sys.addaudithook(_hook)  # can't be removed again
        base.__dict__["hooked"] = True
    count = 0

    def counted() -> None:
        nonlocal count
        if not folder.exists():
            return
        count += 1
        if count == number:
            _watching.pop()
            action()

    _watching.append(counted)
    try:
        yield
    finally:
        if _watching:
            _watching.pop()


# -- the kinds of cases ------------------------------------------------------------------------


def killed(rng: random.Random, folder: Path) -> list[str]:
    """The folder as a kill would leave it at some moment of a new or of a resumed run."""
    whole, snapshot = folder / "run", folder / "killed"
    if rng.random() < 0.5:
        shutil.copytree(base()[0], whole)

    def copy() -> None:
        shutil.copytree(whole, snapshot, symlinks=True)

    with at_operation(whole, int(2 ** rng.uniform(0, 9)), copy):
        run(whole, program())
    return ends_alike(snapshot) if snapshot.exists() else ends_alike(whole)


def interrupted(rng: random.Random, folder: Path) -> list[str]:
    """SIGINT or SIGTERM at some step, twice."""
    out = folder / "run"
    for first in (2, 7):  # the first batch is made before signals are held
        number = rng.choice((signal.SIGTERM, signal.SIGINT))
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        before = signal.signal(number, handler)  # a shell's background job ignores some
        at = rng.randrange(first, first + 5)
        try:
            ended, _ = run(out, program(at, lambda n=number: signal.raise_signal(n)))
        finally:
            signal.signal(number, before)
        if (ended.interrupted, ended.signal) != (True, number):
            return [f"signal {number} at step {at} was not heeded: {ended.signal}"]
    return ends_alike(out)


def disk_full(rng: random.Random, folder: Path) -> list[str]:
    """Errors at some operation on a file, or files that can't grow; then the disk is whole."""
    out = folder / "run"
    if rng.random() < 0.5:
        shutil.copytree(base()[0], out)
    number, code = int(2 ** rng.uniform(0, 9)), rng.choice((errno.ENOSPC, errno.EIO, errno.EROFS))

    def fail() -> None:
        raise OSError(code, "injected")

    failures = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    limited = rng.random() < 0.5
    at = rng.randrange(1, STEPS + 1)

    def limit() -> None:
        # files of the size that they have can't grow: metrics, or the arrays of a checkpoint
        size = rng.choice((0, 40, 300, 700, 2000))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    try:
        with at_operation(out, 10**9 if limited else number, fail):
            run(out, program(at, limit) if limited else program())
    except REFUSALS as error:
        if "\n" in str(error):
            failures.append(f"an error of several lines: {error}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return failures + (lines_are_whole(out) if out.exists() else []) + ends_alike(out)


def lines_are_whole(out: Path) -> list[str]:
    """A full disk leaves no half line."""
    file = out / "metrics.jsonl"
    content = file.read_bytes() if file.exists() else b""
    return [] if not content or content.endswith(b"\n") else [f"half a line: {content[-80:]!r}"]


def swapped(rng: random.Random, folder: Path) -> list[str]:
    """Checkpoints under each other's names, damaged, and with parts of each other."""
    out = folder / "run"
    shutil.copytree(base()[0], out)
    checkpoints = out / "checkpoints"
    before = len(list(checkpoints.iterdir()))
    for _ in range(rng.randrange(1, 4)):
        a, b = rng.sample([p for p in checkpoints.iterdir() if p.name.isdigit()], 2)
        rng.choice(DAMAGE)(rng, a, b)
    before = max(before, len(list(checkpoints.iterdir())))
    return ends_alike(out, refused="is whole", checkpoints=before)


def _exchange(rng: random.Random, a: Path, b: Path) -> None:
    aside = a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def _exchange_parts(rng: random.Random, a: Path, b: Path) -> None:
    part = rng.choice(("meta", "state"))
    if (a / part).exists() and (b / part).exists():
        _exchange(rng, a / part, b / part)


def _copy(rng: random.Random, a: Path, b: Path) -> None:
    target = rng.choice((b, b.with_name(str(BEFORE + rng.randrange(1, 30)))))
    _remove(target)
    shutil.copytree(a, target, symlinks=True) if a.is_dir() else shutil.copy(a, target)


def _link(rng: random.Random, a: Path, b: Path) -> None:
    target = rng.choice((b, b.with_name(str(BEFORE + rng.randrange(1, 30)))))
    if a.resolve() != target.resolve():
        _remove(target)
        target.symlink_to(a.name)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _damage_meta(rng: random.Random, a: Path, b: Path) -> None:
    file = a / "meta" / "metadata"
    if file.is_file():
        whole = base()[0] / "checkpoints" / rng.choice(("8", "10")) / "meta" / "metadata"
        meta = json.loads(whole.read_bytes())
        junk = dumped(meta, rng, rng.choice((0.05, 0.3, 1.0))).encode("utf-8", "replace")
        file.write_bytes(rng.choice((junk, junk, b"", b"null", b"\xff", b"[" * 100_000)))


def _damage_file(rng: random.Random, a: Path, b: Path) -> None:
    files = sorted(p for p in a.rglob("*") if p.is_file() and "commit" not in p.name)
    if not files:
        return
    file = rng.choice(files)
    content = damaged_bytes(file.read_bytes(), rng)
    file.unlink()
    kind = rng.randrange(4)
    if kind == 0:
        file.mkdir()
    elif kind > 1:
        file.write_bytes(content)


def _damage_folder(rng: random.Random, a: Path, b: Path) -> None:
    part = rng.choice((a, a / "meta", a / "state"))
    _remove(part)
    kind = rng.randrange(4) if part != a else rng.randrange(2)
    if kind == 0:
        part.mkdir(parents=True)
    elif kind == 1:
        part.parent.mkdir(exist_ok=True)
        part.write_text("something else")


DAMAGE = (
    _exchange, _exchange, _copy, _copy, _link, _exchange_parts,
    _damage_meta, _damage_meta, _damage_file, _damage_file, _damage_folder,
)  # fmt: skip


def other_files(rng: random.Random, folder: Path) -> list[str]:
    """A damaged run.json; metrics with half lines, foreign ones, and lines of later steps."""
    out = folder / "run"
    shutil.copytree(base()[0], out)
    if rng.random() < 0.5:
        text = dumped(json.loads((out / "run.json").read_text()), rng, rng.choice((0.1, 1.0)))
        (out / "run.json").write_text(rng.choice((text, "", "null")), "utf-8", "replace")
        return ends_alike(out, refused=str(out))
    ours = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    later = b'{"step": 11, "loss": 7.0, "scale": 1.0, "skipped": 0, "ms": 1}\n'
    foreign = (b"\xff\n", b"null\n", b"[" * 5000 + b"\n", b'{"step": "x"}\n', ours[2], later)
    for _ in range(rng.randrange(1, 4)):
        ours.insert(rng.randrange(len(ours) + 1), rng.choice(foreign))
    (out / "metrics.jsonl").write_bytes(b"".join([*ours, rng.choice((b"", later[:30]))]))
    return ends_alike(out)


def shared(rng: random.Random, folder: Path) -> list[str]:
    """A second run in the same folder, in the middle of the first."""
    out = folder / "run"
    if rng.random() < 0.5:
        shutil.copytree(base()[0], out)
    said: list[str] = []

    def second() -> None:
        try:
            run(out, program(), resume=rng.random() < 0.7)
            said.append("ended")
        except InputError as error:
            said.append(str(error))

    ended, _ = run(out, program(rng.randrange(2, STEPS + 1), second))
    missing = [] if said and all("in use" in s or "isn't empty" in s for s in said) else [str(said)]
    wrong = [] if ended.digest == base()[1] else ["another state"]
    return missing + wrong + ends_alike(out)


def ends_alike(out: Path, refused: str = "", checkpoints: int = 0) -> list[str]:
    """Resumes a run; how its end differs from that of a run that nothing happened to.

    Args:
        out: the run's folder.
        refused: what the refusal says, if the run may be refused.
        checkpoints: entries of the checkpoints' folder, none of which may be lost.
    """
    unraised: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, unraised.append
    before = {p.name for p in (out / "checkpoints").iterdir()} if checkpoints else set()
    try:
        ended, said = run(out, program(), keep=1000)
    except InputError as error:
        if not refused or refused not in str(error) or "\n" in str(error):
            return [f"refused: {error}"]
        same = not checkpoints or before == {p.name for p in (out / "checkpoints").iterdir()}
        return [] if same else ["refused, and checkpoints are gone"]
    finally:
        sys.unraisablehook = hook
    _, digest, metrics = base()
    failures = [f"a traceback: {u}" for u in unraised]
    if ended.digest != digest or ended.steps != STEPS:
        failures.append(f"another state, of step {ended.steps}; it said {said!r}")
    if figures(out) != metrics:
        failures.append(f"other metrics: {figures(out)}")
    failures += [f"{p.name} is left" for p in out.rglob(".scalewise-*")]
    failures += [f"{p} is left" for p in (out / ".lock",) if p.exists()]
    if checkpoints and len(list((out / "checkpoints").iterdir())) < checkpoints:
        failures.append(f"a checkpoint is gone; it said {said!r}")
    return failures


KINDS = (
    swapped, killed, swapped, disk_full, swapped, shared, swapped, other_files, disk_full,
    interrupted,
)  # fmt: skip


def check(seed: int, index: int) -> list[str]:
    """Makes folder number ``index`` of a seed and resumes it; the failures, a sentence each."""
    base()
    return run_case("folders", KINDS, seed, index)
