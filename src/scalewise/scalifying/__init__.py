"""Values with scales, and the rules by which operations propagate them; ``scalify``."""

from ..primitives import Family as Family
from ._results import rescale as rescale
from ._results import rescale_gradient as rescale_gradient
from ._rules import RULES as RULES
from ._rules import register as register
from ._scalify import scalify as scalify
from ._settings import Scalify as Scalify

__all__ = ["RULES", "Family", "register"]

_DOCUMENTED = dir()  # the reference has these names

# for other packages of scalewise, not for users
from ._contract import bound as bound
from ._contract import precision_of as precision_of
from ._contract import sixteen_bits as sixteen_bits
from ._every_op import EveryOp as EveryOp
from ._overrides import FormatOverrides as FormatOverrides
from ._overrides import Place as Place
from ._overrides import Places as Places
from ._overrides import Scope as Scope
from ._overrides import scope_parts as scope_parts
from ._pairs import PairInterpretation as PairInterpretation
from ._pairs import is_quantized as is_quantized
from ._results import ResultRounding as ResultRounding
from ._rules import MULTIPLIES as MULTIPLIES
from ._rules import features as features
from ._rules import mixes_freely as mixes_freely
from ._rules import terms_of as terms_of
from ._rules import with_integers as with_integers
from ._scalify import scalified as scalified
from ._value import Exponent as Exponent
from ._value import Memo as Memo
from ._value import Origin as Origin
from ._value import ScaledValue as ScaledValue
from ._value import leading as leading
from ._value import materialize as materialize
from ._value import normalised as normalised
from ._value import per_slice as per_slice
from ._value import wide_dtype as wide_dtype
