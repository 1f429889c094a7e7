"""Interprets jaxprs: one loop over their equations serves every transformation of scalewise.

An interpretation (:class:`Interpretation`) defines how a float array is lifted to a value, what an
equation does to values, and their form where control flow joins. Loops, branches, calls,
recomputation and custom derivatives are handled here, once. Nothing here depends on a format.
"""

from . import _loops as _loops
from ._calls import CONTROL as CONTROL
from ._equation import CALLBACKS as CALLBACKS
from ._equation import COMPLEX as COMPLEX
from ._equation import CONTRACTIONS as CONTRACTIONS
from ._equation import KERNELS as KERNELS
from ._equation import Equation as Equation
from ._equation import all_equations as all_equations
from ._equation import contracts as contracts
from ._equation import is_carry as is_carry
from ._equation import nested_jaxprs as nested_jaxprs
from ._equation import operation_body as operation_body
from ._equation import warn_kernel as warn_kernel
from ._interpret import Applied as Applied
from ._interpret import Argument as Argument
from ._interpret import Body as Body
from ._interpret import Boundary as Boundary
from ._interpret import Interpretation as Interpretation
from ._interpret import Number as Number
from ._interpret import Readers as Readers
from ._interpret import RoundedOperand as RoundedOperand
from ._interpret import State as State
from ._interpret import body_of as body_of
from ._interpret import interpret_jaxpr as interpret_jaxpr
from ._interpret import literal_number as literal_number
from ._objects import has_objects as has_objects
from ._objects import pure_call as pure_call
from ._objects import with_state as with_state
from ._outline import by_platform as by_platform
from ._outline import outlined as outlined
from ._program import Program as Program
from ._program import check_callable as check_callable
from ._program import check_updates as check_updates
from ._program import is_array as is_array
from ._program import lifted as lifted
from ._program import run as run
from ._program import trace as trace
from ._rebind import InDtype as InDtype
from ._rebind import is_quantization as is_quantization
from ._rebind import rebind as rebind
from ._rebind import unit_for as unit_for
from ._rebind import unit_result as unit_result
from ._transform import mark as mark
from ._transform import transform as transform
from ._transform import transformed as transformed
from ._wide import HasDtype as HasDtype
from ._wide import Value as Value
from ._wide import bind as bind
from ._wide import is_float as is_float
from ._wide import is_inexact as is_inexact
from ._wide import map_floats as map_floats
