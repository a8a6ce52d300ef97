"""Operations that make new tensors: pointwise, products, normalisation, draws, views, indexing.

The problem: the engine decides per operation, so each class of operation (what it saves, draws,
aliases, returns) has to turn up in many surroundings.

The invariant: an operation here writes to nothing that the program can see, except through the
running statistics of batch_norm, which carries the trait "buffer". Arguments of functions that
grow are clamped: once infinities and NaN spread, every wrong value looks right. Imports assemble.

Rejected: taking operations from torch's own OpInfo lists. They test one call; here the mixture
counts, and their samples cannot be read in a printed program.
"""

from __future__ import annotations

from .assemble import Pick

UNARY = (
    "torch.tanh({x})",
    "torch.sigmoid({x})",
    "torch.exp({x}.clamp(-2, 2))",
    "F.relu({x})",
    "F.gelu({x})",
    "F.gelu({x}, approximate='tanh')",
    "F.softplus({x})",
    "F.silu({x})",
    "F.elu({x}, 0.5)",
    "F.leaky_relu({x}, 0.1)",
    "F.hardtanh({x}, -0.5, 0.75)",
    "torch.sqrt({x}.abs() + 0.1)",
    "torch.rsqrt({x}.square() + 0.5)",
    "torch.log1p({x}.abs())",
    "torch.sin({x})",
    "{x}.clamp(-1, 0.5)",
    "{x}.square().clamp(max=9)",
    "{x}.abs()",
    "-{x}",
    "{x} * 0.5",
    "{x} + 1",
    "1 - {x}",
    "{x}.pow(3).clamp(-5, 5)",
    "{x}.clone()",
    "{x}.contiguous()",
    "torch.zeros_like({x})",
    "torch.full({x}.shape, 0.5) * {x}",
    "torch.arange({x}.numel()).reshape({x}.shape) * {x}",
    "{x}.flip(0)",
    "{x}.roll(1, -1)",
)
ALONG = (
    "torch.softmax({x}, {d})",
    "torch.log_softmax({x}, {d})",
    "F.normalize({x}, dim={d}, eps=0.1)",
    "{x} - {x}.mean({d}, keepdim=True)",
    "{x}.cumsum({d})",
    "{x}.sum({d}, keepdim=True)",
    "{x}.mean({d})",
    "{x}.amax({d}, keepdim=True)",
    "torch.logsumexp({x}, {d})",
    "{x}.var({d}, correction=0)",
    "torch.linalg.vector_norm({x} + 0.1, dim={d})",
    "torch.softmax({x}, {d}, dtype=torch.float32)",
    "{x}.max({d}).values",
    "F.glu({x}, {d})",
)
BINARY = (
    "{x} * {y}",
    "{x} + {y}",
    "{x} - {y}",
    "{x} / ({y}.abs() + 0.5)",
    "torch.maximum({x}, {y})",
    "torch.addcmul({x}, {y}, {y}, value=0.1)",
    "torch.where({x} > {y}, {x}, {y} * 0.5)",
    "torch.where({m}, {x}, {y})",
    "{x}.masked_fill({m}, 0.25)",
    "torch.lerp({x}, {y}.to({x}.dtype).expand_as({x}), 0.3)",
    "torch.atan2({x}, {y} + 2)",
    "F.smooth_l1_loss({x}, {y}.expand_as({x}), reduction='none')",
)
CASTS = ("{x}.float()", "{x}.double()", "{x}.to(torch.bfloat16)")
DRAWS = (
    "F.dropout({x}, 0.4)",
    "F.alpha_dropout({x}, 0.3, training=True)",
    "torch.feature_dropout({x}, 0.4, True)",
    "rrelu({x}, 0.1, 0.6)",
    "{x} * torch.bernoulli(torch.sigmoid({x}.detach()))",
    "{x} + torch.randn_like({x})",
    "{x} * torch.rand({x}.shape)",
    "torch.normal({x}.detach(), 0.5) * {x}",
    "F.gumbel_softmax({x}, tau=0.8)",
    "{x} + torch.empty_like({x}).normal_(0, 0.5)",
    "{x} * torch.empty_like({x}).bernoulli_(0.5)",
    "{x} + torch.randint(0, 3, {x}.shape)",
    "{x}[torch.randperm({x}.shape[0])]",
    "{x} * torch.empty({x}.shape).exponential_().clamp(max=2)",
)
GENERATOR_DRAWS = (
    "{x} + torch.rand({x}.shape, generator={g})",
    "{x} * torch.bernoulli(torch.sigmoid({x}.detach()), generator={g})",
    "{x} + torch.zeros({x}.shape).normal_(0, 0.5, generator={g})",
    "{x}[torch.randperm({x}.shape[0], generator={g})]",
    "{x} * torch.randint(1, 4, {x}.shape, generator={g})",
)
VIEWS = (
    "{x}.view(-1)",
    "{x}.reshape(-1)",
    "{x}.transpose(0, -1)",
    "{x}.permute(*range({x}.dim() - 1, -1, -1))",
    "{x}[1:]",
    "{x}[..., ::2]",
    "{x}[..., 0]",
    "{x}[None]",
    "{x}.unsqueeze(-1)",
    "{x}.squeeze(0)",
    "{x}.select({d}, 1)",
    "{x}.narrow({d}, 0, 2)",
    "{x}.expand(2, *{x}.shape)",
    "{x}.unsqueeze(0).expand(2, *{x}.shape)",
    "{x}.diagonal()",
    "{x}.unfold({d}, 2, 1)",
    "{x}.as_strided((2, 2), (1, 1))",
    "{x}.as_strided((2,), (2,), 1)",
    "{x}.detach()",
    "{x}.detach().requires_grad_()",
    "{x}.movedim(0, -1)",
    "{x}.flatten()",
    "{x}.unflatten(0, (-1, 2))",
    "{x}.view_as({x})",
    "torch.view_as_real(torch.complex({x}, {x}))",
    "torch.view_as_real(torch.fft.rfft({x}))[..., 0]",
    "torch.view_as_real(torch.view_as_complex({x}.reshape(-1, 2)) * (0.5 + 1j))",
    "torch.complex({x}, {x}).conj().imag",
    "{x}.detach().view(torch.int32).bitwise_and(0x7FFFFFFF).view({x}.dtype)",
    "torch.atleast_2d({x})",
)
SEVERAL = (
    ("{x}.chunk(2, {d})", 2),
    ("{x}.split(1, 0)", 2),
    ("{x}.unbind({d})", 2),
    ("{x}.unbind({d})", 3),
    ("torch.sort({x}, dim={d}, stable=True)", 2),
    ("{x}.topk(2, {d})", 2),
    ("{x}.max({d})", 2),
    ("torch.var_mean({x}, {d}, correction=0)", 2),
    ("torch.aminmax({x})", 2),
    ("torch.frexp({x})", 2),
    ("TwoOutputs.apply({x})", 2),
    ("ManyOutputs.apply({x})", 3),
    ("WritesTwo.apply({x} * 1, {x} + 0.5)", 3),
    ("region(lambda t: (t, t.tanh(), t[:1]), {x})", 3),
    ("{x}.detach().numpy().shape and (torch.tanh({x}), {x}.exp().clamp(max=5))", 2),
    ("torch.tensor_split({x}, 2, {d})", 2),
)
INDEXED = (
    "{x}.index_select(0, {i})",
    "{x}[{i}]",
    "{x}[{i}, ..., 0]",
    "{x}.index_add(0, {i}, {x}[{i}])",
    "F.embedding({i}, {x})",
    "F.embedding({i}, {x}, padding_idx=0)",
    "F.one_hot({i}, {n}).to({x}.dtype)",
    "{x}[torch.multinomial(torch.softmax({x}.detach().float().flatten(1).sum(1), 0), 2)]",
    "torch.gather({x}, 0, {i}.reshape(-1, *[1] * ({x}.dim() - 1)))",
    "torch.zeros_like({x}).scatter_add(0, ({x} > 0).long(), {x})",
    "torch.take({x}, {i})",
    "F.cross_entropy({x}.flatten(1)[{i}], {x}.flatten(1)[{i}].argmax(1))",
    "{x}[{x} > 0].sum()",
    "torch.masked_select({x}, {x} > 0).exp().mean()",
    "{x}.flatten()[{x}.flatten().nonzero().flatten()].cumsum(0).sum()",
    "torch.cdist({x}.flatten(1), {x}.flatten(1)[{i}] + 1.5)",
)
FUNCTIONS = (
    "SaveInput.apply({x}, {y})",
    "SaveOutput.apply({x})",
    "SaveInside.apply({x})",
    "SetupContext.apply({x}, {y})",
    "Attributes.apply({x}, {y})",
    "RunsInside.apply({x})",
    "RunsAgain.apply({x})",
    "GradientInForward.apply({x})",
    "SavesView.apply({x})",
    "ManyOutputs.apply({x})[0] * 0.5",
    "ManyOutputs.apply({x})[2].sin()",
)


