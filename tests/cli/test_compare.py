"""Comparisons of methods: measurements, interrupts, and errors in the arguments."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from scalewise import recipes
from scalewise._user_file import InputError
from scalewise.cli._compare import compare
from scalewise.cli._methods import DEMO, METHODS, Method, method
from scalewise.cli._program import TrainingProgram, corpus, load_program

OPTIMIZER = optax.adamw(1e-3)
WIDTH = 96  # its square is over Recipe.smallest


def init(seed):
    params = {"w": 0.1 * jax.random.normal(jax.random.key(seed), (WIDTH, WIDTH))}
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def train_step(state, batch):
    def loss_of(params):
        return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"]) - batch))

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


def batches(data, seed):
    random = np.random.default_rng(seed)
    for _ in range(len(data)):
        yield random.normal(size=(4, WIDTH)).astype(np.float32)


pytestmark = pytest.mark.usefixtures("users_promotion")


TINY = TrainingProgram("tiny", init, train_step, batches)


def loss_of(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"]) - batch))


SCALED = TrainingProgram("tiny", init, train_step, batches, loss_of, OPTIMIZER)


def run(tmp_path, methods=("float32",), **changes):
    out, told = tmp_path / "run", []
    arguments = {"program": TINY, "text": b"x" * 100, "steps": 6, "out": out} | changes
    methods = [method(x) if isinstance(x, str) else x for x in methods]
    result = compare(methods=methods, tell=told.append, **arguments)
    if arguments["out"]:
        result.write(out)
    return result, "\n".join([*told, str(result)])


def rows(tmp_path):
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_float32_row_is_the_plain_program(tmp_path):
    result, _ = run(tmp_path)
    state, step, losses = init(0), jax.jit(train_step), []
    for _, batch in zip(range(6), batches(b"x" * 6, 0), strict=True):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert result.losses["float32"] == losses
    assert result.summary["methods"][0]["final_loss"] == pytest.approx(np.mean(losses))


@pytest.mark.slow
def test_every_built_in_recipe_trains(tmp_path):
    result, text = run(tmp_path, DEMO, steps=4)
    float32, plain, *scaled = result.summary["methods"]
    for row in (float32, *scaled):
        assert row["first_non_finite"] is None
        assert row["non_finite_steps"] == 0
        assert row["final_loss"] == pytest.approx(float32["final_loss"], rel=0.05)
    # weights 2 bytes, first moment 1, root of the second 2; three scales and a counter
    assert scaled[-1]["state_bytes"] == WIDTH**2 * (2 + 1 + 2) + 3 * 4 + 4
    assert float32["state_bytes"] == WIDTH**2 * 12 + 4
    assert plain["bytes_per_parameter"] == 6 + 4 / WIDTH**2
    assert all(name in text for name in DEMO)


SCALING = ("float32", "static-scale", "dynamic-scale", "autocast-bf16", "five-bytes")


@pytest.mark.slow
def test_methods_that_scale_the_loss_show_their_scales(tmp_path):
    result, text = run(tmp_path, SCALING, program=SCALED, steps=5)
    float32, static, _, _, five = result.summary["methods"]
    for row in result.summary["methods"]:
        assert row["non_finite_steps"] == 0
        assert row["final_loss"] == pytest.approx(float32["final_loss"], rel=0.05)
        assert row["temporary_bytes"] > 0
    assert (float32["loss_scale_at_end"], float32["skipped_steps"]) == (None, 0)
    assert static["loss_scale_at_end"] == 2.0**15
    assert five["bytes_per_parameter"] == pytest.approx(5, abs=0.01)
    assert "dynamic-scale, loss scale 65536 to" in text
    scales = [x["scale"] for x in rows(tmp_path) if x["method"] == "static-scale"]
    assert scales == [2.0**15] * 5


def test_every_recipe_is_a_method():
    assert set(recipes.CATALOGUE) <= set(METHODS)
    assert all(name == each.name and each.what for name, each in METHODS.items())


@pytest.mark.slow
def test_every_recipe_of_autoscale_can_be_compared(tmp_path):
    # of one block in each row, mxfp8 is fp8_rowwise here
    names = (
        "float32", "fp8", "fp8_delayed", "fp8_blockwise", "mxfp8", "nvfp4", "unit_scaling",
        "fp16_every_op", "scalify",
    )  # fmt: skip

    def falling(data, seed):  # what was largest last time isn't any more
        return (batch * 0.3**n for n, batch in enumerate(batches(data, seed)))

    program = dataclasses.replace(TINY, batches=falling)
    result, _ = run(tmp_path, names, program=program, steps=3, seeds=2)
    float32, *others = result.summary["methods"]
    # no row is another in disguise; but FP16 is FP16 behind any power of two (scalify)
    distinct = {tuple(x) for name, x in result.losses.items() if name != "scalify"}
    assert len(distinct) == len(names) - 1
    for row in others:
        assert row["first_non_finite"] is None
        assert row["final_loss"] == pytest.approx(float32["final_loss"], rel=0.05)


def test_a_program_without_a_loss_cannot_scale_it(tmp_path):
    with pytest.raises(InputError, match="dynamic-scale scales the loss, and tiny defines no loss"):
        run(tmp_path, ("float32", "dynamic-scale"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_several_seeds_give_a_mean_and_a_spread(tmp_path):
    result, text = run(tmp_path, ("float32", "fp16"), seeds=2, steps=4)
    singles = [run(tmp_path / str(s), ("float32",), seed=s, steps=4)[0] for s in (0, 1)]
    row, fp16 = result.summary["methods"]
    finals = [x.summary["methods"][0]["final_loss"] for x in singles]
    assert row["final_loss_by_seed"] == finals
    assert result.losses["float32"] == singles[0].losses["float32"]
    assert row["final_loss"] == pytest.approx(np.mean(finals))
    assert row["final_loss_spread"] == pytest.approx(np.std(finals, ddof=1))
    assert f"±{row['final_loss_spread']:.3f}" in text
    ours, theirs = (np.array(result.losses[name]) for name in ("fp16", "float32"))
    assert fp16["early_difference"] == pytest.approx(np.abs(ours / theirs - 1).max())
    lines = rows(tmp_path)
    assert len(lines) == 4 * 2 * 2
    assert sum(x.get("seed") == 1 for x in lines) == 8


def test_files_agree_with_the_result(tmp_path):
    result, _ = run(tmp_path, ("float32", "fp16"))
    folder = tmp_path / "run"
    assert sorted(p.name for p in folder.iterdir()) == [
        "curves.svg",
        "metrics.jsonl",
        "report.html",
        "summary.json",
    ]
    lines = rows(tmp_path)
    assert [line["step"] for line in lines[::2]] == [1, 2, 3, 4, 5, 6]
    for name, losses in result.losses.items():
        assert [line["loss"] for line in lines if line["method"] == name] == losses
    assert json.loads((folder / "summary.json").read_text()) == result.summary


def blow_up(state, batch):
    """Divides by a weight's distance to itself from the third step on."""
    state, loss = train_step(state, batch)
    late = state["optimizer"][0].count >= 3
    w = state["params"]["w"]
    return state | {"params": {"w": w / jnp.where(late, w - w, 1.0)}}, loss


