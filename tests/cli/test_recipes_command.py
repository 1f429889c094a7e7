"""`scalewise recipes`: the list, and one recipe as code."""

from typer.testing import CliRunner

import scalewise as sw
from scalewise.cli import app
from scalewise.training import STATES


def test_the_list_has_each_recipe_and_state():
    result = CliRunner().invoke(app, ["recipes"])
    assert result.exit_code == 0
    names = [row.split()[0] for row in result.stdout.splitlines()[1:] if not row.startswith(" ")]
    assert names == [*sw.recipes.CATALOGUE, *(f"state-{name}" for name in STATES)]


def test_one_recipe_is_shown_as_code():
    result = CliRunner().invoke(app, ["recipes", "quartet2"])
    assert result.stdout.strip() == repr(sw.recipes.quartet2)


def test_an_unknown_recipe_is_refused():
    result = CliRunner().invoke(app, ["recipes", "quartet3"])
    assert result.exit_code != 0
    assert "did you mean 'quartet' or 'quartet2'" in result.output
