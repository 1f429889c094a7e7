"""What ``make gpu-hlo`` says of figures that moved."""

from collections import Counter
from dataclasses import replace

import pytest
from benchmarks.expected import Expected, moved
from benchmarks.hlo import Product, Summary


def product(*operands, result="bf16", target="__cublas$lt$matmul$f8"):
    return Product(operands, result, target, 1024)


NARROW, WIDE = product("f8e4m3fn", "f8e5m2"), product("bf16", "bf16", target="__cublas$gemm")
PLAIN = Summary(
    products=Counter({WIDE: 5}), kernels=10, bytes_outside=1000, seconds_products=1.0,
    seconds_outside=1.0, cycles=0, collectives=Counter({("all-gather", "bf16"): 1 << 20}),
    sent=Counter({("all-gather", "bf16"): 4 << 20, ("reduce-scatter", "bf16"): 4 << 20}),
    seconds_sending=1.0, launches=Counter({"all-gather": 4, "reduce-scatter": 1}),
)  # fmt: skip
GOOD = replace(
    PLAIN, products=Counter({NARROW: 3, WIDE: 2}), kernels=20, bytes_outside=1200,
    collectives=Counter({("all-gather", "f8e4m3fn"): 1 << 20, ("reduce-scatter", "bf16"): 1 << 20,
                         ("all-reduce", "f32"): 4}),
    sent=Counter({("all-gather", "f8e4m3fn"): 2 << 20, ("reduce-scatter", "bf16"): 4 << 20}),
    launches=Counter({"all-gather": 4, "reduce-scatter": 1, "all-reduce": 9}),
)  # fmt: skip
EXPECTED = Expected(
    narrow=3, kernels=20, outside=1.2, gathered=("f8e4m3fn",), sent=0.75, reductions=9, speed=1.0
)


def test_nothing_is_said_of_what_is_expected():
    assert list(moved("mlp", GOOD, PLAIN, EXPECTED)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernels": 21}, "kernels 21, expected at most 20"),
        ({"seconds_outside": 1.5}, "0.8 of plain's speed, expected at least 1"),
        ({"bytes_outside": 1300}, "bytes outside of products, of plain's, 1.3, expected at most"),
        ({"products": Counter({NARROW: 2, WIDE: 3})},
         "2 products have 8-bit operands or less, expected 3"),
        ({"products": Counter({NARROW: 3, WIDE: 1})},
         "4096 operations in products, expected at least 5069"),
        ({"products": Counter({replace(NARROW, result="f32"): 3, WIDE: 2})},
         "products return ['f32'], expected ['bf16']"),
        ({"products": Counter({replace(NARROW, target="dot"): 3, WIDE: 2})},
         "narrow products by ['dot'], expected 'cublas$lt$matmul$f8'"),
        ({"collectives": GOOD.collectives | Counter({("all-gather", "f8e5m2"): 1 << 20})},
         "gathers ['f8e4m3fn', 'f8e5m2'] over devices, expected ['f8e4m3fn']"),
        ({"collectives": GOOD.collectives | Counter({("reduce-scatter", "f32"): 1 << 20})},
         "reduces ['bf16', 'f32'] over devices, expected ['bf16']"),
        ({"launches": Counter({"all-reduce": 10})}, "all-reduces 10, expected at most 9"),
        ({"sent": PLAIN.sent}, "bytes sent, of plain's, 1, expected at most 0.75"),
    ],
)  # fmt: skip
def test_each_figure_that_moved_has_a_sentence(change, said):
    [sentence] = moved("mlp", replace(GOOD, **change), PLAIN, EXPECTED)
    assert sentence.startswith("mlp: ")
    assert said in sentence