def similar(state, batch):
    """Makes a NaN in a library's function."""
    state, loss = train_step(state, batch)
    w = state["params"]["w"]
    return state | {
        "params": {"w": w + optax.losses.cosine_similarity(0 * w, 0 * w)[..., None]}
    }, loss


def test_a_cause_in_a_library_names_the_line_that_calls_it(tmp_path):
    result, _ = run(tmp_path, program=dataclasses.replace(TINY, train_step=similar))
    why = result.summary["methods"][0]["first_non_finite"]["why"]
    assert re.match(r"div at test_compare.py:\d+ \(similar, which calls \w+.py:\d+\)", why), why


def test_a_divergence_is_reported_with_step_and_cause(tmp_path):
    result, text = run(tmp_path, program=dataclasses.replace(TINY, train_step=blow_up))
    (row,) = result.summary["methods"]
    assert row["first_non_finite"]["step"] == 3
    why = row["first_non_finite"]["why"]
    assert "div at test_compare.py:" in why
    assert "(blow_up), update, makes an infinity" in why
    assert "1 of the state's 4 arrays" in why
    assert "['params']['w']" in why
    assert row["non_finite_steps"] == 4
    assert row["final_loss"] is None
    assert "float32, step 3: div at" in text
    lines = rows(tmp_path)
    assert lines[-1]["loss"] is None
    # the third step made it non-finite, the fourth showed that it stays so
    assert [line["ms"] is None for line in lines] == [False] * 3 + [True] * 3


