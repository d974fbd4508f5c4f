"""A tiny Llama on disk, as Hugging Face stores one, with a byte-level tokenizer and a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "a stitch in time saves nine",
    "Hello, world! How are you today?",
]
CONTEXT = 256
HIDDEN = 64
# No byte twice, so that each can have one successor: an emoji of four bytes, a letter of two, an ideograph of three.
SAYING = "🫠ď客"


def build(
    folder: Path,
    successors: Mapping[str, str] | None = None,
    *,
    specials: Sequence[str] = (),
    context: int = CONTEXT,
) -> Path:
    """Writes the model. With `successors` it says after each key its value (both single bytes as the tokenizer shows
    them), whatever came before; else its weights are random. specials: more special tokens. context: in tokens.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[*SPECIALS, *specials], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|begin|>", eos_token="<|end|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if successors is not None:
        _follow(model, {inner.token_to_id(now): inner.token_to_id(then) for now, then in successors.items()})
    model.save_pretrained(folder)
    return folder


def _follow(model: object, successors: Mapping[int, int]) -> None:
    """Makes `then` the likeliest token after `now`: the layers add nothing, the head looks at `now` alone."""
    import torch

    with torch.no_grad():
        weights = dict(model.named_parameters())  # type: ignore[attr-defined]
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight", "embed_tokens.weight")):
                weight.zero_()
        for place, (now, then) in enumerate(successors.items()):
            weights["model.embed_tokens.weight"][now, place] = 1.0
            weights["lm_head.weight"][then, place] = 10.0
