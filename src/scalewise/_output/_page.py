"""HTML pages that run no foreign code and show control characters."""

from __future__ import annotations

import base64
import hashlib
import html
import re

# Unicode's direction marks, embeddings, overrides and isolates (UAX #9, section 2), which change
# the order in which text is shown.
BIDIRECTIONAL = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'"


def visible(text: str) -> str:
    """Returns the text with control characters, also bidirectional ones, as escapes."""
    text = BIDIRECTIONAL.sub(lambda m: f"\\u{ord(m[0]):04x}", text)
    return CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", text)


def policy(template: str) -> str:
    """Returns the Content-Security-Policy that allows the style and script of a template alone.

    It is made from the template before any value is inserted, so that a script that a value brings
    into the page isn't run.
    """
    sources = {}
    for tag in ("style", "script"):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in found)
        sources[tag] = " ".join(f"'sha256-{d}'" for d in digests) or "'none'"
    return f"{POLICY}; style-src {sources['style']}; script-src {sources['script']}"


def framed(page: str) -> str:
    style = "width: 100%; height: 40em; border: 1px solid #8888"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(page)}"></iframe>'
