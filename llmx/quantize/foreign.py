"""Runs AutoAWQ or AutoGPTQ in a Python environment of its own: `python foreign.py JOB.json`. No part of llmx.

JOB.json: backend, model (a folder), out (a folder to be made), texts (lists of token ids), bits, group, symmetric,
damp, dtype, longest (tokens of a text). Token ids, so that no tokenizer of another version is read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def autoawq(job: dict[str, Any]) -> None:
    from awq import AutoAWQForCausalLM

    model = AutoAWQForCausalLM.from_pretrained(job["model"], safetensors=True, use_cache=False)
    config = {
        "zero_point": not job["symmetric"], "q_group_size": job["group"], "w_bit": job["bits"], "version": "GEMM",
    }  # fmt: skip
    model.quantize(
        None,
        quant_config=config,
        calib_data=job["texts"],
        max_calib_samples=len(job["texts"]),
        max_calib_seq_len=job["longest"],
    )
    model.save_quantized(job["out"])


def auto_gptq(job: dict[str, Any]) -> None:
    import torch
    from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig

    config = BaseQuantizeConfig(
        bits=job["bits"], group_size=job["group"], damp_percent=job["damp"], desc_act=False, sym=job["symmetric"]
    )
    model = AutoGPTQForCausalLM.from_pretrained(job["model"], config, torch_dtype=getattr(torch, job["dtype"]))
    model.quantize([{"input_ids": text, "attention_mask": [1] * len(text)} for text in job["texts"]])
    model.save_quantized(job["out"])


BACKENDS = {"autoawq": autoawq, "auto-gptq": auto_gptq}

if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    BACKENDS[job["backend"]](job)
