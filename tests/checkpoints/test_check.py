"""`checkpoints.check` names faults that are put into clean files, and finds nothing in these."""

import pytest
from proofs.checkpoints import mutants

from scalewise import checkpoints

SEEDS = range(16)  # one of each fault
ALONE = [0, 1, 5, 7, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_is_found_and_named_beside_the_original(seed, tmp_path):
    _, fault, names, original = mutants.mutant(seed, tmp_path / "mutant")
    mutants.write_file(tmp_path / "original.safetensors", original, {})
    report = checkpoints.check(tmp_path / "mutant", tmp_path / "original.safetensors")
    assert mutants.judged(report, fault, names) == (True, True), str(report)


@pytest.mark.parametrize("seed", ALONE)
def test_a_fault_that_moves_the_magnitude_is_found_without_the_original(seed, tmp_path):
    _, fault, names, _ = mutants.mutant(seed, tmp_path / "mutant")
    report = checkpoints.check(tmp_path / "mutant")
    assert mutants.judged(report, fault, names) == (True, True), str(report)


def test_a_bias_that_is_not_found_alone_gives_a_clean_file_of_other_weights(tmp_path):
    layout, _, names, original = mutants.mutant(6, tmp_path / "mutant")
    assert checkpoints.check(tmp_path / "mutant")
    assert mutants.has_clean_twin(layout, names, original, tmp_path / "mutant")
    assert not mutants.has_clean_twin(layout, [], original, tmp_path / "mutant")


@pytest.mark.parametrize("name", mutants.LAYOUTS)
def test_a_clean_file_has_no_findings(name, tmp_path):
    assert mutants.clean(7, name, tmp_path) == [0, 0]
