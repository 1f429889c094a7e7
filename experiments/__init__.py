"""Trained models beside float32: what recipes, plans and torch's arithmetic do to whole programs.

`make experiments` runs them; their results are under docs/ and continue where they stopped.
"""
