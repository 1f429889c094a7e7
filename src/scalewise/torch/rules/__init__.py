"""Rules for ATen's operations, by subject: importing them registers them."""

from . import _attention as _attention
from . import _by_torch as _by_torch
from . import _control as _control
from . import _creation as _creation
from . import _decomposed as _decomposed
from . import _elementwise as _elementwise
from . import _indexing as _indexing
from . import _linalg as _linalg
from . import _losses as _losses
from . import _pooling as _pooling
from . import _reductions as _reductions
from . import _shapes as _shapes
from . import _transforms as _transforms
