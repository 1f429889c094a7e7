"""Checkpoints of quantised models, in any layout: read, written and checked.

The numbers of a layout are read to the bit of the package that defines it; `docs/checkpoints.md`
lists the layouts. :func:`load` returns a lazy tree, :func:`cast` converts a file, :func:`inspect`
describes it, :func:`check` looks for faults.
"""

from ._api import Tree as Tree
from ._api import cast as cast
from ._api import load as load
from ._cache_scales import cache_scales as cache_scales
from ._cache_scales import check_cache_scales as check_cache_scales
from ._check import check as check
from ._files import UnreadableError as UnreadableError
from ._inspect import inspect as inspect

__all__ = ["Tree", "UnreadableError", "check", "inspect", "load"]

# the classes of results, for annotations
from ._cache_scales import CacheScale as CacheScale
from ._inspect import InspectReport as InspectReport
from ._report import CastReport as CastReport
from ._report import CheckReport as CheckReport
from ._report import Finding as Finding

_DOCUMENTED = dir()  # the reference has these names

# for other packages of scalewise, not for users
from ._layouts import Layout as Layout
from ._layouts import Strategy as Strategy
from ._layouts import compressed_tensors as compressed_tensors
from ._layouts import writable as writable