def test_a_method_that_diverges_from_every_seed_has_no_spread(tmp_path):
    tiny = dataclasses.replace(TINY, train_step=lambda s, b: train_step(s, b * 0.03))
    result, _ = run(tmp_path, ("fp16-plain",), program=tiny, seeds=2)
    (row,) = result.summary["methods"]
    assert row["final_loss_spread"] is None  # of nothing; and all files are written
    assert row["first_non_finite"]["step"] == 1
    assert ", makes " in row["first_non_finite"]["why"]


def test_an_interrupt_keeps_what_was_measured(tmp_path):
    def interrupted(data, seed):
        for number, batch in enumerate(batches(data, seed)):
            if number == 3:
                raise KeyboardInterrupt
            yield batch

    tiny = dataclasses.replace(TINY, batches=interrupted)
    result, text = run(tmp_path, ("float32", "fp8"), program=tiny)
    assert result.summary["interrupted"]
    assert result.summary["steps_made"] == 3
    assert "interrupted after 3 of 6 steps" in text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["interrupted"]
    assert "interrupted" in (tmp_path / "run" / "report.html").read_text()


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result, text = run(tmp_path, out=None)
    assert list(tmp_path.iterdir()) == []
    assert "6 steps, ratios to float32" in text
    assert result.losses == run(tmp_path)[0].losses


def test_the_users_compiled_functions_stay_compiled(tmp_path):
    traced = []

    @jax.jit
    def users(x):
        traced.append(x)
        return x + 1

    users(1.0)
    run(tmp_path, steps=1)
    users(1.0)
    assert len(traced) == 1


def test_batches_that_end_start_again_under_the_next_seed(tmp_path):
    result, _ = run(tmp_path, text=b"xx", steps=5)
    assert len(set(result.losses["float32"])) == 5


def test_a_users_own_method_is_compared(tmp_path):
    half = Method("half <rate>", options={"accumulate": 2})
    result, _ = run(tmp_path, ("float32", half), program=SCALED)
    assert result.losses["half <rate>"] != result.losses["float32"]
    html = (tmp_path / "run" / "report.html").read_text()
    assert "half &lt;rate&gt;" in html
    assert "half <rate>" not in html


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["fp61"]}, "is called 'fp61'; did you mean 'fp16'.*one of float32, "),
        ({"text": b""}, "tiny.batches: not one batch from 0 bytes of data"),
        ({"program": dataclasses.replace(TINY, init=lambda seed: {"weights": jnp.ones(2)})},
         "tiny.init returned a dict without params: the state is a pytree with its parameters"),
        ({"program": dataclasses.replace(TINY, train_step=lambda s, b: s)},
         r"tiny.train_step returned a dict; expected \(state, loss\)"),
        ({"program": dataclasses.replace(TINY, train_step=lambda s, b: (s, "low"))},
         "tiny.train_step failed: TypeError"),
        ({"program": dataclasses.replace(TINY, train_step=lambda s, b: (s, jnp.ones(3)))},
         r"returned a loss of float32\[3\]; expected a scalar float"),
        ({"program": dataclasses.replace(TINY, train_step=lambda s, b: ({}, jnp.ones(())))},
         "returned a state of another structure than it got"),
        ({"program": dataclasses.replace(TINY, train_step=lambda s, b: 1 / 0)},
         r"tiny.train_step failed: ZeroDivisionError: division by zero \(test_compare.py:\d+\)"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_errors_and_nothing_is_written(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        run(tmp_path, **changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_programs_and_data_that_are_not_there():
    with pytest.raises(InputError, match="no data at '/nowhere/at/all'; expected a text file"):
        corpus(Path("/nowhere/at/all"))
    with pytest.raises(InputError, match=r"no program '/nowhere.py'; expected a Python file"):
        load_program("/nowhere.py")


def test_the_standard_library_is_the_same_text_each_time():
    assert len(corpus()) == 2_000_000
    assert corpus() == corpus()


def test_a_file_is_cut_at_the_limit(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abcdef")
    assert corpus(tmp_path / "a.txt", limit=4) == b"abcd"


def test_a_folder_is_read_in_order_without_hidden_files(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in [("b", b"2"), ("a", b"1"), ("deep/c", b"3"), (".git/d", b"4"), (".e", b"5")]:
        (tmp_path / name).write_bytes(text)
    assert corpus(tmp_path) == b"123"


@pytest.mark.parametrize("folder", [True, False])
def test_missing_and_empty_data_is_an_error(tmp_path, folder):
    path = tmp_path / "empty"
    path.mkdir() if folder else path.touch()
    with pytest.raises(InputError, match=r"no data in '.*empty': it is empty"):
        corpus(path)
