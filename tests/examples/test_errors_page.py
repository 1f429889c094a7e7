"""The page of errors has the messages that the code raises, and every public error class."""

import ast

import pytest

from pages import page_script

MODULE = page_script("errors_page")
INTERNAL = {
    "NotEditableError",
    "_NotKnownError",
    "_WithinVmap",
}  # never leave the package


def test_every_error_class_is_on_the_page_or_internal():
    found = set()
    for path in MODULE.SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = " ".join(map(ast.unparse, node.bases))
                if "Error" in bases or "Exception" in bases or "Interrupt" in bases:
                    found.add(node.name)
    assert found == set(MODULE.PUBLIC) | INTERNAL


def test_a_case_that_raises_nothing_is_found():
    case = MODULE.Case("none", lambda: None, "", "")
    with pytest.raises(AssertionError, match="nothing was raised"):
        MODULE.message(case)
