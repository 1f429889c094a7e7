"""Runs Paddle's tensor checker on programs like those of the gallery.

    make scoreboard                                        # in an environment of its own
    python -m proofs.scoreboard_paddle "T5 in fp16" --again

Paddle's kernels for a CPU don't add, multiply or contract float16 numbers (``add``, ``multiply``,
``matmul``, ``softmax`` and ``where`` are refused, in bfloat16 most of them too). So each result is
computed in float32 and cast to the dtype and back, gradients too. The checker
(``paddle.amp.debugging.enable_tensor_checker``, aborting) raises at the first kernel with infinity
or NaN in its result, which is ``cast`` where a number overflows; the traceback has the line. What
it says is recorded in docs/scoreboard.jsonl.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle.amp import debugging
from paddle.nn import functional as F

from proofs.experts import marked
from proofs.scoreboard import FAILED, LINE, NOTHING, OTHER, REPEATS, record, recorded, timed
from proofs.scoreboard import versions as versions_of_jax

TOOL = "paddle enable_tensor_checker"
CONFIG = debugging.TensorCheckerConfig(
    enable=True, debug_mode=debugging.DebugMode.CHECK_NAN_INF_AND_ABORT
)
Tensor = Any
Round = Callable[[Tensor], Tensor]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    numbers = scale * np.random.default_rng(seed).standard_normal(shape)
    return paddle.to_tensor(numbers.astype("float32"), stop_gradient=False)


def feed_forward(low: Round, x, wi, wo):
    hidden = F.relu(low(x @ wi))
    return low(x + low(hidden @ wo))  # <- here


def attention(low: Round, x, query, keys, value, padding, fill=-1e9):
    scores = low(low(low(x @ query) @ low(x @ keys).transpose([0, 2, 1])) * 0.25)
    scores = low(scores + low(padding.unsqueeze(1) * fill))  # <- here
    powers = low(paddle.exp(low(scores - scores.max(-1, keepdim=True))))
    return low(low(powers / low(powers.sum(-1, keepdim=True))) @ low(x @ value))


def healthy_attention(low: Round, x, query, keys, value, padding):
    return attention(low, x, query, keys, value, padding, fill=-1e4)


def masked_attention(low: Round, x, mask):
    scores = low(low(x @ x.transpose([0, 2, 1])) + low(mask))
    powers = low(paddle.exp(low(scores - scores.max(-1, keepdim=True))))
    return low(low(powers / low(powers.sum(-1, keepdim=True))) @ x)


def layer_norm(low: Round, x, w):
    centred = low(x - low(x.mean(-1, keepdim=True)))
    square = low(centred * centred)  # <- here
    inverse = low(paddle.rsqrt(low(low(square.mean(-1, keepdim=True)) + 1e-3)))  # <- here
    return low(low(centred * inverse) @ w)


def rms_norm(low: Round, x, w):
    mean = low(low(low(x * x).sum()) / x.size)  # <- here
    return low(low(x * low(paddle.rsqrt(low(mean + 1e-3)))) @ w)


def softmax(low: Round, x):
    return low(F.softmax(x, axis=-1))


def divergence(low: Round, x, student, teacher):
    p, q = softmax(low, low(x @ teacher)), softmax(low, low(x @ student))  # <- here
    eps = low(paddle.to_tensor(1e-10))
    logs = low(paddle.log(low(p + eps))), low(paddle.log(low(q + eps)))  # <- here
    return low(low(p * low(logs[0] - logs[1])).sum(-1))  # <- here


def smoothed_cross_entropy(low: Round, x, hidden, head):
    logits = low(F.relu(low(x @ hidden)) @ head)
    targets = low(0.9 * F.one_hot(paddle.arange(16) % 10, 10) + 0.01)
    return -low(low(targets * low(paddle.log(softmax(low, logits)))).sum(-1))  # <- here


def small_gradients(low: Round, w, x):
    return low(low(low(paddle.square(low(x @ w))).mean()) * 1e-6)  # <- here


def static_loss_scale(low: Round, x, hidden, head):
    logits = low(F.relu(low(x @ hidden)) @ head)
    loss = low(F.cross_entropy(logits, paddle.arange(16) % 4))
    return low(loss * 65536.0)  # <- here


def adam(low: Round, m, v):
    eps = low(paddle.to_tensor(1e-8))
    return low(m / low(low(paddle.sqrt(low(v))) + eps))  # <- here


def clipped(low: Round, gradient):
    norm = low(paddle.sqrt(low(low(paddle.square(gradient)).sum())))  # <- here
    return low(gradient / low(paddle.clip(norm, min=1.0)))


def small_updates(low: Round, w, gradient):
    return low(w - low(1e-3 * gradient))  # <- here


def counted_positions(low: Round, table, attended):
    position = low(low(paddle.cumsum(attended, -1)) * attended)  # <- here
    return low(F.embedding(position.astype("int64"), table))


def convolutions(low: Round, x, first, second):
    y = F.relu(low(F.conv2d(x, first, stride=2)))
    return low(F.relu(low(F.conv2d(y, second, stride=2))).mean([2, 3]))


def healthy_adam(low: Round, m, v):
    return low(low(m) / low(low(paddle.sqrt(low(v))) + low(paddle.to_tensor(1e-4))))


class Program(NamedTuple):
    """A function whose results are rounded, its arguments, and the dtype; ``fails`` if its marked
    lines are at fault."""

    call: Callable[..., Tensor]
    arguments: Callable[[], tuple[Tensor, ...]]
    dtype: str = "float16"
    fails: bool = True


def weights(*shapes: tuple[int, int]) -> tuple[Tensor, ...]:
    return tuple(normal(*s, seed=i, scale=s[0] ** -0.5) for i, s in enumerate(shapes, 1))


def padding(*lengths: int) -> Tensor:
    return paddle.to_tensor(np.float32(np.arange(8) >= np.array(lengths)[:, None]))


def causal() -> Tensor:
    return paddle.to_tensor(np.triu(np.full((8, 8), -np.inf, "float32"), 1))


SQUARE = ((16, 16),) * 3
PROGRAMS: dict[str, Program] = {
    "T5 in fp16": Program(
        feed_forward,
        lambda: (
            normal(4, 16),
            normal(16, 64, seed=1, scale=40),
            normal(64, 16, seed=2, scale=300),
        ),
    ),
    "An empty sequence in a padded batch": Program(
        attention, lambda: (normal(3, 8, 16), *weights(*SQUARE), padding(8, 5, 0))
    ),
    "LayerNorm of outliers": Program(
        layer_norm, lambda: (normal(8, 32, scale=400.0), *weights((32, 4)))
    ),
    "Sum of squares in a norm": Program(
        rms_norm, lambda: (normal(1, 4096, scale=6.0), *weights((4096, 4)))
    ),
    "A divergence with epsilons": Program(
        divergence,
        lambda: (
            normal(16, 8, seed=3),
            normal(8, 10, scale=12.0),
            normal(8, 10, seed=2, scale=12.0),
        ),
    ),
    "Logarithms of smoothed targets": Program(
        smoothed_cross_entropy,
        lambda: (normal(16, 8, seed=3), *weights((8, 32)), normal(32, 10, seed=2)),
    ),
    "Small gradients": Program(small_gradients, lambda: (normal(16, 1), normal(64, 16, seed=1))),
    "A static loss scale of 65536": Program(
        static_loss_scale, lambda: (normal(16, 8, seed=3), *weights((8, 16), (16, 4)))
    ),
    "Adam's epsilon behind clipping": Program(
        adam, lambda: (paddle.zeros([16]), paddle.zeros([16]))
    ),
    "A gradient norm decides to skip": Program(clipped, lambda: (normal(64, scale=100.0),)),
    "Updates vanish": Program(
        small_updates, lambda: (1.0 + normal(64, scale=0.1), normal(64, seed=1)), "bfloat16"
    ),
    "Positions counted in BF16": Program(
        counted_positions, lambda: (normal(321, 16), paddle.ones([2, 320])), "bfloat16"
    ),
    "Transformer": Program(
        healthy_attention,
        lambda: (normal(3, 8, 16), *weights(*SQUARE), padding(8, 5, 2)),
        "bfloat16",
        fails=False,
    ),
    "A mask of -inf": Program(masked_attention, lambda: (normal(2, 8, 16), causal()), fails=False),
    "CNN, scaled gradients": Program(
        convolutions,
        lambda: (
            normal(2, 3, 16, 16),
            normal(8, 3, 3, 3, scale=0.2),
            normal(16, 8, 3, 3, scale=0.1),
        ),
        fails=False,
    ),
    "Adam": Program(
        healthy_adam,
        lambda: (normal(16, scale=0.1), paddle.square(normal(16, scale=0.1))),
        "bfloat16",
        fails=False,
    ),
}


def rounded(dtype: str) -> Round:
    """Returns the rounding to a dtype; its kernels are those that the checker looks at."""
    return lambda x: x.astype(dtype).astype("float32")


def step(program: Program) -> bool:
    """Runs a program forward and backward; returns whether outputs and gradients are finite."""
    arguments = program.arguments()
    out = program.call(rounded(program.dtype), *arguments)
    if not out.stop_gradient:
        out.backward(paddle.ones_like(out))
    made = [out, *(x.grad for x in arguments if x.grad is not None)]
    return all(bool(paddle.isfinite(x).all()) for x in made)


def checked(program: Program) -> tuple[str, str | None, list[str]]:
    """Returns the checker's verdict, its words, and the line in its traceback."""
    debugging.enable_tensor_checker(CONFIG)
    try:
        step(program)
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [x for x in frames if x.filename == __file__ and x.name == program.call.__name__]
        places = {(x.filename, x.lineno or 0) for x in own[-1:]}
        right = program.fails and marked([program.call]) & places
        message = str(error).strip().splitlines()[0][:200]
        return LINE if right else OTHER, message, [f"scoreboard_paddle.py:{n}" for _, n in places]
    finally:
        debugging.disable_tensor_checker()
    return NOTHING, None, []


