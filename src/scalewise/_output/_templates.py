"""Jinja templates of pages with a Content-Security-Policy."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ._page import policy, visible


class Pages(Environment):
    """A package's templates; the policy is inserted after ``<meta charset=...>``."""

    def __init__(self, package: str):
        super().__init__(
            loader=PackageLoader(package, "."), autoescape=True, undefined=StrictUndefined,
            finalize=_shown, trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip

    def rendered(self, name: str, *, styles: str = "", **values: object) -> str:
        """Renders the template `name` with these values; ``styles`` has those that they contain."""
        assert self.loader is not None
        source = self.loader.get_source(self, name)[0]
        html = self.get_template(name).render(**values)
        head = '<meta charset="utf-8">\n'
        assert html.count(head) == 1
        tag = f'<meta http-equiv="Content-Security-Policy" content="{policy(source + styles)}">\n'
        return html.replace(head, head + tag)


def _shown(value: object) -> str:
    """Returns what a template prints for a value; Markup is printed as it is."""
    if isinstance(value, Markup):
        return value
    return visible(value if isinstance(value, str) else str(value))
