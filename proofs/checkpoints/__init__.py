"""Checkpoints of other people's packages, damaged ones, and measurements of speed."""
