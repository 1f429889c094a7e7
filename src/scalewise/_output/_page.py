"""HTML pages that run no foreign code and show every character for what it is."""

from __future__ import annotations

import base64
import hashlib
import re

# Unicode's explicit direction marks, embeddings, overrides and isolates (UAX #9, section 2):
# text between two of them is shown in another order than it is written.
BIDIRECTIONAL = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'"


def visible(text: str) -> str:
    r"""The text with control characters, bidirectional ones too, written out.

    Example:
        >>> visible("a\u202eb")
        'a\\u202eb'
    """
    text = BIDIRECTIONAL.sub(lambda m: f"\\u{ord(m[0]):04x}", text)
    return CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", text)


def policy(html: str) -> str:
    """The Content-Security-Policy that allows a page's own style and script and nothing else."""
    sources = {}
    for tag in ("style", "script"):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in found)
        sources[tag] = " ".join(f"'sha256-{d}'" for d in digests) or "'none'"
    return f"{POLICY}; style-src {sources['style']}; script-src {sources['script']}"