def unary(p: Pick) -> None:
    p.define(p.of(UNARY).format(x=p.floating()))


def along(p: Pick) -> None:
    x = p.floating(1)
    p.define(p.of(ALONG).format(x=x, d=p.dim(x)))


def binary(p: Pick) -> None:
    form, x = p.of(BINARY), p.floating()
    p.define(form.format(x=x, y=p.fitting(x), m=p.mask(x) if "{m}" in form else ""))


def cast(p: Pick) -> None:
    p.define(p.of(CASTS).format(x=p.floating()))


def draw(p: Pick) -> None:
    p.trait("draw")
    p.define(p.of(DRAWS).format(x=p.floating(1)))


def generator_draw(p: Pick) -> None:
    x, form = p.floating(1), p.of(GENERATOR_DRAWS)
    p.define(form.format(x=x, g=p.generator()))


def view(p: Pick) -> None:
    x = p.floating(1)
    p.define(p.of(VIEWS).format(x=x, d=p.dim(x)))


def several(p: Pick) -> None:
    x = p.floating(1)
    form, count = p.of(SEVERAL)
    p.define(form.format(x=x, d=p.dim(x)), count)


def indexed(p: Pick) -> None:
    x, form = p.floating(1), p.of(INDEXED)
    n = p.shape(x)[0]
    i = p.index((p.below(2) + 2,), n) if "{i}" in form else ""
    p.define(form.format(x=x, i=i, n=n))


