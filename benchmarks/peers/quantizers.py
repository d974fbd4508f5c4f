"""Quantizes a model with somebody else's quantizer, in a Python that has it: 4 bits, one group size, given tokens.

    PYTHON quantizers.py TOOL SOURCE TOKENS.json OUT GROUP      # TOKENS: a list of lists of token ids

TOOL: llm-compressor-gptq (symmetric), gptqmodel-gptq (symmetric), gptqmodel-awq (asymmetric), autoawq-awq (asymmetric;
for its time alone: on a CPU it writes broken weights).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

Texts = list[list[int]]


def llm_compressor_gptq(source: str, texts: Texts, out: str, group: int) -> None:
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # float32: on processors without bfloat16 arithmetic it takes a third of the time
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    data = Dataset.from_dict({"input_ids": texts, "attention_mask": [[1] * len(text) for text in texts]})
    longest = max(map(len, texts))
    recipe = GPTQModifier(config_groups=groups, ignore=["lm_head"])
    oneshot(model=model, recipe=recipe, dataset=data, max_seq_length=longest, num_calibration_samples=len(texts))
    model.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def gptqmodel(source: str, texts: Texts, out: str, config: Any) -> None:
    import torch
    from gptqmodel import GPTQModel
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    # as above; its packing rounds scales to float16 whatever they are, but would refuse float32
    AwqTorchLinear.SUPPORTS_DTYPES.append(torch.float32)
    model = GPTQModel.load(source, config, dtype=torch.float32)
    model.quantize([{"input_ids": text, "attention_mask": [1] * len(text)} for text in texts], batch_size=1)
    model.save(out)


def gptqmodel_gptq(source: str, texts: Texts, out: str, group: int) -> None:
    from gptqmodel.quantization import QuantizeConfig

    gptqmodel(source, texts, out, QuantizeConfig(bits=4, group_size=group, sym=True, desc_act=False, device="cpu"))


def gptqmodel_awq(source: str, texts: Texts, out: str, group: int) -> None:
    from gptqmodel.quantization import FORMAT, METHOD, QuantizeConfig

    config = QuantizeConfig(
        bits=4, group_size=group, sym=False, method=METHOD.AWQ, format=FORMAT.GEMM, device="cpu"
    )  # fmt: skip
    gptqmodel(source, texts, out, config)


def autoawq_awq(source: str, texts: Texts, out: str, group: int) -> None:
    import torch
    from awq import AutoAWQForCausalLM

    # float32, as above
    model = AutoAWQForCausalLM.from_pretrained(source, torch_dtype=torch.float32, device_map="cpu")
    config = {"zero_point": True, "q_group_size": group, "w_bit": 4, "version": "GEMM"}
    longest = max(map(len, texts))
    # no tokenizer: the calibration comes as ids
    model.quantize(
        None, config, calib_data=texts, max_calib_samples=len(texts), max_calib_seq_len=longest
    )  # fmt: skip
    model.save_quantized(out)


def main() -> None:
    tool, group = sys.argv[1], sys.argv[5]
    source, tokens, out = map(os.path.abspath, sys.argv[2:5])
    os.chdir(os.path.dirname(out))  # some leave logs where they run
    with open(tokens, encoding="utf-8") as file:
        texts = json.load(file)
    globals()[tool.replace("-", "_")](source, texts, out, int(group))


if __name__ == "__main__":
    main()
