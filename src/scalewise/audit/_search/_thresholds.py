"""The thresholds of the search and of the verdict, each with the reason for its value."""

from __future__ import annotations

# -- changes of carried state ---------------------------------------------------------------------

# A change of less than half a unit in the last place is lost: its error is 100 %. Roundings that
# keep the change leave about 30 % of a unit.
CHANGE_LOST = 0.9
# The rounding of the state itself makes at least half of that error: otherwise the change that is
# added, a gradient for example, is wrong, and its own finding says so.
ROUNDED_AWAY = 0.5
# Nearly all additions of a contribution that is always small (a weight decay) return the other
# operand. Of other additions some are lost in any program.
CONTRIBUTION_LOST = 0.9
# A smaller multiple of an argument is below half a unit of BF16 beside a number of the argument's
# own size.
SMALL_FACTOR = 2.0**-9
# A fix of a lost change is accepted if it leaves half of the change's error.
CHANGE_REGAINED = 0.5
# The outputs' error hardly shows such a fix; it may exceed the one before by so much.
NOT_WORSE = 1.5
