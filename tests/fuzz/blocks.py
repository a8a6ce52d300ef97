"""Compound statements: regions, branches, loops, modes, exceptions, gradients inside the forward.

The problem: what is around an operation (which region, which mode, whether it came through an
argument or a closure) decides how it is recorded and replayed.

The invariant: a block's names leave it only as the tensors it returns, so that the same body can
be a region under one method and run in place under another. Imports assemble and source.

Rejected: regions as a property of single operations. Arguments, closures, returned inputs and
nesting are where regions go wrong.
"""

from __future__ import annotations

import torch

from .assemble import Block, Pick, Rejected
from .source import Line, Suite, render_body

MODES = (
    "torch.set_grad_enabled(False)",
    "torch.autocast('cpu', torch.float16)",
    "torch.autocast('cpu', torch.bfloat16, cache_enabled=False)",
    "torch.random.fork_rng(devices=[])",
    "seeded(7)",
    "default_dtype(torch.float64)",
    "deterministic()",
    "flushed()",
    "torch.backends.mkldnn.flags(enabled=False)",
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)",
    "torch.device('cpu')",
    "Doubled()",
    "torch.inference_mode(False)",
    "torch.autograd.set_multithreading_enabled(False)",
)


def _results(p: Pick, block: Block, inputs: list[str]) -> list[str]:
    """What a region returns: mostly all that it made, now and then an input or a view."""
    count = 1 + p.below(3)
    names = p.a.sinks(block.names[::-1]) or block.names[::-1]
    if not names or p.chance(15):
        names = names + inputs
    if not names:
        raise Rejected("an empty region")
    rest = [p.of(names) for _ in range(p.below(2))]
    return [*names[:count], *rest]


def watched(names: list[str]) -> tuple[Line, ...]:
    """A note of the last tensors made here, for the check that nothing outlives the step."""
    return (Line(f"watch({', '.join(names[-3:])})"),) if names else ()


def _arguments(p: Pick, inputs: list[str], name: str) -> tuple[str, list[Line], str]:
    """Parameters of the def, first lines of its body, and the call, for one passing style."""
    listed = ", ".join(inputs)
    match p.below(6):
        case 0 | 1:
            return listed, [], f"region({name}, {listed})"
        case 2:
            passed = ", ".join(f"{v}={v}" for v in inputs)
            return f"*, {listed}", [], f"region({name}, {passed})"
        case 3:
            packed = ", ".join(f'"{v}": {v}' for v in inputs)
            opened = [Line(f'{v} = d["{v}"]') for v in inputs]
            return "d", opened, f"region({name}, {{{packed}}})"
        case 4:
            return "", [], f"region({name})"
        case _:
            rest = "".join(f", {v}" for v in inputs[1:])
            unpacked = f"_, {', '.join(inputs)} = (n, {inputs[0]}{rest})"
            return f"n, {listed}", [Line(unpacked)], f"region({name}, 3, {listed})"


def region(p: Pick) -> None:
    """A call of a function over some of the visible tensors."""
    if p.a.depth >= 5:
        raise Rejected("deep enough")
    inputs = list(dict.fromkeys(p.where(lambda t: True) for _ in range(1 + p.below(3))))
    name = p.a.fresh("r")
    parameters, opening, call = _arguments(p, inputs, name)
    block = p.a.block(p.raw.body)
    results = _results(p, block, inputs)
    whole = (*opening, *block.statements, *watched(block.names))
    if len(results) == 1 and p.chance(30):
        returned, outs = f"return [{results[0]}]", [p.a.fresh()]
        assign = f"[{outs[0]}] = {call}"
    else:
        outs = [p.a.fresh() for _ in results]
        returned, assign = f"return {', '.join(results)}", f"{', '.join(outs)} = {call}"
    p.a.append(Suite(f"def {name}({parameters}):", (*whole, Line(returned))))
    p.a.append(Line(assign))
    for out, result in zip(outs, results, strict=True):
        p.a.bind(out, result)
    p.trait("region")


