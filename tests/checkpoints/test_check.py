"""`checkpoints.check` names faults that are put into clean files, and finds nothing in these."""

import pytest
from proofs.checkpoints import mutants

from scalewise import checkpoints

SEEDS = range(18)  # one of each fault


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.thorough(keep=6)
def test_a_fault_is_found_and_named_beside_the_original(seed, tmp_path):
    _, fault, names, original = mutants.mutant(seed, tmp_path / "mutant")
    mutants.write_file(tmp_path / "original.safetensors", original, {})
    report = checkpoints.check(tmp_path / "mutant", tmp_path / "original.safetensors")
    assert mutants.judged(report, fault, names) == (True, True), str(report)


@pytest.mark.parametrize("name", mutants.LAYOUTS)
@pytest.mark.thorough(keep=3)
def test_a_clean_file_has_no_findings(name, tmp_path):
    assert mutants.clean(7, name, tmp_path) == [0, 0]
