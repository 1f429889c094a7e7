"""Edited lines of fixes: the operands of an operation in float32, in the source's own words."""

import re

import pytest
import torch
from torch import nn

import scalewise.torch as st
from scalewise.torch._edits import Line, edits, operation_of

A = torch.ops.aten


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
            "y = self.layer.float()(x.float())",
        ),
        ("y = x.index_add(0, i, b)", ["index_add"], "y = x.float().index_add(0, i, b.float())"),
        (
            "y = torch.arange(5, dtype=x.dtype) + b",
            ["arange", "add"],
            "y = torch.arange(5, dtype=torch.float32) + b",
        ),
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
        ("y = self.softmax(x + (x * b))", ["softmax"], "y = self.softmax((x + x * b).float())"),
        ("y = self.e(x)", ["embedding"], "y = self.e.float()(x)"),
        ("y = (x * b).sum()", ["sum"], "y = (x * b).float().sum()"),
        ("y = self.b.sum()", ["sum"], "y = self.b.float().sum()"),
        ("if (x * b).any():  # a comment", ["mul"], "if (x.float() * b).any():  # a comment"),
        ("y = (x + b).half() * a", ["mul", "to"], "y = (x + b).float() * a"),
    ],
)
def test_an_edited_line_has_its_operands_in_float32(tmp_path, line, operations, expected):
    assert edited(tmp_path, line, dict.fromkeys(operations, "float")) == expected


def edited(folder, line, operations, **fields):
    file = folder / "model.py"
    file.write_text(line + "\n    pass\n" * line.startswith("if "))
    own = fields.pop("numbers", ())
    (edit,) = edits(str(file), {1: Line(operations, own)}, **fields)
    assert edit.before == (line,)
    return "\n".join(edit.after)


@pytest.mark.parametrize(
    "product",
    [
        "torch.mv(x, y[0])",
        "x[0].dot(y[0])",
        "x.matmul(y)",
        "torch.inner(x, y)",
        "torch.tensordot(x, y, 1)",
        "torch.linalg.vecdot(x, y)",
        "x.addmm(x, y)",
        "torch.baddbmm(x[None], x[None], y[None])",
        "torch.linalg.cross(x[:, :3], y[:, :3])",
        "torch.cdist(x * 60, y * 60)",
        "torch.nn.functional.bilinear(x, y, torch.ones_like(x)[None])",
        "torch.nn.functional.prelu(x * 100, y[0, :1].abs())",
    ],
)
def test_the_edit_of_operands_that_need_one_dtype_casts_all_of_them_and_runs(tmp_path, product):
    file = tmp_path / "model.py"
    file.write_text(f"import torch\n\ndef f(x, y):\n    z = {product}\n    return z / 1000\n")
    scope = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    made = torch.Generator().manual_seed(0)
    x, y = (size * torch.randn(4, 4, generator=made) for size in (300, 400))
    report = st.audit(scope["f"], (x, y), low="fp16")
    assert report.findings[0].kind == "overflow"
    (edit,) = report.edits  # torch ran it
    assert edit.after[0].count(".float()") >= 2


def test_a_line_without_these_operations_has_no_edit(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("y = torch.arange(5)\n")
    assert edits(str(file), {1: Line({"arange": "float"})}) == []


def test_lines_of_one_statement_are_one_edit(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("y = (\n    x * b  # a product\n    + a.exp()\n)\n")
    lines = {2: Line({"mul": "float"}), 3: Line({"exp": "float"})}
    (edit,) = edits(str(file), lines, wide="double")
    assert edit.after[1:3] == ("    x.double() * b  # a product", "    + a.double().exp()")


def test_a_statement_under_autocast_gets_a_region_without_it(tmp_path):
    text = edited(tmp_path, "y = self.layer(x)", {"linear": "float"}, autocast=True)
    assert text == 'with torch.autocast("cuda", enabled=False):\n    y = self.layer(x.float())'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("y = self.e(ids)", "y = self.e.float()(ids)"),
        ("y = F.embedding(ids, b)", "y = F.embedding(ids, b.float())"),
        ("y = ids.to(b.dtype)", "y = ids.float()"),
        ("y = ids * b", "y = ids * b.float()"),
        ("y = self.embedding(ids)", "y = self.embedding.float()(ids)"),
    ],
)
def test_an_edited_line_leaves_integers_as_they_are(tmp_path, line, expected):
    operations = dict.fromkeys(["embedding", "to", "mul"], "float")
    assert edited(tmp_path, line, operations, numbers={"ids"}) == expected


def test_the_edited_line_of_an_embedding_is_torchs():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(50, 8), nn.Linear(8, 1)
            torch.nn.init.ones_(self.embedding.weight)

        def forward(self, ids):
            return self.out(self.embedding(ids)).square().sum(1).mean()

    ids = torch.zeros(16, 600, dtype=torch.long)
    report = st.audit(Text(), (ids,), low="bf16", grad=True)
    found = [str(edit) for edit in report.edits if "embedding" in str(edit)]
    assert found
    assert not any("ids.float()" in text for text in found)


@pytest.mark.parametrize(
    ("overload", "name"),
    [
        (A._to_copy.default, "to"),
        (A._softmax.default, "softmax"),
        (A.native_layer_norm.default, "layer_norm"),
    ],
)
def test_an_operation_has_the_name_that_users_write(overload, name):
    assert operation_of(torch.fx.Graph().call_function(overload)) == name


