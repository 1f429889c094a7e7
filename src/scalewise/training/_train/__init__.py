"""Trains one program by one method, with metrics and checkpoints to resume from."""
