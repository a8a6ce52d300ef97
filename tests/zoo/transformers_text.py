"""Text models of the transformers library, from small configurations, with every dropout on.

Problem: they bring routing, state-space scans, caches, attention kernels chosen by name, and
outputs that are dictionaries.
Invariant: caches are off unless the case is about them; nothing is downloaded. May import:
`zoo.case`; transformers only when built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from zoo.case import Batch, Case, integers, labelled_loss, lookup

VOCABULARY = 31
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "attention_dropout": 0.1,
    "use_cache": False,
}
ENCODER: dict[str, Any] = {
    **SMALL,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "type_vocab_size": 2,
}
ROUTED: dict[str, Any] = {
    **DECODER,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "output_router_logits": True,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.1,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
STATE_SPACE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "state_size": 4,
    "use_cache": False,
}


def net(model: str, configuration: str, /, **settings: Any) -> Callable[[], nn.Module]:
    """A builder of a transformers model from its own configuration class, in training mode."""

    def build() -> nn.Module:
        config = lookup(f"transformers:{configuration}")(**settings)
        attention = settings.get("attn_implementation")
        if attention:
            config._attn_implementation = attention
        made = lookup(f"transformers:{model}")(config)
        return cast(nn.Module, made.train())

    return build


def tokens(length: int = 8) -> Batch:
    """Tokens that are their own labels, one row of them padded."""
    ids = 3 + integers(VOCABULARY - 3, 2, length)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return ({"input_ids": ids, "attention_mask": mask, "labels": ids.clone()},)


def unpadded() -> Batch:
    ids = 3 + integers(VOCABULARY - 3, 2, 8)
    return ({"input_ids": ids, "labels": ids.clone()},)


def classes() -> Batch:
    return ({**tokens()[0], "labels": integers(2, 2)},)


def _text(name: str, model: str, configuration: str, /, batch: Any = tokens, **more: Any) -> Case:
    return Case(f"hf_{name}", net(model, configuration, **more), batch, labelled_loss)


def _decoder(name: str, family: str, /, **more: Any) -> Case:
    return _text(name, f"{family}ForCausalLM", f"{family}Config", **{**DECODER, **more})


def _routed(name: str, family: str, /, **more: Any) -> Case:
    return _text(name, f"{family}ForCausalLM", f"{family}Config", **{**ROUTED, **more})


LLAMA = _decoder("llama", "Llama")

CASES = [
    _text("gpt2_eager", "GPT2LMHeadModel", "GPT2Config", attn_implementation="eager", **GPT2),
    _text("gpt2_sdpa", "GPT2LMHeadModel", "GPT2Config", attn_implementation="sdpa", **GPT2),
    _text("gpt2_autocast", "GPT2LMHeadModel", "GPT2Config", **GPT2).but(
        "hf_gpt2_autocast", autocast=True
    ),
    LLAMA,
    LLAMA.but("hf_llama_autocast", autocast=True),
    LLAMA.but(
        "hf_llama_with_cache",
        build=net("LlamaForCausalLM", "LlamaConfig", **{**DECODER, "use_cache": True}),
    ),
    _decoder("mistral", "Mistral", sliding_window=4),
    _decoder("gemma2", "Gemma2", sliding_window=4, query_pre_attn_scalar=8),
    _decoder("qwen3", "Qwen3"),
    _decoder("phi3", "Phi3", resid_pdrop=0.1, embd_pdrop=0.1),
    _text(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        **{**SMALL, "hidden_dropout": 0.1, "attention_dropout": 0.1, "use_cache": False},
    ),
    _text(
        "opt",
        "OPTForCausalLM",
        "OPTConfig",
        **{
            **SMALL,
            "ffn_dim": 24,
            "word_embed_proj_dim": 16,
            "dropout": 0.1,
            "layerdrop": 0.3,
            "use_cache": False,
        },
    ).but("hf_opt_layerdrop", tags=frozenset({"dynamic"})),
    _routed("mixtral", "Mixtral", router_jitter_noise=0.1),
    _routed("qwen3_moe", "Qwen3Moe", decoder_sparse_step=1),
    _routed("olmoe", "Olmoe"),
    _text("t5", "T5ForConditionalGeneration", "T5Config", **T5),
    _text(
        "t5_gated",
        "T5ForConditionalGeneration",
        "T5Config",
        feed_forward_proj="gated-gelu",
        **T5,
    ),
    _text(
        "bart",
        "BartForConditionalGeneration",
        "BartConfig",
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        attention_dropout=0.1,
        activation_dropout=0.1,
        use_cache=False,
    ),
    _text("bert", "BertForSequenceClassification", "BertConfig", classes, **ENCODER),
    _text("roberta", "RobertaForMaskedLM", "RobertaConfig", **ENCODER),
    _text("electra", "ElectraForSequenceClassification", "ElectraConfig", classes, **ENCODER),
    _text(
        "deberta",
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        classes,
        **{**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    _text(
        "albert",
        "AlbertForMaskedLM",
        "AlbertConfig",
        **{**ENCODER, "embedding_size": 8, "num_hidden_layers": 3},
    ),
    _text(
        "modernbert",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        **{
            **SMALL,
            "attention_dropout": 0.1,
            "mlp_dropout": 0.1,
            "embedding_dropout": 0.1,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    _text("mamba", "MambaForCausalLM", "MambaConfig", unpadded, **STATE_SPACE),
    _text(
        "mamba2",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        unpadded,
        **STATE_SPACE,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=4,
    ),
    _text(
        "reformer_free_xlnet",
        "XLNetLMHeadModel",
        "XLNetConfig",
        vocab_size=VOCABULARY,
        d_model=16,
        n_layer=2,
        n_head=2,
        d_inner=24,
        use_mems_train=False,
    ).but("hf_xlnet"),
    _text("rwkv", "RwkvForCausalLM", "RwkvConfig", unpadded, **{**SMALL, "context_length": 16}),
]