INIT = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(8, 3)
        self.register_buffer("lowest", torch.tensor(-1e9))

    def forward(self, x):
"""
PROGRAMS = {
    # a sum in float32 is cast back before the layer, which takes operands of one dtype
    "sum": (200, "total = x.sum(1)", "return self.out(total / x.shape[1])"),
    # a layer that reads what overflows in 16 bits is in float32
    "product": (400, "hidden = x * x.abs()", "return self.out(hidden) / 1000"),
    # so is one that reads it behind an operation that doesn't round
    "moved": (
        400,
        "squares = torch.stack((x * x, x), -1)",
        "return squares.sum(1) @ torch.ones(2, 3, dtype=x.dtype) / 1e6",
    ),
    # a constant gets its dtype where it is made
    "constant": (
        1,
        "beta = torch.tensor(0.999, dtype=x.dtype)",
        "return x / ((1 - beta) * 1e3 * x.square() + 1e-3).sqrt()",
    ),
    # a number without axes promotes no array
    "scalar": (
        1,
        "scores = torch.where(x[..., :1] > 2, x, self.lowest)",
        "return torch.softmax(scores, -1) @ x.mT",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_edited_lines_run_in_torch(tmp_path, name):
    size, *body = PROGRAMS[name]
    source = INIT + "\n".join(f"        {line}" for line in body)
    file, names = tmp_path / "model.py", {}
    file.write_text(source)
    exec(compile(source, str(file), "exec"), names)
    torch.manual_seed(0)
    model, x = names["Model"](), torch.rand(3, 900, 8) * size
    low = "bf16" if name == "constant" else "fp16"
    report = st.audit(model, (x,), low=low, trials=8)
    assert report.edits
    lines = source.split("\n")
    for edit in report.edits:
        assert lines[edit.line - 1] == edit.before[0]
        lines[edit.line - 1] = "\n".join(edit.after)
    exec(compile("\n".join(lines), str(file), "exec"), names)
    edited_model = names["Model"]()
    edited_model.load_state_dict(model.state_dict())
    dtype = torch.bfloat16 if low == "bf16" else torch.float16
    edited_model.to(dtype)
    shown = ", ".join(str(finding.fix) for finding in report.findings)
    if "keep lowest in float32" in shown:
        edited_model.lowest = model.lowest
    got, want = edited_model(x.to(dtype)).float(), model(x)
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
    assert ", together with float32 for" in str(worst.fix)
    text = "\n".join(map(str, report.edits))
    assert "(states.float() @ a.float()) * b[:, s]" in text
    assert re.search(r"return states(.float\(\))? / states.float\(\).sum\(\)", text)
    fixed = worst.fix.apply(Markov())
    fixed(seen)[0].backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in fixed.parameters())
    assert len(list(fixed.parameters())) == 2


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 4)

    def forward(self, x):
        h = self.out(x)
        return (h * h).sum()


@pytest.mark.parametrize("autocast", [False, True])
def test_edits_of_a_gradient_are_run_with_its_loss_scale(autocast):
    torch.manual_seed(0)
    x = 300 * torch.randn(4, 64)
    report = st.audit(Energy(), (x,), low="fp16", grad=True, autocast=autocast)
    fixes = [finding.fix for finding in report.findings if finding.fix]
    assert any(fix.power for fix in fixes) or autocast
    for edit in report.edits:
        assert autocast == ("enabled=False" in str(edit))
    assert bool(report.edits) == any(fix.edits for fix in fixes)
    assert report.edits or autocast


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 4)

    def forward(self, x):
        squares = x * x
        return {"y": self.out(squares / squares.sum(-1, keepdim=True)), "n": 3}


@pytest.mark.parametrize("grad", [False, True])
def test_edits_are_run_with_a_loss_of_jax(grad):
    def loss(outs):
        return (outs["y"] ** 2).sum()

    torch.manual_seed(0)
    x = 300 * torch.randn(4, 64)
    report = st.audit(Squares(), (x,), low="fp16", grad=grad, loss=loss)
    assert report.edits[0].after[0].endswith("squares = x.float() * x")
    run = report.run_again()  # of the source as it is
    assert run.non_finite == report.error.non_finite
    assert run.relative == pytest.approx(report.error.relative, rel=0.05)


class OneDtype(nn.Module):
    def forward(self, x):
        squares = x * x
        if squares.dtype != x.dtype:
            raise TypeError("dtypes differ")
        return squares.mean(-1).sqrt()


def test_an_edit_that_torch_refuses_to_run_is_not_printed(capsys):
    model, x = OneDtype(), torch.full((2, 64), 400.0)
    report = st.audit(model, (x,), low="fp16")
    assert report.findings[0].fix.edits
    assert report.edits == ()
    report.show()
    assert "no edit of the source that was run has this error" in capsys.readouterr().out
    assert model(x).tolist() == [400, 400]  # its own code again


class Rotation(nn.Module):
    def forward(self, q):
        w = q[:, 0]
        return torch.acos(w)  # here


def test_the_rounding_of_an_input_is_named_at_the_line_that_computes_with_it():
    q = torch.tensor([[0.9999, 0.0], [0.9998, 0.1]])
    (worst,) = st.audit(Rotation(), (q,), low="fp16").findings
    assert worst.source.endswith("# here")
    assert str(worst.fix).endswith("keep input 0 in float32")
