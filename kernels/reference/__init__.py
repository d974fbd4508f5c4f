"""The torch version of each op: it defines the op, and works on whatever device its tensors are."""

KERNELS: dict[str, str] = {"linear": "linear:linear", "philox_uniform": "random:philox_uniform"}
