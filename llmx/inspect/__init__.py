"""Where two runs of a model part: token, layer, op, tensor."""
