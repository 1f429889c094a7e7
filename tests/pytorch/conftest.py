"""Tests of ``scalewise.torch``: ``make test-torch``. Left out where torch isn't installed."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["*.py"]