def failing_region(p: Pick) -> None:
    """A region that raises half-way and is caught (semantics rule 10)."""
    block = p.a.block(p.raw.body)
    name = p.a.fresh("r")
    p.a.append(Suite(f"def {name}():", (*block.statements, Line("raise Stop"))))
    p.a.append(Suite("try:", (Line(f"region({name})"),)))
    p.a.append(Suite("except Stop:", ()))
    p.trait("raises")


def _same(p: Pick, block: Block, like: str) -> str:
    """A tensor of the block that can stand for `like`; `like` itself if there is none."""
    t = p.a.tensor(like)
    for name in reversed(block.names):
        other = p.a.tensor(name)
        if other.shape == t.shape and other.dtype == t.dtype:
            return name
    return like


def branch(p: Pick) -> None:
    """A branch on data; both sides are tried, so either may be taken in a later step."""
    x = p.floating()
    condition = p.where(lambda t: t.is_floating_point())
    out = p.a.fresh()
    tests = ("{c}.sum() > 0", "{c}.mean().item() > 0.1", "bool(({c} > 0).any())")
    head = p.of(tests).format(c=condition)
    for opening, raws in ((f"if {head}:", p.raw.body), ("else:", p.raw.other)):
        block = p.a.block(raws)
        result = _same(p, block, x)
        p.a.append(Suite(opening, (*block.statements, Line(f"{out} = {result}"))))
    p.a.bind(out, result)


def loop(p: Pick) -> None:
    """A loop that carries one tensor; tried twice, because the second round may differ."""
    x = p.floating()
    carried = p.a.fresh()
    p.emit(f"{carried} = {x}")
    p.a.scope.append(carried)
    block = p.a.block(p.raw.body)
    body = (*block.statements, Line(f"{carried} = {_same(p, block, carried)}"))
    p.a.attempt(f"{carried} = {_same(p, block, carried)}\n{render_body(body)}")
    p.a.append(Suite(f"for _ in range({2 + p.below(2)}):", body))


def mode(p: Pick) -> None:
    """autocast, no_grad, enable_grad, and saved-tensor hooks of the user's own."""
    head = p.of(
        (
            'torch.autocast("cpu", torch.bfloat16)',
            "torch.no_grad()",
            'torch.autocast("cpu", enabled=False)',
            "torch.enable_grad()",
            "copied_saves()",
            *MODES,
        )
    )
    block = p.a.block(p.raw.body, eval(head, p.a.namespace))
    if not block.statements:
        raise Rejected("an empty block")
    if "copied_saves" in head:
        p.trait("hooks")
    if "fork_rng" in head or "seeded" in head:
        p.trait("draw")
    if "Doubled" in head:
        p.trait("function mode")
    p.a.suite(f"with {head}:", block)
    p.a.scope += block.names


def default_dtype(p: Pick) -> None:
    """A default dtype that is set while some factory functions run, and reset."""
    before, during = (f"torch.set_default_dtype(torch.float{n})" for n in (32, 64))
    x = p.floating()
    y = p.a.fresh()
    text = f"{y} = torch.full({p.shape(x)}, 0.5) * torch.ones({p.shape(x)})"
    p.a.attempt(f"{during}\ntry:\n    {text}\nfinally:\n    {before}")
    for line in (during, text, before):
        p.a.append(Line(line))
    p.a.scope.append(y)
    p.define(f"{x} * {y}")


def inner_gradient(p: Pick) -> None:
    """torch.autograd.grad inside the forward, part of the graph or not."""
    if not torch.is_grad_enabled():
        raise Rejected("no graph here")
    create = "create_graph=True" if not p.chance(25) else "retain_graph=True"
    p.trait("inner gradient")
    (g,) = _gradient(p, create)
    p.define(p.of((f"{g}.square().clamp(max=5)", f"({g} + 0.1).norm() - 1", f"{g}.detach() * 0.5")))


