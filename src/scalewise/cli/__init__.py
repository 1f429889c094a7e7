"""The `scalewise` command: every subcommand calls one public function."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer

from ._audit import audit
from ._cast import cast
from ._checkpoints import check, diff, inspect
from ._compare import compare
from ._formats import formats
from ._plan import plan
from ._recipes import recipes
from ._record import record
from ._refusal import run
from ._table import table
from ._train import train
from ._tune import tune

app = typer.Typer(
    name="scalewise",
    help="Low-precision arithmetic for JAX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes show the types of Python beside each option
)
EXAMPLES = {  # shown at the end of each help
    "audit": "scalewise audit model.py:train_step --args example --out report.html",
    "tune": "scalewise tune model.py:loss_of --args example --format bf16",
    "plan": "scalewise plan model.py:logits --bits 6 --objective kl --args example",
    "record": "scalewise record model.py:train_step --out here.safetensors",
    "diff": "scalewise diff before.json after.json",
    "compare": "scalewise compare gpt --method float32 --method fp8 --steps 100",
    "train": "scalewise train gpt --method fp8 --steps 300 --out runs/fp8 --resume",
    "cast": "scalewise cast model --to nvfp4 --layout modelopt --out model-nvfp4",
    "check": "scalewise check model-nvfp4 --against model",
    "formats": "scalewise formats --device h100",
    "recipes": "scalewise recipes fp8",
    "inspect": "scalewise inspect 0.1 0x3c00 --format fp16",
}


def _add(name: str, command: Callable[..., None], **options: Any) -> None:
    app.command(name, epilog=f"\b\nExample:\n  {EXAMPLES[name]}", **options)(command)


_add("audit", audit)
_add("tune", tune)
_add("plan", plan)
_add("record", record)
_add("diff", diff)
_add("compare", compare)
_add("train", train)
_add("cast", cast)
_add("check", check)
_add("formats", formats)
_add("recipes", recipes)
app.add_typer(
    table, name="table", epilog="\b\nExample:\n  scalewise table functions exp --format bf16"
)
_add("inspect", inspect, context_settings={"ignore_unknown_options": True})


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("scalewise"))
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Low-precision arithmetic for JAX."""


def main() -> None:
    """Entry point of the console script."""
    run(app)
