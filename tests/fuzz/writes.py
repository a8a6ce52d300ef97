"""Operations that write: in place on intermediates, views, inputs and buffers.

The problem: a write makes a new version of a storage that other tensors share; the engine must
replay readers with the version they read, and never write to what lies outside.

The invariant: everything here carries the trait "write", or "buffer" where state that outlives
the step is meant, because torch's own checkpoint gets these wrong. Imports assemble.

Rejected: writing only through fresh clones. It would keep all programs valid and test nothing.
"""

from __future__ import annotations

from .assemble import Pick

SIMPLE = (
    "{t}.add_(1)",
    "{t}.mul_(0.5)",
    "{t}.relu_()",
    "{t}.zero_()",
    "{t}.clamp_(-0.5, 1)",
    "{t}.tanh_()",
    "{t}.clamp_(max=1).exp_()",
    "{t}.sigmoid_()",
    "{t}.neg_()",
    "{t}.fill_(0.5)",
    "{t}.sin_()",
    "{t}.clamp_(-2, 2).square_()",
    "F.relu({t}, inplace=True)",
    "F.silu({t}, inplace=True)",
    "F.leaky_relu({t}, 0.2, inplace=True)",
    "F.elu({t}, inplace=True)",
)
DRAWN = (
    "{t}.normal_(0, 0.5)",
    "{t}.uniform_(-1, 1)",
    "{t}.bernoulli_(0.5)",
    "F.dropout({t}, 0.5, inplace=True)",
    "rrelu({t}, 0.1, 0.5, inplace=True)",
)
WITH_OTHER = (
    "{t}.add_({y})",
    "{t}.mul_({y})",
    "{t}.copy_({y})",
    "{t}.sub_({y}, alpha=0.5)",
    "{t}.addcmul_({y}, {y}, value=0.1)",
    "{t}.masked_fill_({m}, 0.5)",
    "{t}.lerp_({y}.expand_as({t}), 0.25)",
    "{t}[{m}] = 0.25",
    "{t}.copy_({y}.detach())",
    "{t}.add_({y}, alpha=2)",
    "{t}.div_({y}.abs() + 0.5)",
)
THROUGH_VIEW = (
    "{t}[0].mul_(2)",
    "{t}[0] = {t}[-1].clone()",
    "{t}[..., 1:].add_(0.5)",
    "{t}[..., :1].copy_({t}[..., -1:].tanh())",
    "{t}.transpose(0, -1).mul_({t}.detach().transpose(0, -1).sigmoid())",
    "{t}.flatten()[::2].add_(1)",
    "{t}.view(-1)[1:].mul_(0.5)",
    "{t}.diagonal().add_(1)",
    "{t}.unsqueeze(0).relu_()",
    "{t}.detach().add_(0.25)",
    "{t}.select(-1, 0).zero_()",
    "{t}.as_strided((2,), (1,)).mul_(1.5)",
    "{t}.unbind(0)[0].detach().mul_(2)",
    "{t}.view(-1)[:2].view(2, 1).expand(2, 1).add_(0.5)",
)
INDEXED = (
    "{t}.index_add_(0, {i}, {t}[{i}].detach())",
    "{t}.index_put_(({i},), torch.zeros_like({t}[{i}]))",
    "{t}.index_fill_(0, {i}, 0.5)",
    "{t}[{i}] = {t}[{i}].tanh()",
    "{t}.index_copy_(0, {i}[:1], {t}[:1].clone())",
    "{t}.scatter_(0, ({t} > 0).long(), 0.75)",
)


def in_place(p: Pick) -> None:
    t = p.target()
    p.trait("write")
    p.emit(p.of(SIMPLE).format(t=t))


def drawn_in_place(p: Pick) -> None:
    t = p.target()
    p.trait("write")
    p.trait("draw")
    p.emit(p.of(DRAWN).format(t=t))


def in_place_with(p: Pick) -> None:
    t, form = p.target(), p.of(WITH_OTHER)
    y = p.fitting(t) if "{y}" in form else ""
    p.trait("write")
    p.emit(form.format(t=t, y=y, m=p.mask(t) if "{m}" in form else ""))


def through_view(p: Pick) -> None:
    t = p.target()
    p.trait("write")
    p.emit(p.of(THROUGH_VIEW).format(t=t))


def indexed_write(p: Pick) -> None:
    t, form = p.target(), p.of(INDEXED)
    i = p.index((2,), p.rows(t)) if "{i}" in form else ""
    p.trait("write")
    p.emit(form.format(t=t, i=i))


def custom_write(p: Pick) -> None:
    t = p.target()
    p.trait("write")
    p.define(f"WriteInput.apply({t})")


def data_write(p: Pick) -> None:
    """`.data` has a version counter of its own: autograd reads what it left (rule 4)."""
    t = p.target()
    p.trait("write")
    p.trait("behind")
    forms = ("{t}.data.mul_(0.5)", "{t}.data[0] = 1", "{t}.data.copy_({t}.data.tanh())")
    p.emit(p.of(forms).format(t=t))


def out_argument(p: Pick) -> None:
    t = p.target()
    y = p.fitting(t)
    p.trait("write")
    forms = ("torch.mul({t}.detach(), 0.5, out={t})", "torch.add({y}.detach(), 1, out={t})")
    p.emit(p.of(forms).format(t=t, y=y))


def buffer_write(p: Pick) -> None:
    """A buffer that moves with its input, as running statistics and caches do."""
    x = p.floating()
    b = p.declared("buffer", p.shape(x), p.dtype(x))
    p.trait("buffer")
    forms = (
        "{b}.add_({x}.detach())",
        "{b}.copy_({x}.detach())",
        "{b}.mul_(0.9).add_({x}.detach(), alpha=0.1)",
        "{b}[0] = {x}.detach()[0]",
        "{b}.lerp_({x}.detach(), 0.1)",
        "{b}.add_(1)",
    )
    p.emit(p.of(forms).format(b=b, x=x))


def buffer_read(p: Pick) -> None:
    """Reads of a buffer that leave it unsaved, so that it may move before backward."""
    x = p.floating()
    b = p.declared("buffer", p.shape(x), p.dtype(x))
    p.trait("buffer")
    forms = ("{x} + {b}", "{x} * {b}.clone()", "torch.tanh({x} - {b})", "{x} * ({b} > 1)")
    p.define(p.of(forms).format(b=b, x=x))


def spectral(p: Pick) -> None:
    """Power iteration as in spectral_norm: vectors move without grad, then are read."""
    x = p.floating(2)
    n = p.shape(x)[-1]
    w = p.weight((3, n), x)
    u = p.declared("buffer", (3,), p.dtype(x))
    p.trait("buffer")
    p.emit(f"{u}.copy_(F.normalize({w}.detach() @ ({w}.detach().t() @ {u}), dim=0, eps=1e-3))")
    clone = ".clone()" if not p.chance(20) else ""
    p.define(f"F.linear({x}, {w} / torch.dot({u}{clone}, {w}.sum(1)).abs().clamp(min=0.1))")


def parameter_write(p: Pick) -> None:
    """A parameter that is moved inside the forward, without grad (weight clipping, EMA)."""
    x = p.floating()
    w = p.weight(p.shape(x), x)
    if p.a.saved(w):
        w = p.a.declare("parameter", p.shape(x), p.dtype(x))
    p.trait("buffer")
    p.define(f"{x} + {w}")
    if p.below(2):
        p.trait("behind")
        p.emit(f"{w}.data.mul_(0.9)")
    else:
        p.emit(f"{w}.detach().clamp_(-0.5, 0.5)")
