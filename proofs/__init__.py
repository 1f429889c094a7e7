"""Exhaustive comparisons that take too long for the tests, run by ``make prove``."""
