"""Old keys of reports, which warn and return what the new ones do; kept for one release."""

from __future__ import annotations

from typing import Any

from .._deprecated import renamed_attribute, warn_renamed

KEYS = {  # of reports, as attributes and in JSON: old name to new name
    "rows": "equations",
    "shadow": "reference",
    "idle": "unfixed",
    "error_wide": "error_float32",
    "broken": "non_finite",
    "broken_before": "non_finite_before",
    "broken_after": "non_finite_after",
    "broken_alone": "non_finite_alone",
    "bad": "reference_non_finite",
    "shadow2": "reference2",
    "shadow_max": "reference_max",
    "shadow_min_inverse": "reference_min_inverse",
}


def renamed(old: str) -> Any:
    """Returns a property that reads the attribute that ``old`` is now called, with a warning."""
    return renamed_attribute(old, KEYS[old])


class RenamedKeys(dict):
    """A dict that also finds its entries under their old keys, with a warning."""

    def __missing__(self, key: Any) -> Any:
        if KEYS.get(key) not in self:
            raise KeyError(key)
        warn_renamed(repr(key), repr(KEYS[key]))
        return self[KEYS[key]]


def with_new_keys(data: Any) -> Any:
    """Returns JSON data with the keys of an earlier release replaced by the new ones."""
    if isinstance(data, dict):
        return {KEYS.get(key, key): with_new_keys(x) for key, x in data.items()}
    return [with_new_keys(x) for x in data] if isinstance(data, list) else data
