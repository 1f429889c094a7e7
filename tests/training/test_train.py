"""train: interrupts, kills, full disks, damaged checkpoints and invalid arguments."""

import errno
import io
import json
import math
import os
import resource
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from proofs.resume import prove
from rich.console import Console

from scalewise import training
from scalewise.training import CheckpointError, InputError, Program, TrainingError

OPTIMIZER = optax.adamw(1e-2)
WIDTH = 48


pytestmark = pytest.mark.usefixtures("users_promotion")


def init(seed):
    params = {"w": 0.1 * jax.random.normal(jax.random.key(seed), (WIDTH, WIDTH))}
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def loss_of(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"]) - batch))


def train_step(state, batch):
    raise NotImplementedError("train makes its own")


def batches(data, seed):
    random = np.random.default_rng(seed)
    while True:
        yield random.normal(size=(4, WIDTH)).astype(np.float32)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax

OPTIMIZER = optax.sgd(1e-2, momentum=0.9)

def init(seed):
    params = {"w": jax.random.normal(jax.random.key(seed), (8, 8))}
    return {"params": params, "optimizer": OPTIMIZER.init(params)}

def loss_of(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"]) - batch))

def train_step(state, batch):
    raise NotImplementedError

def batches(data, seed):
    random = np.random.default_rng(seed)
    while True:
        yield random.normal(size=(4, 8)).astype(np.float32)
"""
TINY = Program("tiny", init, train_step, batches, loss_of, OPTIMIZER)


def run(out, method="autocast-fp16", program=TINY, **changes):
    console = Console(file=io.StringIO(), width=100)
    arguments = {"data": b"x" * 9, "steps": 12, "every": 4, "out": out} | changes
    try:
        ended = training.train(program, method, console=console, **arguments)
    finally:
        run.said = console.file.getvalue()
    return ended


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def figures(out):
    return [(r["step"], r["loss"], r["scale"], r["skipped"]) for r in rows(out)]


def saved(out):
    return sorted(int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit())


@pytest.mark.parametrize("method", ["autocast-fp16", "five-bytes", "fp8_delayed"])
@pytest.mark.thorough(keep=1)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, method):
    whole = run(tmp_path / "whole", method)
    run(tmp_path / "parts", method, steps=7)
    parts = run(tmp_path / "parts", method, resume=True)
    assert parts.digest == whole.digest
    assert parts.loss == whole.loss
    assert figures(tmp_path / "parts") == figures(tmp_path / "whole")
    assert "resumed after step 7" in run.said
    assert parts.steps == whole.steps == 12
    assert saved(tmp_path / "whole") == [4, 8, 12]


def test_a_finished_run_that_is_resumed_has_the_same_result(tmp_path):
    whole = run(tmp_path / "run", "float32", steps=4)
    again = run(tmp_path / "run", "float32", steps=4, resume=True)
    assert (again.loss, again.digest, again.steps) == (whole.loss, whole.digest, 4)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run(None)
    assert list(tmp_path.iterdir()) == []
    assert ended.folder == ""
    assert ended.digest == run(tmp_path / "run").digest


def test_the_losses_equal_those_of_the_step(tmp_path):
    run(tmp_path / "run", "float32")
    params = init(0)["params"]
    state, losses = OPTIMIZER.init(params), []
    for _, batch in zip(range(12), batches(b"", 0), strict=False):
        loss, g = jax.value_and_grad(loss_of)(params, batch)
        updates, state = OPTIMIZER.update(g, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    np.testing.assert_allclose([r["loss"] for r in rows(tmp_path / "run")], losses, rtol=1e-5)


@pytest.mark.slow
def test_a_kill_at_any_moment_changes_no_bit(tmp_path):
    """One kill here; `python -m proofs.resume` makes twenty."""
    (tmp_path / "tiny.py").write_text(PROGRAM)
    program = str(tmp_path / "tiny.py")
    arguments = [program, "--method", "autocast-fp16", "--steps", "10", "--every", "2"]
    assert prove(arguments, kills=1, seed=1, folder=tmp_path)["kills"] == 1


def test_an_interrupted_run_is_saved(tmp_path):
    def interrupted(data, seed):
        for number, batch in enumerate(batches(data, seed)):
            if number == 5:
                raise KeyboardInterrupt
            yield batch

    program = Program("tiny", init, train_step, interrupted, loss_of, OPTIMIZER)
    ended = run(tmp_path / "run", program=program)
    assert ended.interrupted
    assert (ended.steps, saved(tmp_path / "run")) == (5, [4, 5])
    whole = run(tmp_path / "whole")
    assert run(tmp_path / "run", resume=True).digest == whole.digest


def test_a_failing_program_keeps_the_steps_made(tmp_path):
    class Stop(BaseException):
        pass

    def failing(data, seed):
        for number, batch in enumerate(batches(data, seed)):
            if number == 6:
                raise Stop("no more files")
            yield batch

    program = Program("tiny", init, train_step, failing, loss_of, OPTIMIZER)
    with pytest.raises(InputError, match=r"tiny.batches failed: Stop: no more files"):
        run(tmp_path / "run", program=program)
    assert saved(tmp_path / "run") == [4, 6]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_metrics_that_a_kill_cut_short_are_repaired(tmp_path):
    """Steps after the last checkpoint are made again; a line cut short is no line."""
    whole = run(tmp_path / "whole")
    run(tmp_path / "run", steps=8)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 9, "loss": 7.0, "scale": 1.0, "skipped": 0, "ms": 1}\n{"step": 10, "lo'
        )
    assert run(tmp_path / "run", resume=True).digest == whole.digest
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_restored(tmp_path, capfd):
    whole = run(tmp_path / "whole")
    run(tmp_path / "run")
    files = list((tmp_path / "run" / "checkpoints" / "12" / "state").rglob("d/*"))
    for file in files:  # one byte in each
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x10
        file.write_bytes(bytes(content))
    again = run(tmp_path / "run", resume=True)
    assert "the checkpoint of step 12 is damaged" in run.said
    assert "resumed after step 8" in run.said
    assert again.digest == whole.digest
    for folder in (tmp_path / "run" / "checkpoints").glob("*[0-9]"):
        (folder / "meta" / "metadata").write_text("{")
    before = sorted((tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(
        InputError, match=r"no checkpoint in .* is whole: the checkpoint of step 12"
    ):
        run(tmp_path / "run", resume=True)
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == before
    assert "Event loop" not in capfd.readouterr().err


def test_checkpoints_under_other_names_are_not_restored(tmp_path):
    """Swapped, copied and linked: the description tells the step, not the folder's name."""
    whole = run(tmp_path / "whole")
    run(tmp_path / "run", steps=10)  # 4, 8, 10
    folder = tmp_path / "run" / "checkpoints"
    (folder / "8").rename(folder / "aside")
    (folder / "10").rename(folder / "8")
    (folder / "aside").rename(folder / "10")
    shutil.copytree(folder / "4", folder / "11")
    (folder / "12").symlink_to("4")
    ended = run(tmp_path / "run", resume=True)
    for step, found in ((12, 4), (11, 4), (10, 8), (8, 10)):
        why = f"is damaged: its step is {found}, not {step}"
        assert f"the checkpoint of step {step} {why}" in run.said
        assert (folder / f"{step}.damaged").exists()
    assert "resumed after step 4" in run.said
    assert ended.digest == whole.digest
    assert saved(tmp_path / "run") == [4, 8, 12]


def test_a_checkpoint_of_another_run_is_not_restored(tmp_path):
    run(tmp_path / "other")
    run(tmp_path / "run", steps=8)
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(tmp_path / "other" / "checkpoints" / "12", folder / "12")
    run(tmp_path / "run", resume=True)
    assert "the checkpoint of step 12 is damaged: its run is " in run.said
    assert "resumed after step 8" in run.said
    (tmp_path / "run" / "run.json").write_text("null")
    with pytest.raises(InputError, match=r"run.json isn't what scalewise train wrote"):
        run(tmp_path / "run", resume=True)


def test_one_run_in_a_folder_which_survives_a_closed_output(tmp_path):
    """Another run is refused while this one trains, and its console's pipe is closed."""
    said = []

    def twice(data, seed):
        for number, batch in enumerate(batches(data, seed)):
            if number == 6:
                for changes in ({"resume": True}, {}):
                    with pytest.raises(InputError) as refused:
                        run(tmp_path / "run", "float32", **changes)
                    said.append(str(refused.value))
            yield batch

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    program = Program("tiny", init, train_step, twice, loss_of, OPTIMIZER)
    console = Console(file=Closed())
    options = {"data": b"x" * 9, "steps": 8, "out": tmp_path / "run", "console": console}
    options["watch"] = lambda step, state: {"watched": math.nan}
    ended = training.train(program, "float32", **options)
    assert f"is in use by process {os.getpid()} on" in said[0]
    assert "isn't empty" in said[1]
    assert (ended.steps, saved(tmp_path / "run")) == (8, [8])
    assert [row["watched"] for row in rows(tmp_path / "run")] == [None] * 8
    assert not list((tmp_path / "run").glob(".*"))


def test_metrics_that_cannot_be_written_end_the_run_with_a_checkpoint(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole", "float32")
    written = training.Log.step

    def full(self, row):
        if row["step"] == 6:
            raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
        written(self, row)

    monkeypatch.setattr(training.Log, "step", full)
    message = "metrics of step 6 can't be written: No space left .* last checkpoint is of step 5"
    with pytest.raises(TrainingError, match=message):
        run(tmp_path / "run", "float32")
    monkeypatch.undo()
    assert run(tmp_path / "run", "float32", resume=True).digest == whole.digest
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")


def test_a_full_disk_is_reported_and_the_last_checkpoint_kept(tmp_path):
    """A limit on the size of files stands for the full disk: writes fail half way.

    Half a matrix: arrays may come in one file or each in its own, and random ones hardly compress.
    """
    whole = run(tmp_path / "whole", "float32")
    run(tmp_path / "run", "float32", steps=8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # what is compiled meanwhile isn't to be written either, or the compiler's cache fails first
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    resource.setrlimit(resource.RLIMIT_FSIZE, (WIDTH * WIDTH * 4 // 2, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"step 12 can't be written .* last good one is of"
        ):
            run(tmp_path / "run", "float32", resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["4", "8"]
    assert run(tmp_path / "run", "float32", resume=True).digest == whole.digest


def test_a_nan_in_the_data_is_reported_and_left_out(tmp_path):
    def with_nan(data, seed):
        for number, batch in enumerate(batches(data, seed)):
            if number == 3:
                batch[1, 7] = np.nan
            yield batch

    program = Program("tiny", init, train_step, with_nan, loss_of, OPTIMIZER)
    ended = run(tmp_path / "run", program=program)
    assert "step 4 left out: the batch holds 1 NaN or infinite numbers" in run.said
    assert (ended.skipped, ended.scale) == (1, 2.0**16)  # the scale isn't to blame
    assert [r["loss"] is None for r in rows(tmp_path / "run")] == [n == 4 for n in range(1, 13)]
    assert math.isfinite(float(loss_of(ended.state.params, np.ones((4, WIDTH), np.float32))))


def test_a_run_that_leaves_out_all_steps_ends(tmp_path):
    def infinite(params, batch):
        return loss_of(params, batch) * jnp.inf

    program = Program("tiny", init, train_step, batches, infinite, OPTIMIZER)
    with pytest.raises(
        TrainingError, match="100 steps in a row were left out, the last because the"
    ):
        run(tmp_path / "run", program=program, steps=200, every=150)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "fp8"}, "no argument 'recipe'; .* method='fp8'"),
        ({"clipp": 1.0}, "'clipp'.*clip"),
    ],
)
def test_an_unknown_option_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        run(None, **options)


def test_another_run_is_not_resumed(tmp_path):
    run(tmp_path / "run")
    other = Program("other", init, train_step, batches, loss_of, OPTIMIZER)
    for changes, message in (
        ({"method": "float32"}, "method 'autocast-fp16', not 'float32': resume it as it"),
        ({"program": other}, "a run with model 'tiny', not 'other'"),
        ({"seed": 3}, "a run with seed 0, not 3"),
        ({"data": b"y"}, "a run with data '.*', not '.*'"),
        ({"clip": 1.0}, r"with options \{\}, not \{'clip': '1.0'\}"),
    ):
        with pytest.raises(InputError, match=message):
            run(tmp_path / "run", resume=True, **changes)
    assert saved(tmp_path / "run") == [4, 8, 12]


def test_a_model_of_another_shape_is_not_resumed(tmp_path):
    run(tmp_path / "run")

    def wider(seed):
        params = {"w": jnp.zeros((WIDTH, WIDTH + 1))}
        return {"params": params, "optimizer": OPTIMIZER.init(params)}

    def loss(params, batch):
        return jnp.mean(batch @ params["w"])

    program = Program("tiny", wider, train_step, batches, loss, OPTIMIZER)
    message = r"array .*\['w'\] is float32\[48, 48\], not float32\[48, 49\]"
    with pytest.raises(InputError, match=message):
        run(tmp_path / "run", program=program, resume=True, allow_changes=True)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("changed", ["rate", "schedule", "loss", "constant", "batch", "numbers"])
def test_an_edited_program_is_not_resumed(tmp_path, changed):
    """A learning rate, a loss, an array that it closes over, or the batches were edited."""

    def program(edited):
        table = np.linspace(0, 1, WIDTH, dtype=np.float32) + (edited and changed == "constant")
        rate = 2e-2 if edited and changed == "rate" else 1e-2
        decay = 11 if edited and changed == "schedule" else 10
        optimizer = optax.adamw(optax.exponential_decay(rate, decay, 0.5))

        def loss(params, batch):
            kept = 0.5 if edited and changed == "loss" else 0.25
            return kept * loss_of(params, batch) + jnp.mean(batch @ params["w"] * table)

        def rows(data, seed):
            for batch in batches(data, seed):
                batch = batch[: 2 if edited and changed == "batch" else 4]
                yield -batch if edited and changed == "numbers" else batch

        def begin(seed):
            params = init(seed)["params"]
            return {"params": params, "optimizer": optimizer.init(params)}

        return Program("tiny", begin, train_step, rows, loss, optimizer)

    run(tmp_path / "run", program=program(False), steps=4)
    again = run(tmp_path / "run", program=program(False), steps=6, resume=True)
    assert again.steps == 6
    with pytest.raises(InputError, match=r"is a run of another program .* is now .*allow_changes"):
        run(tmp_path / "run", program=program(True), steps=8, resume=True)
    ended = run(tmp_path / "run", program=program(True), steps=8, resume=True, allow_changes=True)
    assert "resumed after step 6" in run.said
    assert ended.steps == 8
    run(tmp_path / "run", program=program(True), steps=9, resume=True)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("method", ["float32", "fp16", "fp8", "autocast-fp16"])
def test_the_text_of_a_program_is_the_same_in_every_process(tmp_path, method):
    (tmp_path / "tiny.py").write_text(PROGRAM)
    code = f"from scalewise import training\ntraining.train('tiny.py', {method!r}, steps=1, out="
    texts = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", f"{code}'run{seed}')"],
            cwd=tmp_path, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        texts.append((tmp_path / f"run{seed}" / "step.jaxpr").read_text())
    assert texts[0] == texts[1]
    assert "dot_general" in texts[0]


def test_foreign_checkpoints_and_folders_are_not_used(tmp_path):
    run(tmp_path / "run", steps=4)
    with ocp.CheckpointManager(tmp_path / "run" / "checkpoints") as manager:
        manager.save(9, args=ocp.args.StandardSave({"x": np.ones(3)}))
    run(tmp_path / "run", resume=True)
    assert "the checkpoint of step 9 is damaged: " in run.said
    assert "resumed after step 4" in run.said
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match=r"is no folder of scalewise train: it has no run.json"):
        run(tmp_path / "foreign", resume=True)
    with pytest.raises(InputError, match="isn't empty; expected a new or an empty folder"):
        run(tmp_path / "foreign")


