"""The ``torch`` module; where it is missing, an error that says what to install."""

from typing import Any

from .._extras import require

torch: Any = require("torch", "torch", "scalewise.torch")
