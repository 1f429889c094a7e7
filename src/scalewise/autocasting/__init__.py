"""Automatic mixed precision: narrow products, and float32 where range or long sums need it."""

from ._autocast import autocast as autocast
from ._autocast import placements as placements
from ._policy import FULL as FULL
from ._policy import LOW as LOW
from ._policy import Policy as Policy
from ._policy import Rule as Rule
from ._policy import policy as policy

__all__ = ["FULL", "LOW", "Rule", "placements", "policy"]

# the classes of results and types, for annotations
from ._policy import PolicyLike as PolicyLike

_DOCUMENTED = dir()  # the reference has these names

# for other packages of scalewise, not for users
from ._autocast import Autocast as Autocast
from ._autocast import converted as converted