def test_tensorboard_gets_the_same_metrics(tmp_path):
    from tensorboardX.proto.event_pb2 import Event  # its own reader needs TensorFlow

    run(tmp_path / "run")
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    content, events = file.read_bytes(), []
    while content:  # TFRecord: length, its checksum, the event, its checksum
        size = int.from_bytes(content[:8], "little")
        events.append(Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    seen = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
    for row in rows(tmp_path / "run"):
        assert seen[row["step"], "loss"] == np.float32(row["loss"])
        assert seen[row["step"], "scale"] == row["scale"]


def test_resume_begins_in_an_empty_folder(tmp_path):
    assert run(tmp_path / "run", resume=True).digest == run(tmp_path / "whole").digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "autocast-fp61"}, "is called 'autocast-fp61'; did you mean 'auto"),
        ({"method": "fp8-narrow-state"}, "changes the whole program and its state"),
        ({"method": "c=f61"}, "'f61' is no dtype to compute in"),
        ({"weights": "light"}, "weights is 'light'; expected one of 'plain'"),
        ({"resume": True, "out": None}, "resume needs the folder of the run"),
        ({"program": "gtp"}, "no program 'gtp'; did you mean 'gpt'. .* an example: cnn, "),
        (
            {"program": Program("bare", init, train_step, batches)},
            "bare defines no loss_of.params, batch. or no OPTIMIZER: .* compare does without",
        ),
        (
            {"program": Program("ints", lambda s: {"params": {"n": jnp.arange(3)}}, train_step,
                                batches, loss_of, OPTIMIZER)},
            r"params\['n'\] is int32\[3\]; trained are real float arrays",
        ),
    ],
)  # fmt: skip
def test_invalid_arguments_are_errors(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        run(**({"out": tmp_path / "run"} | changes))
