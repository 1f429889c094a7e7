"""Features of JAX as small programs: each calls a program under any transformation of scalewise.

A feature ``f`` is run as ``f(transform)``; ``f(lambda g: g)`` is the plain run, the expected
results. Programs multiply matrices where they can, so that recipes have something to round.
"""

from . import _arrays as _arrays
from . import _calls as _calls
from . import _control as _control
from . import _corners as _corners
from . import _functions as _functions
from . import _more as _more
from . import _outside as _outside
from ._table import FEATURES as FEATURES
from ._table import OUTSIDE as OUTSIDE
