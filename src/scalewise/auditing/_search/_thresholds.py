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
# A counter stops where its step is half a unit in the last place: a finding from a quarter of it.
NEAR_ITS_END = 0.25
# A fix of a lost change is accepted if it leaves half of the change's error.
CHANGE_REGAINED = 0.5
# The outputs' error hardly shows such a fix; it may exceed the one before by so much.
NOT_WORSE = 1.5
# The share of the optimizer's additions that change nothing from which hardly anything is trained.
UPDATES_LOST = 0.5

# -- evidence -------------------------------------------------------------------------------------

# A factor below two is no amplification: two errors of one size add up to it.
AMPLIFIED_SHOWN = 2.0
# An error of so small a share of half a unit in the last place isn't the rounding's.
EXACT = 0.01

# -- the verdict ----------------------------------------------------------------------------------

# An error that changes the outputs by a tenth makes them wrong for any use. Formats of few bits
# make as much in a few roundings, and a format of many bits promises more: about half of its digits
# (1.6 makes that a tenth in BF16).
UNUSABLE, ROUNDINGS, HALF_DIGITS = 0.1, 4.0, 1.6


def unusable(precision: int) -> float:
    half = min(UNUSABLE, HALF_DIGITS * 2.0 ** (-precision / 2))
    return min(max(half, ROUNDINGS * 2.0**-precision), 1.0)
