"""The two lists: primitives that run in the narrow dtype, and primitives that run in float32.

They are sets of names of JAX primitives, to be read, and to be changed by
``dataclasses.replace(policy, low=LOW | {...})`` or by rules. A primitive in neither list runs in
the widest dtype among its operands, constants apart. :data:`scalewise.primitives.AUTOCAST` says why
a primitive is in its list.
"""

from ..primitives import names

LOW = names(lambda row: row.autocast == "low")
FULL = names(lambda row: row.full)
