"""The thresholds of the audit, each with the reason for its value."""

from __future__ import annotations

from collections.abc import Iterable

from ..formats import Format

# -- evidence ------------------------------------------------------------------------------------

# Shares from which a finding is an underflow, or a swamping.
FLUSHED, SWAMPED = 1e-3, 1e-2
# Additions that round one by one have changed nothing where their sum is off by so many units in
# the last place: errors of a hundred roundings of one size, which have both signs, add up to less.
SUM_LOST = 4.0
# The shares for the operands that a recipe rounds: in any program a few of them saturate, and
# small ones are flushed.
OPERANDS_SATURATED, OPERANDS_FLUSHED = 0.05, 0.2
# A block's scale that is rounded down cuts at most a quarter of a number. A larger error is that of
# numbers which outgrow a scale from earlier steps, or from shapes: then a few of them matter (if
# not many others are flushed, which is as large an error).
OUTGROWN = 0.25
# From this multiple of the error of exact sums, an error is the device's accumulator's.
ACCUMULATED = 2.0
# Constants up to this size are there for numbers that are smaller still.
EPSILON = 1e-3
# From this factor an operation is ill-conditioned on its operands.
AMPLIFIED = 8.0
# A result's error is carried in, rather than made, from this multiple of its own.
CARRIED = 3.0
# The harm of an overflow or a NaN at the first equation.
OUT_OF_RANGE = 1e6
# Numbers are close to overflowing if they would with values as many times as large.
LATENT = 4
# An output of which a quarter changes with the arguments' last bits has no digit in the reference
# run: two draws of rounding errors differ by 1.4 times their size. An output of which the reference
# run has one decimal digit changes by a tenth.
NOISE = 0.25
# Of one number two draws may be close by chance: nine in ten are apart by this share or more.
NOISE_OF_ONE = 0.1
# Errors up to so many eps need no runs that tell whether an output's true value is 0.
FLOORS_FROM = 8.0
# An error of so small a share of half a unit in the last place isn't the rounding's.
EXACT = 0.01

# -- the search for fixes -------------------------------------------------------------------------

# A part of a line (an operation of a library, a direction) is widened with it from this share.
PART_OF_LINE = 0.05
# A fix is accepted if it leaves at most half of the error.
ENOUGH = 0.5
# Lines that are widened together, before a fault is given up.
LINES = 6
# A fix that leaves so many roundings, or so small a part of the error from which an output or a
# change is wrong, is accepted before others are tried.
FEW_ROUNDINGS, FEW_OF_LIMIT = 2.0, 0.2
# An edit of the source is printed if its run has at most so many times the error predicted.
TIMES_PREDICTED = 4.0
# Smaller errors are looked at from so many roundings on, if most is made by numbers that leave the
# range or change nothing.
EVENTFUL, MOST_OF_ERROR = 4.0, 0.5
# Lines whose cheaper fixes are tried, under a policy or a recipe.
TRIED = 3
# Findings that are listed for a fault without a fix, from this share of the error each.
SHOWN, SHARE_SHOWN = 3, 0.1
# Up to so many eps no fix may undo a whole policy or recipe.
SLIGHT = 16.0
# From this share of subnormal numbers on a loss scale is tried.
SUBNORMAL = 0.01
# A number above this multiple of the format's maximum isn't the sum of a few masks.
FEW_MASKS = 8
# Relative errors up to this are those of operations in float32.
FLOAT32_ERROR = 2.0**-20
# Operations between a constant that scales the state and the output that it makes.
BACK = 3
# Findings about lost changes: each takes up to four trials.
MOST = 12
# Runs with changed arguments: a single number may come out nearly the same by chance once.
RUNS = 2

# -- changes of carried state ---------------------------------------------------------------------

# A change of less than half a unit in the last place is lost: its error is 100 %. Roundings that
# keep the change leave about 30 % of a unit.
CHANGE_LOST = 0.9
# Changes that arrive wrong by this much, 1 for those that are lost, train something else. Adam
# moves each weight by the sign of its first gradient: formats of 4 and 8 bits turn one in six, an
# error of 0.8, and still train.
CHANGE_WRONG = 0.95
# Of a weight that isn't trained hardly any of the change is left.
CHANGE_KEPT = 0.1
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

# -- the verdict ----------------------------------------------------------------------------------

# Of an output of integers or predicates with fewer elements one that differs isn't a refusal: a
# count may be one off.
MANY_DECIDED = 10
# Of many elements so few differ by chance.
FEW_DECIDED = 2
# An error that changes the outputs by a tenth makes them wrong for any use. Formats of few bits
# make as much in a few roundings, and a format of many bits promises more: about half of its digits
# (1.6 makes that a tenth in BF16).
UNUSABLE, ROUNDINGS, HALF_DIGITS = 0.1, 4.0, 1.6


# Half units of a format from which outputs or gradients are wrong, so that a cause is looked for.
HALF_UNITS = 10.0


def unusable(precision: int) -> float:
    half = min(UNUSABLE, HALF_DIGITS * 2.0 ** (-precision / 2))
    return min(max(half, ROUNDINGS * 2.0**-precision), 1.0)


def decides_otherwise(
    decided: Iterable[tuple[str, int, int]], precision: int, least: int = 1
) -> bool:
    """Returns True if much of an output of integers or predicates, of at least so many, differs.

    Args:
        decided: see :class:`Summary`.
        precision: of the format, in bits.
        least: how many elements such an output has at least.
    """
    share = unusable(precision)
    return any(n >= share * size and size >= least for _, n, size in decided)


def limit_of(fmt: Format, *, scaled: bool = False) -> float:
    """Returns the relative error from which outputs are wrong.

    Ten half units of a format of many digits; of few, what makes outputs unusable or, with scaled
    operands of products (``scaled``), whose errors average, two roundings.
    """
    most = max(UNUSABLE, 2 * 2.0**-fmt.precision) if scaled else unusable(fmt.precision)
    return min(HALF_UNITS * float(fmt.eps) / 2, most)
