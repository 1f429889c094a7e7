"""Runs a program in low precision and as a reference, and records statistics of each equation."""
