"""``train(sharding=...)``: runs split over devices, and communication among processes."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P
from rich.console import Console

from devices import run_on_devices
from scalewise import training
from scalewise.training import InputError, Program, Sharding
from scalewise.training._console import Interrupted
from scalewise.training._train import _sharding as processes

OPTIMIZER = optax.adamw(1e-2)


pytestmark = pytest.mark.usefixtures("users_promotion")


def init(seed):
    return {"params": {"w": 0.1 * jax.random.normal(jax.random.key(seed), (8, 16))}}


def loss_of(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"]) - 1))


def batches(data, seed):
    random = np.random.default_rng(seed)
    while True:
        yield random.normal(size=(4, 8)).astype(np.float32)


TINY = Program("tiny", init, lambda state, batch: (state, 0), batches, loss_of, OPTIMIZER)


ROWS = P("fsdp")


def on_one_device(state=lambda path, shape: ROWS if shape else P(), batch=ROWS):
    mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    return Sharding(mesh, state, batch)


def run(out, sharding, **changes):
    arguments = {"data": b"x" * 9, "steps": 4, "every": 2, "out": out} | changes
    console = Console(file=io.StringIO())
    return training.train(TINY, "float32", console=console, sharding=sharding, **arguments)


SPLIT = """
    import sys
    from pathlib import Path
    from tempfile import TemporaryDirectory

    sys.path[:0] = ["tests", "tests/training"]
    import jax
    from test_sharding import P, Sharding, run

    def over(rows, columns):
        axes = ("data", "fsdp")
        mesh = jax.make_mesh((rows, columns), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
        return Sharding(mesh, lambda path, shape: P(None, "fsdp") if shape else P(), P(axes))

    with TemporaryDirectory() as folder:
        folder = Path(folder)
        whole = run(folder / "whole", over(2, 2))
        assert sum(not x.is_fully_replicated for x in jax.tree.leaves(whole.state)) == 3
        run(folder / "parts", over(2, 2), steps=3)
        parts = run(folder / "parts", over(2, 2), resume=True)
        assert parts.digest == whole.digest
        assert parts.state.params["w"].sharding == whole.state.params["w"].sharding

        for file in (folder / "whole/checkpoints/4/state").rglob("d/*"):  # one byte in each
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 0x10
            file.write_bytes(bytes(content))
        again = run(folder / "whole", over(2, 2), resume=True, steps=4)
        assert again.digest == whole.digest
        assert (folder / "whole/checkpoints/4.damaged").exists()
        try:
            run(folder / "whole", over(4, 1), resume=True)
        except Exception as error:
            assert "is a run with mesh {'data': 2, 'fsdp': 2}" in str(error), error
        else:
            raise AssertionError("resumed on another mesh")
"""


@pytest.mark.slow
def test_a_run_split_over_devices_resumes_to_the_same_bits():
    """`python -m proofs.processes` has the same in four processes, one of which is killed."""
    run_on_devices(4, SPLIT)


def test_it_equals_the_run_on_the_default_device(tmp_path):
    split, plain = run(tmp_path / "split", on_one_device()), run(tmp_path / "plain", None)
    w, v = (np.asarray(x.state.params["w"]) for x in (split, plain))
    np.testing.assert_allclose(w, v, rtol=1e-5, atol=1e-7)


def test_partitions_that_do_not_fit_are_errors(tmp_path):
    bad = on_one_device(state=lambda path, shape: P("rows"))
    with pytest.raises(InputError, match=r"^sharding: the state's .* can't be split as .*'rows'"):
        run(tmp_path / "state", bad)
    bad = on_one_device(batch=P("rows"))
    with pytest.raises(InputError, match=r"^sharding: an array of the batch, of shape \(4, 8\)"):
        run(tmp_path / "batch", bad)
    assert not list(tmp_path.iterdir())


class Two:
    """This process and one that says ``others``, message by message."""

    def __init__(self, monkeypatch, *others, index=0):
        self.others = list(others)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: index)
        monkeypatch.setattr(multihost_utils, "process_allgather", self.gather)
        self.index = index

    def gather(self, x, tiled):
        if np.ndim(x) == 0:  # the length, then the text
            self.text = self.others.pop(0)
            other = np.asarray(len(self.text), x.dtype)
        else:
            other = np.zeros_like(x)
            other[: len(self.text)] = np.frombuffer(self.text, np.uint8)[: x.size]
        return np.stack([x, other] if self.index == 0 else [other, x])


@pytest.mark.parametrize("mine", [[None, "short"], "a" * 1000])
@pytest.mark.parametrize("other", [b"7", b'"' + b"b" * 700 + b'"'])
def test_values_of_any_length_are_gathered(monkeypatch, mine, other):
    Two(monkeypatch, other)
    got = processes.all_gather_json(mine)
    assert got == [mine, 7 if other == b"7" else "b" * 700]


def test_an_error_of_the_first_process_is_raised_in_all(monkeypatch):
    Two(monkeypatch, b'[null, "no such folder"]', b"[5, null]", index=1)
    with pytest.raises(InputError, match=r"^no such folder$"):
        processes.call_on_first(lambda: pytest.fail("called in the second process"))
    assert processes.call_on_first(lambda: pytest.fail("called in the second process")) == 5


def test_a_signal_to_one_process_interrupts_all(monkeypatch):
    Two(monkeypatch, b"0", b"15")
    check = processes.checked_everywhere(lambda: None)
    check()
    with pytest.raises(Interrupted, match="SIGTERM"):
        check()


def test_several_processes_need_a_mesh_of_all(monkeypatch, tmp_path):
    Two(monkeypatch)
    with pytest.raises(InputError, match="called in 2 processes without sharding: give it"):
        run(tmp_path / "run", None)
    with pytest.raises(InputError, match="the mesh has no device of process 1 of 2"):
        run(tmp_path / "run", on_one_device())
