"""Edited lines of fixes: the operands of an operation in float32, in the source's own words."""

import re

import pytest
import torch
from torch import nn

import scalewise.torch as st
from scalewise.torch._edits import edited


@pytest.mark.parametrize(
    ("line", "operations", "expected"),
    [
        ("y = x * b", ["mul"], "y = x.float() * b"),
        ("y = 1 / x.square()", ["reciprocal", "pow"], "y = 1 / x.float().square()"),
        ("y += x * b", ["add"], "y = y.float() + x * b"),
        ("y += x * b", ["mul"], "y += x.float() * b"),
        ("y = torch.outer(x, b)", ["mul"], "y = torch.outer(x.float(), b.float())"),
        ("y = x @ b", ["mm"], "y = x.float() @ b.float()"),
        (
            "y = torch.einsum('ij,jk->ik', x, b)",
            ["bmm"],
            "y = torch.einsum('ij,jk->ik', x.float(), b.float())",
        ),
        (
            "y = self.layer(x)",
            ["linear"],
            "y = self.layer(x.float())  # after model.half(): self.layer.float()",
        ),
        ("y = torch.arange(5)", ["arange"], ""),
        (
            "y = x * torch.finfo(x.dtype).min",
            ["mul"],
            "y = x.float() * torch.finfo(torch.float32).min",
        ),
        ("y = x[:, None].to(b.dtype)", ["to"], "y = x[:, None].float()"),
        (
            "y = torch.exp(x @ b * a.exp())",
            ["exp"],
            "y = torch.exp((x @ b * a.float().exp()).float())",
        ),
    ],
)
def test_an_edited_line_has_its_operands_in_float32(tmp_path, line, operations, expected):
    file = tmp_path / "model.py"
    file.write_text(f"{line}\n")
    assert edited(str(file), 1, dict.fromkeys(operations, "float")) == expected


SOURCES = {
    "sum": """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(8, 3)

    def forward(self, x):
        total = x.sum(1)
        return self.out(total / x.shape[1])
""",
    "product": """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(8, 3)

    def forward(self, x):
        hidden = x * x.abs()
        return self.out(hidden) / 1000
""",
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_edited_lines_run_in_torch(tmp_path, name):
    """A sum in float32 is cast back before the layer, which takes operands of one dtype; a layer
    that reads what overflows in 16 bits is in float32."""
    file, names, source = tmp_path / "model.py", {}, SOURCES[name]
    file.write_text(source)
    exec(compile(source, str(file), "exec"), names)
    torch.manual_seed(0)
    model, x = names["Model"](), torch.rand(3, 900, 8) * (200 if name == "sum" else 400)
    fix = st.audit(model, (x,), low="fp16", trials=6).findings[0].fix
    lines = source.split("\n")
    for _, number, text in fix.lines:
        old = lines[number - 1]
        lines[number - 1] = old[: len(old) - len(old.lstrip())] + text
    exec(compile("\n".join(lines), str(file), "exec"), names)
    edited_model = names["Model"]()
    edited_model.load_state_dict(model.state_dict())
    edited_model.half()
    for layer in [
        x for _, _, text in fix.lines for x in re.findall(r"half\(\): self\.(\w+)", text)
    ]:
        getattr(edited_model, layer).float()
    got, want = edited_model(x.half()).float(), model(x)
    assert (got - want).norm() < 0.01 * want.norm()


class Markov(nn.Module):
    """The likelihoods of a hidden Markov model's states, which underflow."""

    def __init__(self):
        super().__init__()
        self.moves = nn.Parameter(torch.randn(5, 5, generator=torch.Generator().manual_seed(1)))
        self.emits = nn.Parameter(torch.randn(5, 20, generator=torch.Generator().manual_seed(2)))

    def likelihoods(self, a, b, seen):
        states = b[:, seen[0]] / 5
        for s in seen[1:].unbind():
            states = (states @ a) * b[:, s]
        return states

    def forward(self, seen):
        a, b = self.moves.softmax(-1), self.emits.softmax(-1)
        states = self.likelihoods(a, b, seen)
        return states / states.sum()


def test_two_fixes_that_help_only_together_are_edited_lines_of_a_trainable_module():
    seen = torch.randint(20, (8,), generator=torch.Generator().manual_seed(0))
    report = st.audit(Markov(), (seen,), low="fp16", trials=20)
    worst = report.findings[0]
    assert worst.kind == "underflow"
    assert ", together with float32 for line" in str(worst.fix)
    assert "states.float() @ a.float() * b[:, s]" in str(worst.fix)
    assert "return states.float() / states.float().sum()" in str(worst.fix)
    fixed = worst.fix.apply(Markov())
    fixed(seen)[0].backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in fixed.parameters())
    assert len(list(fixed.parameters())) == 2
