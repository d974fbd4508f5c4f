"""The torch version of each op: it defines the op, and works on whatever device its tensors are."""

KERNELS: dict[str, str] = {
    "add_scaled": "rows:add_scaled",
    "add_rms_norm": "norm:add_rms_norm",
    "attention": "attention:attention",
    "gelu_mul": "activation:gelu_mul",
    "gelu_tanh_mul": "activation:gelu_tanh_mul",
    "join_columns": "rows:join_columns",
    "linear": "linear:linear",
    "norm_heads": "norm:norm_heads",
    "philox_uniform": "random:philox_uniform",
    "plan_attention": "attention:plan_attention",
    "quantize_blocks": "arrays:quantize_blocks",
    "rms_norm": "norm:rms_norm",
    "round_rows": "linear:round_rows",
    "rope_and_write": "rope:rope_and_write",
    "silu_mul": "activation:silu_mul",
    "take_rows": "rows:take_rows",
    "to_float32": "rows:to_float32",
    "widen_halves": "arrays:widen_halves",
}
