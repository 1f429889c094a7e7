"""The line that long calls show on a terminal while they run."""

import io

import jax.numpy as jnp
import pytest
from rich.console import Console

import scalewise as sw


def norm(x):
    return jnp.sqrt(jnp.sum(x * x))


def logits(params, x):
    return jnp.tanh(x @ params)


CALLS = {
    "audit norm": lambda: sw.audit(norm, "fp16")(jnp.full(4096, 16.0)),
    "plan logits": lambda: sw.plan(logits, 8)(jnp.eye(32) / 6, jnp.ones((4, 32))),
    "record norm": lambda: sw.auditing.record(norm)(jnp.ones(4)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_on_a_terminal_says_what_is_done(name, terminal, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(
        "rich.console.Console",
        lambda stderr: Console(file=stream, force_terminal=terminal, width=100),
    )
    CALLS[name]()
    assert (name in stream.getvalue()) == terminal
