"""Edited lines of fixes: the operands of an operation in float32, in the source's own words."""

import pytest

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
