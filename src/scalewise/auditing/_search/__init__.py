"""Turns statistics into findings, and searches for fixes by trial."""
