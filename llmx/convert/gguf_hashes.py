"""Byte-level tokenizers that llama.cpp tells apart by how they encode one text: facts of its convert_hf_to_gguf.py."""

from __future__ import annotations

TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n\U0001f680 (normal) \U0001f636\u200d\U0001f32b"
    "\ufe0f (multiple emojis concatenated) \u2705 \U0001f999\U0001f999 3 33 333 3333 33333 333333 33333"
    "33 33333333 3.3 3..3 3...3 \u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f"
    "\u17a2\u17b6\u1785\U0001f601 ?\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e ------======="
    " \u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438 ''''"
    "''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll"
    " make it, 'D you like some tea? We'Ve a'lL"
)
# -> the beginnings of the SHA-256 of the ids as Python prints their list. Only names that llmx.tokenizer.splits has.
HASHES = {
    "a.x-4.0": "b0a6b1c0bd5998eb",
    "bailingmoe": "96a5f08be6259352",
    "bailingmoe2": "9b1be57e70d20d95",
    "chatglm-bpe": "b6e8e1518dc4305b 81d72c7348a9f0eb",
    "codeshell": "7b3e7548e4308f52",
    "command-r": "9c2227e4dd922002",
    "dbrx": "a8594e3edff7c29c",
    "deepseek-coder": "347715f544604f91",
    "deepseek-llm": "049ecf7629871e30",
    "deepseek-r1-qwen": "b3f499bb4255f8ca",
    "deepseek-v3": "877081d19cf6996e",
    "exaone": "4e2b24cc4770243d",
    "exaone4": "2085e1638f6c377a",
    "falcon": "8aeee3860c56296a",
    "falcon-h1": "a6b57017d60e6edb 60476e1243776c4f 3eda48b4c4dc7de7 48f8e02c0359c0bb",
    "falcon3": "9d032fcbd5501f4a",
    "gigachat": "ad851be1dba641f2",
    "glm4": "a1336059768a55c9 9ca2dd618e8afaf0 cdf5f35325780597",
    "gpt-2": "0fe1cf6eda062318 3ce83efda5659b07",
    "gpt-4o": "ccc2ef013c104be7",
    "granite-docling": "53e325976a6e1423",
    "grok-2": "66b8d4e19ab16c3b",
    "hunyuan": "7e57df22b1fe23a7",
    "hunyuan-dense": "bba3b3366b646dbd",
    "hy_v4": "e6ddf9c6686791c1",
    "jais": "b53802fb28e26d64",
    "joyai-llm": "b4b8ca1f9769494f",
    "kanana2": "e4d54df1ebc1f2b9",
    "kormo": "4a2e2abae11ca2b8",
    "lfm2": "9e454714343b69b9 169bf0296a13c4d9",
    "llama-bpe": "0ef9807a4087ebef",
    "llama4": "d353350c764d8c3b",
    "megrez": "d4c8f286ea6b520b",
    "mellum": "a1e163ecab2e718a",
    "mellum2": "9dcf830ee9990cdb",
    "midm-2.0": "f6791d196f87ce6b",
    "minerva-7b": "1431a23e583c9743",
    "minicpm5": "36f3066e97b7f399",
    "minimax-m2": "f4f37b6c8eb9ea29",
    "mpt": "b6dc8df998e1cfbd",
    "olmo": "b6dc8df998e1cfbd",
    "phi-2": "fcace8b9cac38ce8",
    "pixtral": "0e9433cbbb161f89",
    "qwen2": "d4540891389ea895 e636dc30a262dcc0",
    "qwen35": "1444df51289cfa80 d30d75d9059f1aa2",
    "refact": "6221ad2852e85ce9",
    "seed-coder": "d5f1dd6f980fec56",
    "smaug-bpe": "c136ed14d01c2745",
    "smollm": "855059429035d75a",
    "solar-open": "16389f0a1f51ee53",
    "stablelm2": "32d85c31273f8019",
    "starcoder": "35d91631860c815f",
    "tekken": "63b97e4253352e6f",
    "trillion": "1994ffd01900cfb3",
}
NAMES = {part: name for name, parts in HASHES.items() for part in parts.split()}
