"""Trains one program under several methods side by side, and writes a report."""
