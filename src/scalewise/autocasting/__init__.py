"""Automatic mixed precision: narrow products, and float32 where range or long sums need it."""

from ._autocast import Autocast as Autocast
from ._autocast import autocast as autocast
from ._autocast import converted as converted
from ._autocast import placements as placements
from ._policy import FULL as FULL
from ._policy import LOW as LOW
from ._policy import Policy as Policy
from ._policy import PolicyLike as PolicyLike
from ._policy import Rule as Rule
from ._policy import policy as policy