def _gradient(p: Pick, create: str) -> list[str]:
    """Most pairs of tensors do not depend on each other: try a few."""
    for _ in range(4):
        h = p.where(lambda t: t.requires_grad and not t.is_leaf)
        x = p.where(lambda t: t.requires_grad)
        try:
            if x != h:
                return p.define(f"torch.autograd.grad({h}.sum(), {x}, {create})[0]")
        except Rejected:
            continue
    raise Rejected("no gradient to take")


def penalty(p: Pick) -> None:
    """A gradient penalty: the norm of the gradient of a sub-network's output by its input."""
    if not torch.is_grad_enabled():
        raise Rejected("no graph here")
    x = p.floating(1)
    (z,) = p.define(f"{x}.detach().requires_grad_()")
    (h,) = p.define(f"torch.tanh(F.linear({z}, {p.weight((3, p.shape(x)[-1]), x)}))")
    (g,) = p.define(f"torch.autograd.grad({h}.sum(), {z}, create_graph=True)[0]")
    p.trait("inner gradient")
    matrix = len(p.shape(x)) > 1
    p.define(f"({g}.flatten(1).norm(dim=-1) - 1).square()" if matrix else f"{g}.norm()")


def count(p: Pick) -> None:
    """A side effect of Python, and a look at a value."""
    x = p.where(lambda t: True)
    p.trait("side effect")
    p.emit(p.of((f"observe({x})", "calls.append(1)", f"calls.append(tuple({x}.shape))")))


def hook(p: Pick) -> None:
    """A gradient hook, which counts and changes what flows back.

    On a fresh tensor: torch 2.13 crashes in register_hook on a view that requires grad only
    because its base was written in place.
    """
    x = p.where(lambda t: t.requires_grad and t.is_floating_point())
    p.trait("side effect")
    (fresh,) = p.define(f"{x} * 0.75")
    p.emit(f"{fresh}.register_hook(lambda grad: calls.append(2) or grad * 0.5)")


def reseed(p: Pick) -> None:
    """Generators that the program sets itself."""
    g = p.generator()
    p.trait("draw")
    p.trait("side effect")
    forms = (
        "torch.manual_seed(9)",
        "{g}.manual_seed(4)",
        "torch.set_rng_state({g}.get_state())",
        "{g}.set_state(torch.get_rng_state())",
        "torch.default_generator.seed() if False else torch.rand(1)",
        "torch.randn(3, generator={g})",
    )
    p.emit(p.of(forms).format(g=g))


def in_turns(p: Pick) -> None:
    """What is another operation, or of another size, in every other step."""
    x = p.floating(1)
    forms = (
        "({x}.sin() if turn() % 2 else {x}.cos())",
        "({x}.exp().clamp(max=5) if turn() != 1 else {x} * 0.5)",
        "sized({x}, 2 + turn() % 2, 3).tanh().exp().sum(0)",
        "sized({x}, 4 - turn() % 3, 3).tanh().exp().mean(0)",
        "({x}.detach() if turn() == 1 else {x}).tanh()",
        "sized({x}, 2 + turn() % 2, 3)[sized({x}, 2 + turn() % 2, 3) > 0].sin().sum()",
    )
    p.trait("turns")
    p.define(p.of(forms).format(x=x))


def stumble(p: Pick) -> None:
    """The first attempt at each step ends here, and the step is tried again."""
    if p.a.depth > 2:
        raise Rejected("too deep")
    p.trait("raises")
    p.trait("side effect")
    p.emit("stumble()")


def smuggle(p: Pick) -> None:
    """A tensor that leaves a region through a dict of the caller's, not through its return."""
    x = p.floating()
    key = p.a.fresh("k")
    p.trait("side effect")
    p.emit(f'stash["{key}"] = {x}')
    p.define(f'stash["{key}"] * 0.5')
