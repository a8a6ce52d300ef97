"""How a program ends: what it returns, its losses, and how backward is called.

The problem: semantics rule 8 allows backward in any order, partly, twice, from another thread,
with its own graph, or never.

The invariant: `backward(s, out)` empties `out` first where the ending says so, and returns the
gradients that are not found in `.grad`. Imports assemble and source.

Rejected: drawing the calls of backward one by one. Most such lists ask for a freed graph, and the
useful ones are few enough to be written out.
"""

from __future__ import annotations

import torch

from .assemble import Pick
from .source import Ending

LOSSES = (
    "{v}.float().square().mean()",
    "{v}.sum()",
    "({v}.float() + 0.3).sin().sum()",
    "{v}.float().exp().clamp(max=20).mean()",
    "F.mse_loss({v}.float(), torch.zeros_like({v}.float()))",
)
_TAKE = "losses, mids = out['losses'], out['mids']"
_ALL = "ps = leaves(s)"
PLAIN = (_TAKE, "out.clear()", "sum(losses).backward()", "return []")
STYLES: dict[str, tuple[str, ...]] = {
    "plain": PLAIN,
    "kept outputs": (_TAKE, "sum(losses).backward()", "return []"),
    "partial": (_TAKE, _ALL, "sum(losses).backward(inputs=ps[:1])", "return []"),
    "partial, then the rest": (
        _TAKE,
        _ALL,
        "sum(losses).backward(inputs=ps[:1], retain_graph=True)",
        "sum(losses).backward(inputs=ps[1:] or ps)",
        "return []",
    ),
    "one after the other": (
        _TAKE,
        "out.clear()",
        "for loss in losses[::-1]:",
        "    loss.backward(retain_graph=True)",
        "return []",
    ),
    "twice": (
        _TAKE,
        "sum(losses).backward(retain_graph=True)",
        "sum(losses).backward()",
        "return []",
    ),
    "gradients": (
        _TAKE,
        _ALL,
        "return list(torch.autograd.grad(sum(losses), ps + mids, allow_unused=True))",
    ),
    "retain_grad": (
        _TAKE,
        "for mid in mids:",
        "    mid.retain_grad()",
        "sum(losses).backward()",
        "return [mid.grad for mid in mids]",
    ),
    "double": (
        _TAKE,
        _ALL,
        "gs = torch.autograd.grad(sum(losses), ps, create_graph=True, allow_unused=True)",
        "kept = [g.float().square().sum() for g in gs if g is not None and g.requires_grad]",
        "if kept:",
        "    sum(kept).backward()",
        "return list(gs)",
    ),
    "thread": (_TAKE, "out.clear()", "in_thread(lambda: sum(losses).backward())", "return []"),
    "never": ("return []",),
    "one loss only": (_TAKE, "out.clear()", "losses[0].backward()", "return []"),
    "raises, then again": (
        _TAKE,
        _ALL,
        "handles = [raising_once(t) for t in mids + ps[-1:]]",
        "for _ in handles:",
        "    try:",
        "        sum(losses).backward(retain_graph=True)",
        "    except Stop:",
        "        pass",
        "sum(losses).backward()",
        "for handle in handles:",
        "    handle.remove()",
        "return []",
    ),
    "optimizer in hooks": (
        _TAKE,
        "out.clear()",
        "with stepping(s):",
        "    sum(losses).backward()",
        "return []",
    ),
    "in another state": (
        _TAKE,
        "out.clear()",
        "with torch.no_grad(), torch.autocast('cpu', torch.bfloat16),"
        " default_dtype(torch.float64):",
        "    sum(losses).backward()",
        "return []",
    ),
    "draws between": (
        _TAKE,
        "torch.manual_seed(5)",
        "made = torch.rand(2)",
        "with deterministic(), flushed():",
        "    sum(losses).backward()",
        "return [made, torch.rand(2)]",
    ),
    "with a graph": (
        _TAKE,
        "sum(losses).backward(create_graph=True)",
        _ALL,
        "found = [p.grad.to_dense().float().square().sum() for p in ps if p.grad is not None]",
        "for p in ps:",
        "    p.grad = None",
        "if any(f.requires_grad for f in found):",
        "    sum(found).backward()",
        "return []",
    ),
    "by hand": (
        _TAKE,
        "found = saved_by_hand(mids)",
        "sum(losses).backward(retain_graph=True)",
        "return found + saved_by_hand(mids)",
    ),
    "heads in threads": (
        _TAKE,
        "for loss in losses:",
        "    in_thread(lambda: loss.backward(retain_graph=True))",
        "return []",
    ),
    "changed by hooks": (
        _TAKE,
        "handles = [mid.register_hook(lambda g: g * 0.5 + 1) for mid in mids]",
        "nodes = [mid.grad_fn.register_prehook(lambda gs: tuple("
        "None if g is None else g * 2 for g in gs)) for mid in mids]",
        "sum(losses).backward()",
        "return []",
    ),
    "mids only": (
        _TAKE,
        "found = torch.autograd.grad(losses[0], mids, retain_graph=True, allow_unused=True)",
        "sum(losses).backward()",
        "return list(found)",
    ),
    "optimizer": (
        _TAKE,
        "out.clear()",
        "sum(losses).backward()",
        "optimizer = torch.optim.AdamW(leaves(s), lr=0.01, foreach=True)",
        "optimizer.step()",
        "return []",
    ),
    "again": (
        _TAKE,
        "sum(losses).backward()",
        "with torch.no_grad():",
        "    for p in leaves(s)[:1]:",
        "        p.mul_(0.9)",
        "stash.clear()",
        "other = forward(s)",
        "sum(other['losses']).backward()",
        "return other['outs']",
    ),
    "again before": (
        _TAKE,
        "stash.clear()",
        "other = forward(s)",
        "(sum(losses) + sum(other['losses'])).backward()",
        "return other['outs']",
    ),
    "freed graph": (
        _TAKE,
        "losses[0].backward()",
        "try:",
        "    losses[0].backward()",
        "except RuntimeError:",
        "    pass",
        "return []",
    ),
}


