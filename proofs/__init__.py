"""Exhaustive proofs, run by ``make prove``: too long for a test, short enough for a coffee."""
