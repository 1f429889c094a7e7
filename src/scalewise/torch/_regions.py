"""Regions of a model: ``no_grad`` and ``autocast(enabled=False)``, marked in the nodes inside.

An export has each region as a graph of its own, which decomposing the program would inline without
a trace of what it was.
"""

from __future__ import annotations

from typing import Any

from ._torch import GraphModule, Node, torch

HIGHER_ORDER = torch.ops.higher_order
_KEY = "scalewise"  # in `custom`, what decompositions keep of a node's metadata


def inline_regions(graph_module: GraphModule) -> bool:
    """Inlines regions that turn gradients or autocast off, and marks their nodes; ``x.detach()`` is
    one, which decomposing replaces by an alias. Returns whether a region turns autocast on: torch
    inserts its casts."""
    turned_on = False
    for node in list(graph_module.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            _mark(node, "no_grad")
        off = _turned_off(node)
        if off is None:
            turned_on |= node.target is HIGHER_ORDER.wrap_with_autocast
            continue
        mark, graph, args = off
        inner = getattr(graph_module, graph.target)
        turned_on |= inline_regions(inner)
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        known = dict(zip(placeholders, args, strict=True))
        with graph_module.graph.inserting_before(node):
            outs = graph_module.graph.graph_copy(inner.graph, known)
        for original, copied in known.items():
            if mark is not None and original not in placeholders:
                _mark(copied, mark)
        for user in list(node.users):
            user.replace_all_uses_with(outs[user.args[1]])
            graph_module.graph.erase_node(user)
        graph_module.graph.erase_node(node)
    graph_module.recompile()
    return turned_on


def _mark(node: Node, mark: str) -> None:
    custom = node.meta.get("custom") or {}
    node.meta["custom"] = custom | {_KEY: custom.get(_KEY, frozenset()) | {mark}}


def _turned_off(node: Node) -> tuple[str | None, Any, Any] | None:
    """Returns the mark of a region that is to be inlined, its graph and its arguments."""
    if node.target is HIGHER_ORDER.wrap_with_set_grad_enabled:
        enabled, graph, *args = node.args
        return (None if enabled else "no_grad"), graph, args
    if node.target is HIGHER_ORDER.wrap_with_autocast and not node.args[2]:
        return "no_autocast", node.args[4], node.args[5:]
    return None


def is_marked(node: Node, mark: str) -> bool:
    return mark in (node.meta.get("custom") or {}).get(_KEY, ())
