"""Writes through what shares memory in unusual ways, and tensors that change their memory.

The problem: autograd follows a write by storage and version; views of another dtype, parts of one
`unsafe_chunk`, overlapping strides, `.data`, `set_` and lists of tensors reach the same memory by
ways that differ in what they count.

The invariant: as in `writes`, with the traits that the driver's excuses go by: "write" for all, and
"behind" for what moves no version counter. Imports assemble.

Rejected: only writes that autograd accepts. What plain refuses must be refused, or be right.
"""

from __future__ import annotations

from .assemble import Pick

# Statements that end with {v}, a name of a tensor to go on with.
SHARED = (
    "{v} = {x}.detach() * 1; {v}.view(torch.uint8)[..., :1].bitwise_and_(0x7F)",
    "{v} = {x} * 1; {v}.detach().view(torch.int32).flatten()[:1].bitwise_and_(0x7FFFFFFF)",
    "{v} = {x} + 0.5; {v}.view(torch.int32).flatten()[:1].zero_()",
    "{v} = torch.zeros(6); {v}.as_strided((2, 3), (2, 1)).copy_(sized({x}, 2, 3))",
    "{v} = sized({x}, 6).exp().clamp(max=3); {v} = {v}.as_strided((2, 4), (2, 1)).tanh()",
    "{v} = sized({x}, 6) * 1; {v}.as_strided((2, 3), (3, 1)).mul_(2); {v} = {v}.sin()",
    "{v} = sized({x}, 6) * 1; {v}.unfold(0, 2, 2).mul_(0.5); {v} = {v} * {v}.detach()",
    "{v} = sized({x}, 2, 3).expand(3, 2, 3).clone(); {v}[0].tanh_(); {v}[1:].mul_({v}[0].detach())",
    "{v} = sized({x}, 4) * 1; {v}_a, {v}_b = {v}.chunk(2); {v}_a.detach().mul_(2); {v} ="
    " {v}.exp().clamp(max=9)",
    "{v} = sized({x}, 4) * 1; {v}_a, {v}_b = torch.unsafe_chunk({v}, 2); {v}_a.sigmoid_();"
    " {v} = {v}_a.tanh() * {v}_b.tanh_()",
    "{v} = sized({x}, 4, 2) * 1; {v}_a, {v}_b = torch.unsafe_split({v}, 2); {v} = {v}_a.sin();"
    " {v}_b.mul_(2); {v} = {v} * {v}_b.exp().clamp(max=9)",
    "{v} = torch.split_copy(sized({x}, 4), 2)[0]; {v}.sigmoid_()",
    "{v} = torch.complex(sized({x}, 3), sized({x}, 3)); torch.view_as_real({v})[:, 1].mul_(2);"
    " {v} = {v}.abs()",
    "{v} = torch.complex(sized({x}, 3), sized({x}, 3)); {v}.imag.copy_(sized({x}, 3) * 2);"
    " {v} = ({v} * {v}.conj()).real",
    "{v} = torch.complex(sized({x}, 3), sized({x}, 3)).conj(); {v}.mul_(1j); {v} ="
    " {v}.imag.exp().clamp(max=5)",
    "{v} = torch.complex(sized({x}, 3), sized({x}, 3)).conj().imag; {v} = {v}.clone().tanh_()",
    "{v} = torch._neg_view(sized({x}, 3) * 1); {v} = {v}.exp().clamp(max=9) * {v}",
    "{v} = torch.empty(0); torch.mul(sized({x}, 4).detach(), 2, out={v}); {v} = {v} * sized({x},"
    " 4)",
    "{v} = torch.empty(2); torch.cat([sized({x}, 2).detach()[:1]] * 2, out={v}); {v} = {v} *"
    " sized({x}, 2)",
    "{v} = sized({x}, 4).detach() * 1; torch.sin({v}, out={v}); {v} = {v} * sized({x}, 4)",
    "{v}_a, {v}_b = torch.empty(0), torch.empty(0, dtype=torch.long);"
    " torch.sort(sized({x}, 4).detach(), out=({v}_a, {v}_b)); {v} = sized({x}, 4)[{v}_b] * {v}_a",
    "{v} = sized({x}, 4).detach() * 1; {v}.resize_(2); {v} = {v} * sized({x}, 2)",
    "{v} = torch.empty(0).set_((sized({x}, 4).detach() * 2).untyped_storage()); {v} = {v} *"
    " sized({x}, 4)",
    "{v} = torch.zeros(4); {v}.set_(sized({x}, 4).detach() * 2); {v} = {v} * sized({x}, 4)",
    "{v} = torch.zeros(4); {v}.data = sized({x}, 4).detach() * 2; {v} = {v} * sized({x}, 4)",
    "{v}_a = torch.ones(4); {v} = sized({x}, 4) * {v}_a; {v}_a.data = torch.zeros(4); {v} = {v} *"
    " {v}_a",
    "{v} = sized({x}, 4).detach() * 1; {v}.resize_as_(torch.empty(2)); {v} = {v} * sized({x}, 2)",
    "{v} = sized({x}, 2, 3) * 1; {v}.t_(); {v} = {v}.exp().clamp(max=9); {v}.transpose_(0, 1)",
    "{v} = sized({x}, 1, 3) * 1; {v}.squeeze_(0).unsqueeze_(1); {v}[0].zero_(); {v} = {v}.sin()",
    "{v} = sized({x}, 4) * 1; {v}.detach_(); {v} = {v}.sin() * sized({x}, 4)",
    "{v} = sized({x}, 4).detach() * 1; {v}.requires_grad_(); {v} = {v}.sin() * sized({x}, 4)",
    "{v} = sized({x}, 4) * 1; torch._foreach_mul_([{v}], 0.5); {v} = {v}.exp().clamp(max=9)",
    "{v}_a, {v}_b = sized({x}, 4) * 1, sized({x}, 4) * 2; torch._foreach_add_([{v}_a, {v}_b],"
    " [{v}_b, {v}_a], alpha=0.5); {v} = {v}_a.sin() * {v}_b",
    "{v}_a, {v}_b = sized({x}, 4) * 1, sized({x}, 2) * 2; torch._foreach_zero_([{v}_a[:2], {v}_b]);"
    " {v} = {v}_a.exp().clamp(max=9)",
    "{v} = sized({x}, 4) * 1; torch._foreach_copy_([{v}[:2].detach()], [{v}[2:].detach()]); {v} ="
    " {v}.sin()",
    "{v} = sized({x}, 4).clone(); {v}[[0, 1]] += {v}[[2, 3]].tanh(); {v} = {v}.sin()",
    "{v} = sized({x}, 4).clone(); {v}.index_put_((torch.tensor([1, 1]),), sized({x}, 2).sin(),"
    " accumulate=True); {v} = {v}.exp().clamp(max=9)",
    "{v} = sized({x}, 3, 3).clone(); {v}.fill_diagonal_(0.5); {v} = {v}.sin()",
    "{v} = sized({x}, 3, 3).clone(); {v}.tril_(); {v} = {v}.sin(); {v}.triu_()",
    "{v} = sized({x}, 4).clone(); {v}.scatter_reduce_(0, {i}, sized({x}, 3).sin(), 'amax'); {v} ="
    " {v}.sin()",
    "{v} = sized({x}, 4).clone(); {v}.masked_scatter_({v}.detach() > 0, sized({x}, 4).sin()); {v}"
    " = {v}.sin()",
    "{v} = sized({x}, 4).clone(); {v}.cumsum_(0); {v} = {v}.sin()",
    "{v} = torch.empty(4); {v}[:2] = sized({x}, 2); {v}[2:] = sized({x}, 2).sin(); {v} = {v}.sin()",
    "{v} = torch.empty(4, 2); {v}[torch.tensor([0, 2])] = sized({x}, 2, 2);"
    " {v}[torch.tensor([1, 3])] = sized({x}, 2, 2).sin(); {v} = {v}.sin()",
    "{v} = sized({x}, 4) * 1; {v}.detach().numpy()[0] = 0.5; {v} = {v}.sin()",
    "{v} = torch.from_numpy(sized({x}, 4).detach().numpy() * 2); {v} = {v} * sized({x}, 4)",
    "{v} = torch.from_dlpack(sized({x}, 4).detach() * 2).sin() * sized({x}, 4)",
    "{v} = (sized({x}, 4).detach() * 2).share_memory_().sin() * sized({x}, 4)",
    "{v} = torch.frombuffer(bytearray(16), dtype=torch.float32).add_(sized({x}, 4).detach()) *"
    " sized({x}, 4)",
    "{v} = sized({x}, 4).exp().clamp(max=3); {v}.untyped_storage(); {v} ="
    " {v}.detach().storage_offset() + {v}.sin()",
    "{v} = torch.nn.Parameter(sized({x}, 4).detach()); {v} = {v}.sin() * sized({x}, 4)",
    "{v} = copy.deepcopy(sized({x}, 4).detach() * 2).sin() * sized({x}, 4)",
    "{v} = torch.tensor(({x}).tolist()).sin() * {x}",
    "{v} = torch.as_tensor({x}.detach().flatten()[0]) * {x}; {v} = {v}.sin()",
    "with torch.inference_mode(): {v} = torch.ones(4) * 2\n{v} = {v} + sized({x}, 4); {v} ="
    " {v}.sin()",
    "with torch.no_grad(): {v} = torch.zeros(4); {v}[:2] = sized({x}, 2)\n{v} = {v} * sized({x},"
    " 4); {v} = {v}.sin()",
    "{v} = sized({x}, 4) * 1; torch.nn.init.normal_({v}); {v} = {v} * sized({x}, 4)",
    "{v} = sized({x}, 4) * 1; {v}.register_hook(lambda g: g.clone().mul_(2)); {v}.mul_(2); {v} ="
    " {v}.sin()",
)


