"""Says what to install where optax, which most of this package stands on, is missing."""

from .._extras import require

require("optax", "train", "scalewise.training")
