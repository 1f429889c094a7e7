"""Hooks of MkDocs: pages of the API and the command line, and of sources that pages link to.

Nothing of this is written to the repository: the pages are made when the site is built.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from inspect import isclass, isfunction, ismodule
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "scalewise"
PACKAGES = {  # and what each page says first
    "autoscale": "Runs a function on scaled arrays in narrow formats, with a recipe.",
    "audit": "Finds the lines where a function loses accuracy, and tries fixes.",
    "emulate": "Runs a function with each result rounded to a format.",
    "autocast": "Chooses the dtype in which each operation runs.",
    "training": "Loss scaling, narrow weights and moments, training steps and runs.",
    "formats": "Floating-point formats as plain data.",
    "rounding": "Rounds numbers to a format, and codes of numbers.",
    "scaled": "Arrays with scales, operations on them, and quantization.",
    "ops": "Norms, functions and sums in one format's arithmetic.",
    "devices": "The formats that a device's matrix units multiply.",
    "interpret": "The interpreter of JAX programs that the transformations are built on.",
    "primitives": "One row of facts for each primitive of JAX.",
}
ELSEWHERE = {"cli", "layers", "torch"}  # packages with pages made in other ways
SHIM = "https://unpkg.com/iframe-worker/shim"  # of the theme's plugin "offline"
FOREIGN = re.compile(
    r"<(?:script|img|iframe|source)[^>]* src=\"?https?:[^>]*>"
    r"|<link[^>]* rel=\"?(?:stylesheet|preload|preconnect)[^>]* href=\"?https?:[^>]*>"
)
LINK = re.compile(r"\]\(((?:\.\./)+)([^)#]*)\)")


def on_config(config: MkDocsConfig) -> None:
    """Lists the API's pages in the navigation."""
    pages = [{"All names": _page("names")}]
    pages += [{name: _page(name)} for name in (*PACKAGES, "torch")]
    for section in config.nav or []:
        for entry in section.get("Reference", []):
            if entry.get("Python") == "REFERENCE":
                entry["Python"] = pages


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages that are made here.

    Raises:
        PluginError: a public package has no page.
    """
    public = {p.parent.name for p in SOURCE.glob("[a-z]*/__init__.py")}
    if missing := public - set(PACKAGES) - ELSEWHERE:
        raise PluginError(f"add {', '.join(sorted(missing))} to PACKAGES in docs/site_hooks.py")
    for name, summary in PACKAGES.items():
        _add(files, config, _page(name), _reference(name, summary))
    _add(files, config, _page("names"), _names())
    _add(files, config, _page("torch"), _torch())
    _add(files, config, "reference/layers.md", _layers())
    _add(files, config, "reference/recipes.md", _recipes())
    _add(files, config, "reference/command-line.md", _command_line())
    for path in sorted(set(_linked_sources(config))):
        _add(files, config, f"source/{path}.md", _source(path))


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Lets links to sources lead to their pages."""
    up = "../" * page.file.src_uri.count("/")

    def local(link: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, link[1] + link[2])
        return link[0] if path is None else f"]({up}source/{path}.md)"

    return LINK.sub(local, markdown)


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """Keeps a page from loading anything from another host."""
    return _local(output, page.file.src_uri)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Keeps the page of errors from loading anything from another host."""
    return _local(output_content, "") if template_name.endswith(".html") else output_content


def _local(html: str, uri: str) -> str:
    """Returns a page with our script in place of the theme's, which it would fetch.

    Raises:
        PluginError: the page would load something else from another host.
    """
    html = html.replace(SHIM, "../" * uri.count("/") + "assets/worker.js")
    foreign = FOREIGN.search(html)
    if foreign:
        raise PluginError(f"{uri or '404.html'} loads {foreign[0]}")
    return html


def _add(files: Files, config: MkDocsConfig, uri: str, text: str) -> None:
    files.append(File.generated(config, uri, content=text))


def _page(package: str) -> str:
    return f"reference/{package}.md"


# -- API -----------------------------------------------------------------------------------------


def _reference(name: str, summary: str) -> str:
    lines = [f"# scalewise.{name}", "", summary, ""]
    package = importlib.import_module(f"scalewise.{name}")
    values = {public: getattr(package, public) for public in _public(SOURCE / name / "__init__.py")}
    described = [n for n, value in values.items() if isfunction(value) or isclass(value)]
    lines += [line for n in described for line in (f"::: scalewise.{name}.{n}", "")]
    others = [n for n in values if n not in described]
    if others:
        lines += ["## Values", "", "| name | type | value |", "|---|---|---|"]
        lines += [f"| `{n}` | {_type(values[n])} | {_value(values[n])} |" for n in others]
    return "\n".join(lines)


def _public(file: Path) -> list[str]:
    """Returns the names that a package exports as ``import X as X``."""
    nodes = [node for node in _parsed(file).body if isinstance(node, ast.ImportFrom)]
    aliases = [alias for node in nodes for alias in node.names]
    return [a.name for a in aliases if a.asname == a.name and not a.name.startswith("_")]


def _type(value: Any) -> str:
    return "module" if ismodule(value) else f"`{type(value).__name__}`"


def _value(value: Any) -> str:
    """Returns a value's text for a cell of a table, cut to a line; a module's first sentence."""
    text = (value.__doc__ or "") if ismodule(value) else repr(value)
    text = _cell(text)
    text = text if len(text) <= 100 else text[:99] + "…"
    return text if ismodule(value) else f"`{text}`"


def _names() -> str:
    """The names of the package itself, each with a link to its description."""
    lines = [
        "# scalewise",
        "",
        "Each of these is `scalewise.NAME`.",
        "",
        "| name | in |",
        "|---|---|",
    ]
    nodes = [n for n in _parsed(SOURCE / "__init__.pyi").body if isinstance(n, ast.ImportFrom)]
    for node in nodes:
        for alias in node.names:
            package = (node.module or alias.name).split(".")[0]
            title = f"[scalewise.{package}]({package}.md)"
            lines.append(f"| `{alias.name}` | {title} |")
    return "\n".join(lines[:6] + sorted(lines[6:], key=str.lower))


def _torch() -> str:
    """The names of scalewise.torch, which needs not be installed."""
    file = SOURCE / "torch" / "__init__.py"
    lines = ["# scalewise.torch", "", "PyTorch models and tensors. [PyTorch](../torch.md)", ""]
    return "\n".join(lines + [f"::: scalewise.torch.{name}\n" for name in _public(file)])


def _layers() -> str:
    """The layers of other libraries, which need not be installed."""
    package = SOURCE / "layers"
    lines = [
        "# scalewise.layers",
        "",
        ast.get_docstring(_parsed(package / "__init__.py")) or "",
        "",
    ]
    for file in sorted(package.glob("[a-z]*.py")):
        name = f"scalewise.layers.{file.stem}"
        lines += [f"## {name}", ""]
        classes = [n.name for n in _parsed(file).body if isinstance(n, ast.ClassDef)]
        lines += [line for c in classes for line in (f"::: {name}.{c}", "")]
    return "\n".join(lines)


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _recipes() -> str:
    from scalewise.autoscale import recipes

    lines = ["# scalewise.autoscale.recipes", ""]
    lines += ["[Choose a recipe](../guides/recipes.md) describes them.", ""]
    for name, recipe in recipes.CATALOGUE.items():
        lines += [f"## {name}", "", f"    {recipe}", ""]
    return "\n".join(lines)


# -- command line --------------------------------------------------------------------------------


def _command_line() -> str:
    import click
    from typer.main import get_command

    from scalewise.cli import app

    lines = ["# Command line", "", "Each subcommand calls one public function.", ""]

    def describe(name: str, command: click.Command) -> None:
        context = click.Context(command, info_name=name)
        usage = " ".join(command.collect_usage_pieces(context))
        lines.extend([f"## {name}", "", "    " + f"{name} {usage}", ""])
        lines.extend([_paragraphs(command.help), ""])
        rows = [r for p in command.params if (r := p.get_help_record(context))]
        if rows:
            lines.extend(["| option | |", "|---|---|"])
            lines.extend(f"| `{_cell(option)}` | {_cell(text)} |" for option, text in rows)
            lines.append("")
        for sub, child in sorted(getattr(command, "commands", {}).items()):
            describe(f"{name} {sub}", child)

    for sub, child in sorted(get_command(app).commands.items()):  # pyright: ignore
        describe(f"scalewise {sub}", child)
    return "\n".join(lines)


def _paragraphs(text: str | None) -> str:
    return re.sub(r"[\b\f]", "", text or "").strip()


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# -- sources -------------------------------------------------------------------------------------


def _outside(page: str, link: str) -> str | None:
    """The path in the repository that a page's relative link leads to, if it is outside of docs."""
    target = (ROOT / "docs" / page).parent / link
    path = target.resolve()
    if path.is_relative_to(ROOT / "docs") or not path.is_relative_to(ROOT) or not path.exists():
        return None
    return path.relative_to(ROOT).as_posix()


def _linked_sources(config: MkDocsConfig) -> Iterator[str]:
    folder = Path(config.docs_dir)
    for page in folder.rglob("*.md"):
        uri = page.relative_to(folder).as_posix()
        for link in LINK.finditer(page.read_text(encoding="utf-8")):
            path = _outside(uri, link[1] + link[2])
            if path is not None:
                yield path


def _source(path: str) -> str:
    file = ROOT / path
    if file.is_dir():
        inside = sorted(p.name for p in file.iterdir() if not p.name.startswith(("_", ".")))
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in inside) + "\n"
    language = {".py": "python", ".toml": "toml", ".md": "markdown"}.get(file.suffix, "text")
    text = file.read_text(encoding="utf-8")
    return f"# {path}\n\n~~~~~~{language}\n{text}\n~~~~~~\n"
