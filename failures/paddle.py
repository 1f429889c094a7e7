"""Programs like those of the gallery as functions of Paddle.

Paddle's kernels for a CPU don't add, multiply or contract float16 numbers (``add``, ``multiply``,
``matmul``, ``softmax`` and ``where`` are refused, in bfloat16 most of them too). So each result is
computed in float32 and cast to the dtype and back, gradients too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle.nn import functional as F

from .programs import Program, load, register

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


def program(
    call: Callable[..., Tensor], args: Callable[[], tuple[Tensor, ...]], low: str = "fp16",
    fails: bool = True,
) -> Program:  # fmt: skip
    """Returns a function whose results are rounded; it fails at its marked lines."""
    return Program(call, args, low, ("overflow",) if fails else ())


def weights(*shapes: tuple[int, int]) -> tuple[Tensor, ...]:
    return tuple(normal(*s, seed=i, scale=s[0] ** -0.5) for i, s in enumerate(shapes, 1))


def padding(*lengths: int) -> Tensor:
    return paddle.to_tensor(np.float32(np.arange(8) >= np.array(lengths)[:, None]))


def causal() -> Tensor:
    return paddle.to_tensor(np.triu(np.full((8, 8), -np.inf, "float32"), 1))


SQUARE = ((16, 16),) * 3
PROGRAMS: dict[str, Program] = {
    "T5 in fp16": program(
        feed_forward,
        lambda: (
            normal(4, 16),
            normal(16, 64, seed=1, scale=40),
            normal(64, 16, seed=2, scale=300),
        ),
    ),
    "An empty sequence in a padded batch": program(
        attention, lambda: (normal(3, 8, 16), *weights(*SQUARE), padding(8, 5, 0))
    ),
    "LayerNorm of outliers": program(
        layer_norm, lambda: (normal(8, 32, scale=400.0), *weights((32, 4)))
    ),
    "Sum of squares in a norm": program(
        rms_norm, lambda: (normal(1, 4096, scale=6.0), *weights((4096, 4)))
    ),
    "A divergence with epsilons": program(
        divergence,
        lambda: (
            normal(16, 8, seed=3),
            normal(8, 10, scale=12.0),
            normal(8, 10, seed=2, scale=12.0),
        ),
    ),
    "Logarithms of smoothed targets": program(
        smoothed_cross_entropy,
        lambda: (normal(16, 8, seed=3), *weights((8, 32)), normal(32, 10, seed=2)),
    ),
    "Small gradients": program(small_gradients, lambda: (normal(16, 1), normal(64, 16, seed=1))),
    "A static loss scale of 65536": program(
        static_loss_scale, lambda: (normal(16, 8, seed=3), *weights((8, 16), (16, 4)))
    ),
    "Adam's epsilon behind clipping": program(
        adam, lambda: (paddle.zeros([16]), paddle.zeros([16]))
    ),
    "A gradient norm decides to skip": program(clipped, lambda: (normal(64, scale=100.0),)),
    "Updates vanish": program(
        small_updates, lambda: (1.0 + normal(64, scale=0.1), normal(64, seed=1)), "bf16"
    ),
    "Positions counted in BF16": program(
        counted_positions, lambda: (normal(321, 16), paddle.ones([2, 320])), "bf16"
    ),
    "Transformer": program(
        healthy_attention,
        lambda: (normal(3, 8, 16), *weights(*SQUARE), padding(8, 5, 2)),
        "bf16",
        fails=False,
    ),
    "A mask of -inf": program(masked_attention, lambda: (normal(2, 8, 16), causal()), fails=False),
    "CNN, scaled gradients": program(
        convolutions,
        lambda: (
            normal(2, 3, 16, 16),
            normal(8, 3, 3, 3, scale=0.2),
            normal(16, 8, 3, 3, scale=0.1),
        ),
        fails=False,
    ),
    "Adam": program(
        healthy_adam,
        lambda: (normal(16, scale=0.1), paddle.square(normal(16, scale=0.1))),
        "bf16",
        fails=False,
    ),
}

for name, made in PROGRAMS.items():
    kinds = load("gallery")[name].kinds if made.kinds else ()
    register("paddle", name, dataclasses.replace(made, kinds=kinds))


def arguments(program: Program) -> tuple[Tensor, ...]:
    return program.args()


def problems(program: Program) -> list[str]:
    """Nothing is measured: a program fails as that of the same name in the gallery."""
    program.lines()
    return []
