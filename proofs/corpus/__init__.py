"""Failing programs of other people's bug reports, and clean ones of libraries' examples.

The programs and what is true of them are written down and measured before the audit sees them
(:mod:`proofs.corpus.truth`). A hash of its name puts a program into the half that is looked at or
into the half that is only scored. `python -m proofs.corpus --help` lists the commands.
"""
