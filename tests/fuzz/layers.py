"""Calls of modules and of functions that want their input in one shape.

The problem: recurrent nets, attention with masks, losses over sequences, decompositions, transforms
and other layouts (sparse, opaque, nested, quantized) reach autograd and the recorder each by a way
of their own.

The invariant: one statement takes any tensor, brings it to shape, and gives back a strided one.
Imports assemble and modules.

Rejected: shapes drawn for each. What surrounds a layer matters here, not which sizes it has.
Rejected: `torch.linalg.lstsq`. Its last bits depend on the address of what it reads (MKL), so two
plain runs differ.
"""

from __future__ import annotations

from .assemble import Pick
from .modules import MODULES

SHAPED = (
    "F.pixel_shuffle(sized({x}, 1, 4, 2, 2), 2)",
    "F.pixel_unshuffle(sized({x}, 1, 1, 4, 2), 2)",
    "F.channel_shuffle(sized({x}, 1, 4, 2, 2), 2)",
    "F.fold(sized({x}, 1, 4, 4), (3, 3), 2)",
    "F.unfold(sized({x}, 1, 1, 3, 4), 2)",
    "F.max_unpool1d(*F.max_pool1d(sized({x}, 1, 2, 4), 2, return_indices=True), 2)",
    "F.max_pool3d(sized({x}, 1, 1, 2, 3, 3), 2)",
    "F.adaptive_max_pool2d(sized({x}, 1, 2, 4, 3), 2)",
    "F.lp_pool1d(sized({x}, 1, 2, 4).abs() + 0.1, 2, 2)",
    "F.fractional_max_pool2d(sized({x}, 1, 2, 4, 4), 2, output_size=2)",
    "F.grid_sample(sized({x}, 1, 2, 3, 3), sized({x}, 1, 2, 2, 2).tanh(), align_corners=False)",
    "F.affine_grid(sized({x}, 1, 2, 3), [1, 1, 2, 3], align_corners=True)",
    "F.interpolate(sized({x}, 1, 1, 2, 3), scale_factor=2, mode='bicubic')",
    "F.interpolate(sized({x}, 1, 1, 4, 4), size=3, mode='bilinear', antialias=True)",
    "F.local_response_norm(sized({x}, 1, 4, 3), 2)",
    "F.bilinear(sized({x}, 4, 3), sized({x}, 4, 2), sized({x}, 2, 3, 2))",
    "F.conv3d(sized({x}, 1, 1, 3, 2, 2), sized({x}, 2, 1, 2, 2, 2))",
    "F.conv2d(sized({x}, 1, 4, 3, 3), sized({x}, 4, 1, 2, 2), groups=4)",
    "F.ctc_loss(torch.log_softmax(sized({x}, 4, 1, 3), 2), torch.tensor([[1, 2]]), [4], [2])",
    "F.kl_div(torch.log_softmax(sized({x}, 2, 3), 1), sized({x}, 2, 3).softmax(1),"
    " reduction='sum')",
    "F.triplet_margin_loss(sized({x}, 2, 3), sized({x}, 2, 3) + 0.3, sized({x}, 2, 3) - 0.9)",
    "F.multi_margin_loss(sized({x}, 2, 3), torch.tensor([0, 2]))",
    "F.multilabel_margin_loss(sized({x}, 2, 3), torch.tensor([[0, 2, -1], [1, -1, 0]]))",
    "F.cosine_embedding_loss(sized({x}, 2, 3), sized({x}, 2, 3) + 1, torch.tensor([1, -1]))",
    "F.nll_loss(sized({x}, 2, 3, 2).log_softmax(1), torch.tensor([[0, 2], [1, 1]]), sized({x},"
    " 3).detach().abs())",
    "F.cross_entropy(sized({x}, 2, 3), torch.tensor([0, -100]), label_smoothing=0.1)",
    "F.binary_cross_entropy_with_logits(sized({x}, 2, 3), sized({x}, 2, 3).detach().sigmoid())",
    "F.embedding_bag({i}, sized({x}, 4, 2), torch.tensor([0, 1]), mode='max')",
    "F.embedding_bag({i}, sized({x}, 4, 2), torch.tensor([0, 1]), mode='sum',"
    " per_sample_weights=sized({x}, 3))",
    "F.scaled_dot_product_attention(*[sized({x}, 1, 2, 3, 4)] * 3, sized({x}, 3, 3))",
    "F.scaled_dot_product_attention(*[sized({x}, 1, 2, 3, 4)] * 3, torch.ones(3, 3).tril().bool())",
    "F.scaled_dot_product_attention(sized({x}, 1, 4, 3, 4), *[sized({x}, 1, 2, 3, 4)] * 2,"
    " enable_gqa=True)",
    "F.multi_head_attention_forward(*[sized({x}, 3, 1, 4)] * 3, 4, 2, sized({x}, 12, 4), None,"
    " None,"
    " None, False, 0.0, sized({x}, 4, 4), None, need_weights=False)[0]",
    "torch.fft.fft2(sized({x}, 3, 4)).abs()",
    "torch.fft.irfft(torch.fft.rfft(sized({x}, 2, 5)) * (0.5 + 1j), 5)",
    "torch.fft.ifft(sized({x}, 4)).conj().imag",
    "torch.view_as_real(torch.complex(sized({x}, 3), sized({x}, 3) * 2).conj() ** 2)",
    "(torch.complex(sized({x}, 3), sized({x}, 3)).conj().imag * 2).sin()",
    "torch.stft(sized({x}, 8), 4, window=torch.hann_window(4), return_complex=True).abs()",
    "torch.linalg.svd(sized({x}, 3, 2) + torch.eye(3, 2), full_matrices=False)[1]",
    "torch.linalg.eigh(sized({x}, 3, 3) + sized({x}, 3, 3).t() + torch.arange(3.0).diag())[0]",
    "torch.linalg.eigvals(sized({x}, 2, 2)).abs()",
    "torch.linalg.solve(sized({x}, 3, 3) * 0.2 + torch.eye(3), sized({x}, 3, 2))",
    "torch.linalg.cholesky(sized({x}, 3, 3) @ sized({x}, 3, 3).t() + torch.eye(3))",
    "torch.cholesky_solve(sized({x}, 3, 1), torch.linalg.cholesky(sized({x}, 3, 3) @ sized({x},"
    " 3, 3).t()"
    " + torch.eye(3)))",
    "torch.linalg.qr(sized({x}, 3, 2) + torch.eye(3, 2))[1]",
    "torch.linalg.slogdet(sized({x}, 3, 3) * 0.3 + torch.eye(3))[1]",
    "torch.linalg.inv(sized({x}, 2, 2) * 0.3 + torch.eye(2))",
    "torch.linalg.matrix_exp(sized({x}, 3, 3) * 0.3)",
    "torch.linalg.multi_dot([sized({x}, 2, 3), sized({x}, 3, 4), sized({x}, 4, 2)])",
    "torch.triangular_solve(sized({x}, 2, 1), sized({x}, 2, 2).tril() + 2 * torch.eye(2),"
    " upper=False)[0]",
    "torch.baddbmm(sized({x}, 2, 2, 2), sized({x}, 2, 2, 3), sized({x}, 2, 3, 2), beta=0.5)",
    "torch.cummax(sized({x}, 2, 3), 1)[0] + torch.cummin(sized({x}, 2, 3), 0)[0]",
    "torch.logcumsumexp(sized({x}, 2, 3), 1)",
    "torch.unique(sized({x}, 5).detach().round()).sum() * {x}",
    "torch.unique_consecutive(({x} > 0).flatten().long()).float() * sized({x}, 1)",
    "torch.bucketize(sized({x}, 4).detach(), torch.linspace(-1, 1, 3)) * sized({x}, 4)",
    "torch.histc({x}.detach().float(), 4) * sized({x}, 4)",
    "torch.kthvalue(sized({x}, 2, 4), 2)[0] + sized({x}, 2, 4).median(1)[0] + sized({x},"
    " 5).mode()[0]",
    "torch.quantile(sized({x}, 6).float(), 0.4)",
    "torch.nan_to_num(sized({x}, 4) / (sized({x}, 4) > 0))",
    "torch.scatter_reduce(sized({x}, 4), 0, {i}, sized({x}, 3), 'prod')",
    "torch.scatter_reduce(sized({x}, 4), 0, {i}, sized({x}, 3), 'amax', include_self=False)",
    "torch.index_put(sized({x}, 4, 2), ({i},), sized({x}, 3, 2), accumulate=True)",
    "torch.index_reduce(sized({x}, 4, 2), 0, {i}, sized({x}, 3, 2), 'mean')",
    "torch.segment_reduce(sized({x}, 4).abs(), 'sum', lengths=torch.tensor([1, 3]))",
    "torch.repeat_interleave(sized({x}, 3, 2), {i}, 0).cumsum(0).sum()",
    "torch.combinations(sized({x}, 3)).sum(1).tanh()",
    "torch.tensordot(sized({x}, 2, 3), sized({x}, 3, 2), 1)",
    "torch.einsum('ij,kj,k->i', sized({x}, 2, 3), sized({x}, 4, 3), sized({x}, 4))",
    "torch.cov(sized({x}, 2, 4)) + torch.corrcoef(sized({x}, 2, 4) + torch.eye(2, 4)).clamp(-0.9,"
    " 0.9)",
    "torch.special.erfinv(sized({x}, 4).tanh() * 0.9) + torch.lgamma(sized({x}, 4).abs() + 1)",
    "torch.ldexp(sized({x}, 3), torch.tensor([1, 2, 0])) + torch.copysign(sized({x}, 3),"
    " sized({x}, 3) - 1)",
    "torch.cat([{x}.flatten(), {x}.flatten()[:0].tanh()]).exp().clamp(max=4)",
    "torch.cat([sized({x}, 2, 3), torch.zeros(0, 3) @ sized({x}, 3, 3)]).tanh()",
    "{x}.flatten()[0].reshape(*[1] * 12).expand(*[1] * 11, 2).exp().clamp(max=9).flatten()",
    "{x}.flatten()[0].sigmoid().item() * {x}",
    "{x}.to(torch.float16).sigmoid().to({x}.dtype)",
    "{x}.to(torch.float8_e4m3fn).to({x}.dtype) * {x}",
    "({x} * 4).to(torch.int8).float().mul({x})",
    "sized({x}, 1, 2, 2, 3).to(memory_format=torch.channels_last).sigmoid().exp().contiguous()",
    "torch._foreach_mul([{x}, {x}.tanh()], 0.5)[1]",
    "torch._foreach_norm([{x}.exp().clamp(max=5), {x}])[0]",
    "torch.stack(torch._foreach_exp([sized({x}, 2), sized({x}, 2) * 0.5])).clamp(max=5)",
    "torch.sparse.mm(torch.eye(3).to_sparse(), sized({x}, 3, 2).exp().clamp(max=5))",
    "torch.sparse.sum(sized({x}, 3, 2).tanh().to_sparse())",
    "(sized({x}, 3, 3).tanh().to_sparse() @ sized({x}, 3, 2)).sin()",
    "sized({x}, 3, 2).relu().to_sparse().coalesce().to_dense().exp().clamp(max=5)",
    "sized({x}, 3, 2).exp().clamp(max=5).to_sparse_csr().to_dense().sin()",
    "torch.sparse_coo_tensor({i}[None], sized({x}, 3).tanh(), (4,)).to_dense().exp()",
    "torch.sparse.softmax(sized({x}, 2, 3).to_sparse(), 1).to_dense()",
    "sized({x}, 2, 3).float().to_mkldnn().relu().to_dense().exp().clamp(max=5)",
    "torch.quantize_per_tensor(sized({x}, 4).detach().float(), 0.1, 2, torch.qint8).dequantize()"
    " * sized({x}, 4)",
    "torch.fake_quantize_per_tensor_affine(sized({x}, 4).float(), 0.1, 0, -8, 7).sin()",
    "torch.nested.nested_tensor_from_jagged(sized({x}, 4, 2).tanh(), torch.tensor([0, 1, 4]))"
    ".sin().values().clone()",
    "(torch.nested.as_nested_tensor([sized({x}, 2, 2).tanh(), sized({x}, 1, 2)]) * 0.5)"
    ".to_padded_tensor(0.0).clamp(max=5)",
    "torch.vmap(lambda t: t.sin() * t.sum())(sized({x}, 2, 3))",
    "torch.func.functional_call(torch.nn.Linear(3, 2), {{'weight': sized({x}, 2, 3)}}, sized({x},"
    " 2, 3))",
    "drained({x}, region)",
    "drained({x}, direct)",
    "in_thread(lambda: torch.tanh({x}).exp())",
    "in_thread(lambda: region(lambda t: torch.tanh(t).exp(), {x}))",
    "torch.utils.checkpoint.checkpoint(lambda t: t.tanh().exp(), {x}, use_reentrant=False)",
    "torch.utils.checkpoint.checkpoint(lambda t: t.tanh().exp(), {x}, use_reentrant=True)",
)


def shaped(p: Pick) -> None:
    x, form = p.floating(), p.of(SHAPED)
    p.trait("layer")
    if "fractional" in form or "nn.Linear" in form:
        p.trait("draw")
    p.define(form.format(x=x, i=p.index((3,), 4) if "{i}" in form else ""))


def module(p: Pick) -> None:
    """A module that lives as long as the parameters do; in half of the cases one that is there."""
    x = p.floating()
    making, call = p.of(MODULES)
    same = [d.name for d in p.a.declarations if d.text == making]
    name = p.of(same) if same and p.below(2) == 0 else p.a.declare_module(making)
    for trait in ("buffer", "behind", "draw", "side effect"):
        p.trait(trait)
    p.define(call.format(m=name, x=x, i=p.index((3,), 4) if "{i}" in call else ""))