def rows(program: Program) -> Iterator[dict[str, Any]]:
    """Runs a program without and with the checker; yields what it says, and the times."""

    def steady(call: Callable[[], Any]) -> float:
        return statistics.median(timed(call)[1] for _ in range(REPEATS))

    paddle.seed(0)
    finite, first_plain = timed(lambda: step(program))
    plain = first_plain, steady(lambda: step(program))
    try:
        (verdict, message, where), first = timed(lambda: checked(program))
        again = steady(lambda: checked(program))
    except Exception as error:  # recorded: a checker that fails says nothing of the program
        verdict, message, where, first, again = FAILED, str(error)[:200], [], 0.0, 0.0
    yield {
        "tool": TOOL,
        "verdict": verdict,
        "message": message,
        "where": where,
        "finite": finite,
        "first": [round(first, 4), round(plain[0], 4)],
        "steady": [round(again, 7), round(plain[1], 7)],
    }


def versions() -> dict[str, str]:
    made = {k: v for k, v in versions_of_jax().items() if k != "jax"}
    return made | {"paddlepaddle": importlib.metadata.version("paddlepaddle")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("programs", nargs="*", metavar="program", help="by name; all by default")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    given = parser.parse_args()
    for name in [x for x in PROGRAMS if x in given.programs or not given.programs]:
        if given.again or (name, TOOL) not in recorded():
            for row in rows(PROGRAMS[name]):
                record(name, row | versions())


if __name__ == "__main__":
    main()
