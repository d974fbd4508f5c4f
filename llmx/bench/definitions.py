"""What each figure of a bench report is, as a formula; they go into the report, since tools disagree on the names."""

from __future__ import annotations

DEFINITIONS: dict[str, str] = {
    "prefill.tokens_per_second": "prompt tokens / (arrival of the first token - submission); one request alone, random"
    " prompt, nothing cached; includes sampling one token. mean and sd (n - 1) over repetitions after a warm-up",
    "decode.tokens_per_second": "(tokens - 1) / (arrival of the last - arrival of the first token); one request alone,"
    " a prompt of one token, greedy, end of text ignored. mean and sd (n - 1) over repetitions after a warm-up",
    "serving": "closed loop: max_concurrency requests in flight, the next is sent when one ends. Open loop: each is due"
    " at a time fixed before the run. When something arrives, the clock is read first. mean, median, std (population),"
    " pNN (linear between ranks) over completed requests; with --repeat their means over whole runs",
    "contender": "continuous: this engine as it is. static: this engine, a batch begins at once with whatever waits, at"
    " most --static-batch, and the next when all of it has ended. transformers: the same with its generate, padded."
    " server: what is at the URL",
    "sweep": "by concurrency; `serving` is the last point",
    "sd": "over whole runs, of a sample (n - 1); unsteady: figures whose sd is over 5 % of their mean",
    "ttft": "arrival of the first delta with text or token ids - submission. In this process, with arrivals of their"
    " own, submission is when a request was due",
    "tpot": "(arrival of the last - arrival of the first token) / (output tokens - 1); not of requests of one token",
    "itl": "time between successive tokens, all requests pooled; a delta of k tokens is k gaps of 1/k of its wait. null"
    " where nobody tells how many tokens a delta holds",
    "icl": "time between successive deltas, whatever they hold (vLLM's ITL)",
    "e2el": "arrival of the last token - submission",
    "ttfb": "arrival of the first byte of the answer's body - submission",
    "client_queue_time": "submission - when the request was due: what --max-concurrency held back",
    "e2el_including_client_queue": "arrival of the last token - when the request was due",
    "adj_p99": 'the 99th percentile where each failed request took for ever: "inf" if a percent of them failed',
    "duration": "first submission, or the first due, to last arrival, in seconds",
    "request_throughput": "completed / duration",
    "request_goodput": "requests that kept all limits of --slo / duration; a failed one keeps none",
    "slo.attainment": "requests that kept all limits / requests that ended",
    "output_throughput": "output tokens of completed requests / duration: ramp-up and tail are in it",
    "total_token_throughput": "(prompt + output tokens of completed requests) / duration",
    "max_output_tokens_per_s": "most tokens in one of the whole seconds since the start",
    "max_concurrent_requests": "most requests in flight at once",
    "steady.output_throughput": "tokens that arrived in the window / its seconds. Closed loop: the time in which"
    " max_concurrency requests were in flight; open loop: the longest with at least 80 % of the most in flight",
    "rtfx": "seconds of audio sent / duration; vLLM's key, and here always 0: no audio is sent",
    "ramp_up_strategy": "with --ramp-up: the gap before the i-th of n requests is at the rate start + (end - start) i /"
    " (n - 1) (linear) or start (end / start)^(i / (n - 1)) (exponential); request_rate is then inf",
    "label, metadata": "as --label and --metadata give them; vLLM's files have them on top, under their own names",
    "ttfts, itls, ...": "with --save-detailed, of each request of the last round of `serving`, in seconds under vLLM's"
    " names; its itls are the times between deltas (icl here); start_times are of a clock of their own",
    "spec_decode_acceptance_rate": "accepted / drafted tokens, in percent; acceptance_length: 1 + accepted / drafts;"
    " per_position_acceptance_rates: accepted at each place of a draft / drafts; null where nothing is drafted",
    "concurrency_mean": "sum of e2el / duration (Little's law)",
    "failed": "requests that ended with an error or an abort, or in this process with another number of tokens than"
    " asked for; errors: why, the commonest first",
    "osl_mismatch": "completed requests whose number of tokens is not the one asked for (all that ends early by itself,"
    " where ignore_eos is false)",
    "token_source": "ids: tokens are counted as the ids that were emitted. usage_so_far: by the usage in each chunk."
    " usage: by that of the whole answer, and a chunk is one token where that makes the sum. retokenized: the server"
    " tells none, and the answer's text was tokenized here (--tokenizer); so are prompts' texts, of chats without what"
    " the template adds. Never as chunks",
    "retokenized_output_tokens": "tokens of the completed answers' texts, tokenized here: tokenizer_id",
    "retokenized_difference": "retokenized_output_tokens / those tokens as they were counted - 1",
    "token_count_mismatch": "requests whose usage tells another number of tokens than their ids",
    "cache_hit_rate": "prompt tokens found in the prefix cache (cached_tokens) / prompt tokens, over the timed part",
    "kv_utilisation": "sum over steps of tokens that live in the KV cache / sum over steps of the token slots held for"
    " them (largest KV group)",
    "kv_cache_usage": "share of KV blocks in use by the server's /metrics, once a second",
    "preemptions": "times that a running sequence lost its blocks and was put back to be computed again",
    "busy_share": "seconds inside engine steps / duration",
    "peak_memory_bytes": "most bytes resident since the start (VmHWM), of this process with the engine in it; of a"
    " server on this machine, of all its processes. peak_process_memory_bytes: of the largest of them",
    "client": "loop_lag: how late the client's event loop wakes up from 10 ms of sleep. dispatch_delay: a request's"
    " sending - when it was due. client_bound: the lag's p99 is over 10 % of the mean ITL, or the delay's over 10 ms",
    "comparison": "`serving` against each contender: 1 - ratio of their p99 of e2el, and ratio of output_throughput;"
    " medians over rounds, in which they take turns",
    "ceilings.read_bytes_per_second": "best of 5: bytes of a large tensor / time to sum it; same process and threads",
    "ceilings.matmul_flops_per_second": "best of 5: 2 n^3 / time of torch's n x n matrix product in"
    " matmul_dtype. Products with activations rounded to 8 bits can be faster, so a share may exceed 1",
    "ceilings.serving": "output tokens / max(steps x bytes of weights / read rate, 2 x parameters x tokens computed /"
    " matmul rate): as if each step read all weights once and did nothing else",
    "ceilings.prefill, ceilings.decode": "tokens / max(bytes of weights as computed with / read rate,"
    " 2 x parameters x tokens / matmul rate) for the whole prompt and for one token; attention and KV are not in it",
}
