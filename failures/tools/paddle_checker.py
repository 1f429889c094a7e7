"""``paddle.amp.debugging.enable_tensor_checker`` on programs of Paddle.

The checker (aborting) raises at the first kernel with infinity or NaN in its result, which is
``cast`` where a number overflows; the traceback has the line.
"""

from __future__ import annotations

import traceback
from typing import Any

import paddle
from paddle.amp import debugging

from .. import paddle as programs
from ..programs import Answer, Finding, Program
from . import checked

CONFIG = debugging.TensorCheckerConfig(
    enable=True, debug_mode=debugging.DebugMode.CHECK_NAN_INF_AND_ABORT
)
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def step(program: Program) -> bool:
    """Runs a program forward and backward; returns whether outputs and gradients are finite."""
    paddle.seed(0)
    args, dtype = program.args(), DTYPES[program.low]
    out = program.call(lambda x: x.astype(dtype).astype("float32"), *args)
    if not out.stop_gradient:
        out.backward(paddle.ones_like(out))
    made = [out, *(x.grad for x in args if x.grad is not None)]
    return all(bool(paddle.isfinite(x).all()) for x in made)


def tensor_checker(program: Program, args: Any) -> Answer:
    def check() -> Answer:
        debugging.enable_tensor_checker(CONFIG)
        try:
            step(program)
        except RuntimeError as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [x for x in frames if x.filename == programs.__file__]
            message = str(error).strip().splitlines()[0][:200]
            kind = "nan" if "nan" in message.lower() and "inf" not in message else "overflow"
            return Answer(
                (Finding(kind, [(x.filename, x.lineno or 0) for x in own[-1:]], message),)
            )
        finally:
            debugging.disable_tensor_checker()
        return Answer()

    return checked(lambda: step(program), check)