# What may happen between two steps. Gradients stay there if it does nothing to them.
BETWEEN: tuple[tuple[str, ...], ...] = (
    ("pass",),
    ("for p in leaves(s):", "    p.grad = None", "    p.data = p.data.clone()"),
    ("for p in leaves(s):", "    p.grad = torch.zeros_like(p)"),
    ("for p in leaves(s):", "    p.grad = None", "leaves(s)[0].requires_grad_(False)"),
    ("for p in leaves(s)[1:]:", "    p.grad = None"),
    (
        "for m in s.values():",
        "    if isinstance(m, torch.nn.Module):",
        "        m.train(not m.training)",
    ),
    ("torch.manual_seed(3)", "for p in leaves(s):", "    p.grad = None"),
    (
        "for name in list(s):",
        "    if torch.is_tensor(s[name]) and s[name].requires_grad:",
        "        s[name] = s[name].detach().clone().requires_grad_()",
    ),
)


def _summands(p: Pick) -> list[str]:
    tensors = {n: p.a.tensor(n) for n in p.a.visible() if n in p.a.scope}
    names = [n for n, t in tensors.items() if t.requires_grad and t.is_floating_point()]
    if not names:
        names = [d.name for d in p.a.declarations if d.role == "parameter"][:1]
    sinks = [n for n in p.a.sinks(names) if n in tensors]
    chosen = (sinks[: 8 - p.below(6)] or names[:1]) + [p.of(names) for _ in range(p.below(2))]
    return list(dict.fromkeys(chosen))


def _touch(p: Pick) -> tuple[str, ...]:
    """Something outside moves between forward and backward, where plain allows it."""
    movable = [
        d.name
        for d in p.a.declarations
        if d.role in ("buffer", "input") and not p.a.saved(d.name) and p.a.tensor(d.name).dim()
    ]
    if not movable or not p.chance(20):
        return ()
    p.trait("touch")
    return (f's["{p.of(movable)}"].add_(1)',)


def ending(p: Pick) -> Ending:
    """Choose losses, outputs and backward for what has been assembled."""
    terms = [p.of(LOSSES).format(v=v) for v in _summands(p)]
    split = p.below(2) * p.below(len(terms))
    groups = [terms[split:], terms[:split]] if split else [terms]
    losses = tuple(" + ".join(group) for group in groups)
    scope = [n for n in p.a.visible() if n in p.a.scope]
    scope = scope or [d.name for d in p.a.declarations if d.role == "parameter"]
    outs = tuple(dict.fromkeys(p.of(scope) for _ in range(p.below(4))))
    inner = [n for n in scope if p.a.tensor(n).requires_grad and not p.a.tensor(n).is_leaf]
    mids = tuple(dict.fromkeys(p.of(inner) for _ in range(2))) if inner else ()
    style = p.of(list(STYLES)) if p.chance(60) else "plain"
    lines = STYLES[style]
    if style == "double" and not torch.is_grad_enabled():
        lines = PLAIN
    if style in ("optimizer in hooks", "optimizer", "again"):
        p.trait("touch")
    between = p.of(BETWEEN) if p.chance(25) else ()
    return Ending(losses, outs, mids, (*_touch(p), *lines), between)
