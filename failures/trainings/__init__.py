"""Whole training steps, ``f(state, batch)``, of small models: one fault in each, or none."""