def shared(p: Pick) -> None:
    """Fresh memory that is written through one of its aliases, and read afterwards."""
    x, form = p.floating(), p.of(SHARED)
    p.trait("write")
    if ".data" in form or "numpy" in form:
        p.trait("behind")
    i = p.index((3,), 4) if "{i}" in form else ""
    p.execute(form, x=x, i=i)


ON_TARGET = (
    "torch._foreach_mul_([{t}, {t}.detach()], 0.5)",
    "{t}.detach().view(torch.int32).bitwise_and_(0x7FFFFFFF)",
    "{t}.chunk(2, 0)[0].detach().tanh_()",
    "torch.tanh({t}.detach(), out={t}.detach())",
    "{t}.data.set_(torch.full_like({t}, 0.5))",
    "{t}.data = {t}.detach() * 0.5",
    "torch.view_as_real(torch.view_as_complex({t}.detach().view(-1, 2)))[..., 0].mul_(2)",
    "{t}.unfold(0, 1, 1).mul_(0.5)",
    "{t}.expand_as({t}).mul_(0.5)",
    "{t}.detach().numpy().fill(0.25)",
    "{t}.resize_({t}.shape)",
    "{t}.detach().set_({t}.detach())",
    "{t}.copy_(torch.zeros({t}.shape).expand_as({t}))",
    "{t}.put_(torch.tensor([0]), torch.ones(1, dtype={t}.dtype))",
    "{t}.mT.mul_(0.5)",
)


def on_target(p: Pick) -> None:
    """The same on a tensor that the program has already used."""
    t, form = p.target(), p.of(ON_TARGET)
    p.trait("write")
    if ".data" in form or "numpy" in form:
        p.trait("behind")
    p.emit(form.format(t=t))
