"""What each figure of a bench report is, as a formula; they go into the report, since tools disagree on the names."""

from __future__ import annotations

DEFINITIONS: dict[str, str] = {
    "prefill.tokens_per_second": "prompt tokens / (arrival of the first token - submission); one request alone, random"
    " prompt, nothing cached; includes sampling one token. mean and sd (n - 1) over repetitions after a warm-up",
    "decode.tokens_per_second": "(tokens - 1) / (arrival of the last - arrival of the first token); one request alone,"
    " a prompt of one token, greedy, end of text ignored. mean and sd (n - 1) over repetitions after a warm-up",
    "serving": "closed loop: `concurrency` requests in flight, the next is sent when one ends; times are taken in this"
    " process where tokens arrive. mean, median, std (population), pNN (linear between ranks) over completed requests",
    "ttft": "arrival of the first token - submission",
    "tpot": "(arrival of the last - arrival of the first token) / (output tokens - 1); not of requests of one token",
    "itl": "time between successive tokens, all requests pooled; a delta of k tokens is k gaps of 1/k of its wait",
    "icl": "time between successive deltas, whatever they hold (vLLM's ITL)",
    "e2el": "arrival of the last token - submission",
    "duration": "first submission to last arrival, in seconds",
    "request_throughput": "completed / duration",
    "output_throughput": "output tokens of completed requests / duration: ramp-up and tail are in it",
    "total_token_throughput": "(prompt + output tokens of completed requests) / duration",
    "steady.output_throughput": "tokens that arrived while `concurrency` requests were in flight / its seconds",
    "concurrency_mean": "sum of e2el / duration (Little's law)",
    "failed": "requests that ended with an error, an abort, or another number of tokens than asked for",
    "token_source": "ids: tokens are counted as the ids that the engine emitted, never as pieces of text",
    "cached_token_share": "prompt tokens found in the prefix cache / prompt tokens admitted, over the timed part",
    "kv_utilisation": "sum over steps of tokens that live in the KV cache / sum over steps of the token slots held for"
    " them (largest KV group)",
    "preemptions": "times that a running sequence lost its blocks and was put back to be computed again",
    "busy_share": "seconds inside engine steps / duration",
    "ceilings.read_bytes_per_second": "best of 5: bytes of a large tensor / time to sum it; same process and threads",
    "ceilings.matmul_flops_per_second": "best of 5: 2 n^3 / time of an n x n matrix product in the compute dtype",
    "ceilings.prefill, ceilings.decode": "tokens / max(bytes of weights as computed with / read rate,"
    " 2 x parameters x tokens / matmul rate) for the whole prompt and for one token; attention and KV are not in it",
}
