"""The pre-tokenizers of byte-level BPE in GGUF files (`tokenizer.ggml.pre`): facts from llama.cpp's llama-vocab.cpp.

Where llama.cpp rewrites a model's own regular expression because its engine lacks something (`\\p{Lu}` in tekken and
gpt-4o, for one), the model's own stands here: it is what the model was trained with.
"""

from __future__ import annotations

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"]
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CASED_LETTERS = (  # letters of alphabets with two cases, as DeepSeek lists them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK, _KANA = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)


@dataclass(frozen=True)
class Split:
    """regexes: each is applied to what the ones before left whole. whole_words: a word that is in the vocabulary is
    taken as it is, whatever the merges would make of it. add_bos: what holds if the file doesn't say."""

    regexes: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


def _any(*alternatives: str) -> str:
    return "|".join(alternatives)


_QWEN2 = _any(_SHORT, _WORD, r"\p{N}", _MARKS, _SPACES)
_LLAMA3 = _any(_SHORT, _WORD, r"\p{N}{1,3}", _MARKS, _SPACES)
_GPT4O = _any(*(case + _SHORT + "?" for case in _CASED), r"\p{N}{1,3}", _SLASHES, _SPACES)
_QWEN35 = _any(_SHORT, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES)
_SEED = _any(_SHORT, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES)
_BAILING = _any(
    *(r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", _MARKS),
    r"\s*[\r\n]|\s+(?!\S)|\s+",
)

_KINDS: dict[Split, str] = {  # -> the names that files give to it
    Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): "default",
    Split((_GPT2,)): "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum a.x-4.0",
    Split((r"\p{N}", _GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    Split((_LLAMA3,), whole_words=True, add_bos=True): "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0"
    " lfm2",
    Split((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    Split((_LLAMA3,), whole_words=True): "glm4 glm5",
    Split((r"\p{N}{1,3}", _LLAMA3), whole_words=True): "minicpm5",
    Split((_QWEN2,)): "qwen2 deepseek-r1-qwen kormo stablelm2 hunyuan solar-open megrez grok-2",
    Split((_QWEN35,)): "qwen35",
    Split((_SEED,)): "seed-coder",
    Split((_BAILING,)): "bailingmoe bailingmoe2 llada-moe",
    Split((_any(*_CASED, r"\p{N}", _SLASHES, _SPACES),), whole_words=True, add_bos=True): "tekken",
    Split((_GPT4O,)): "gpt-4o llama4 kanana2 minimax-m2",
    Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")): "falcon",
    Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")): "deepseek-coder",
    Split(
        (
            r"[\r\n]",
            r"\s?[" + _CASED_LETTERS + "]+",
            r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ): "deepseek-llm",
    Split((r"\p{N}{1,3}", _KANA, _DEEPSEEK_WORDS)): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
}
SPLITS = {name: split for split, names in _KINDS.items() for name in names.split()}