def function(p: Pick) -> None:
    x, form = p.floating(), p.of(FUNCTIONS)
    y = p.like(x) if "{y}" in form else ""
    p.define(form.format(x=x, y=y))


def join(p: Pick) -> None:
    x = p.floating(1)
    y = p.like(x)
    forms = (
        "torch.cat([{x}, {y}], {d})",
        "torch.stack([{x}, {y}], {d})",
        "torch.hstack([{x}, {y}])",
        "torch.cat([{x}, {x} * 0.5, {y}], {d})",
    )
    p.define(p.of(forms).format(x=x, y=y, d=p.dim(x)))


def product(p: Pick) -> None:
    x = p.floating(1)
    size = p.shape(x)
    n = size[-1]
    match p.below(7):
        case 0:
            bias = p.weight((3,), x) if p.below(2) else "None"
            p.define(f"F.linear({x}, {p.weight((3, n), x)}, {bias})")
        case 1:
            p.define(f"{x} @ {p.weight((n, 4), x)}")
        case 2:
            p.define(f"torch.matmul({x}, {p.like(x)}.transpose(-1, -2))")
        case 3:
            p.define(f"torch.einsum('...i,ij->...j', {x}, {p.weight((n, 2), x)})")
        case 4:
            p.define(f"torch.einsum('...i,...i->...', {x}, {p.like(x)})")
        case 5:
            p.define(f"torch.addmm({p.weight((3,), x)}, {x}, {p.weight((n, 3), x)})")
        case _:
            w = p.weight((2, 3, n), x)
            p.define(f"torch.bmm({w}, {x}.reshape(1, {n}, -1).expand(2, {n}, -1))")


def attention(p: Pick) -> None:
    x = p.floating(2)
    drop = p.of(("", ", dropout_p=0.3", ", is_causal=True"))
    p.trait("draw")
    p.define(f"F.scaled_dot_product_attention({x}[None], {x}[None] * 0.5, {x}[None]{drop})[0]")


def convolution(p: Pick) -> None:
    x = p.floating(3, 4)
    channels, rank = p.shape(x)[1], len(p.shape(x)) - 2
    w = p.weight((2, channels, *[2] * rank), x)
    form = p.of(("F.conv{r}d({x}, {w})", "F.conv{r}d({x}, {w}, padding=1)", "F.conv_transpose{r}d"))
    if "{x}" not in form:
        w = p.weight((channels, 2, *[2] * rank), x)
        form += "({x}, {w}, stride=2)"
    p.define(form.format(r=rank, x=x, w=w))


def pool(p: Pick) -> None:
    x = p.floating(3, 4)
    r = len(p.shape(x)) - 2
    forms = (
        "F.max_pool{r}d({x}, 2, 1)",
        "F.avg_pool{r}d({x}, 2)",
        "F.adaptive_avg_pool{r}d({x}, 1)",
        "F.interpolate({x}, scale_factor=2)",
        "F.pad({x}, (1, 1), mode='reflect')",
    )
    p.define(p.of(forms).format(r=r, x=x))


def norm(p: Pick) -> None:
    x = p.floating(2)
    size = p.shape(x)
    kind = p.below(4)
    if kind == 0:
        w, b = p.weight(size[-1:], x), p.weight(size[-1:], x)
        p.define(f"F.layer_norm({x}, {size[-1:]}, {w}, {b})")
    elif kind == 1 and size[1] % 2 == 0:
        p.define(f"F.group_norm({x}, 2, {p.weight(size[1:2], x)})")
    elif kind == 2:
        p.define(f"F.instance_norm({x})")
    else:
        p.define(f"F.rms_norm({x}, {size[-1:]}, {p.weight(size[-1:], x)}, 1e-3)")


def batch_norm(p: Pick) -> None:
    x = p.floating(2)
    size = p.shape(x)[1:2]
    mean, var = (p.declared("buffer", size, p.dtype(x)) for _ in range(2))
    if mean == var:
        var = p.a.declare("buffer", size, p.dtype(x))
    affine = f"{p.weight(size, x)}, {p.weight(size, x)}" if p.below(2) else "None, None"
    training = not p.chance(20)
    p.trait("buffer")
    p.trait("behind")
    p.define(f"F.batch_norm({x}, {mean}, {var}, {affine}, {training}, 0.1)")


def recurrent(p: Pick) -> None:
    x = p.floating(3, 3)
    n = p.shape(x)[-1]
    h = p.declared("input", (1, p.shape(x)[0], 2), p.dtype(x))
    weights = [p.weight(s, x) for s in ((8, n), (8, 2), (8,), (8,))]
    rest = "True, 1, 0.0, True, False, True"
    p.trait("lstm")
    p.define(f"torch.lstm({x}, ({h}, {h}), [{', '.join(weights)}], {rest})", 3)
