"""Static batches of transformers' own generate, for comparison: same weights, same prompts and lengths, greedy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from llmx.bench.drive import Tell, Traffic
from llmx.bench.records import Record
from llmx.bench.workload import Job
from llmx.errors import UsageError


class Transformers:
    """A model in transformers. `dtype`: what it computes in, which goes into the report."""

    def __init__(self, model: str, dtype: str, device: str, batch: int) -> None:
        """UsageError where transformers isn't installed, or can't read the model."""
        try:
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise UsageError(
                "--baseline transformers needs the package transformers, which is not installed.",
                "pip install transformers accelerate",
            ) from None
        import torch

        from llmx.formats.hub import pull

        located = pull(model)
        gguf = {"gguf_file": located.path.name} if located.kind == "gguf" else {}
        folder = located.path.parent if gguf else located.path
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **gguf)
        except (ImportError, OSError, ValueError, KeyError) as error:
            raise UsageError(f"transformers can't load {model}: {str(error).splitlines()[0]}") from error
        self.model: Any = loaded.to(device).eval()
        self.dtype, self.batch = dtype, batch

    def serve(self, jobs: Sequence[Job], traffic: Traffic, records: list[Record], tell: Tell) -> None:
        """Batches one after the other, each at once with whatever waits; tokens count when their step has ended."""
        start, done = time.perf_counter(), 0
        for job, offset in zip(jobs, traffic.offsets or [None] * len(jobs), strict=True):
            due = None if offset is None else start + offset
            records.append(Record(job.input_len, job.output_len, start if due is None else due, due=due))
        most = self.batch if traffic.offsets is not None else min(self.batch, traffic.concurrency or self.batch)
        while done < len(jobs):
            time.sleep(max(0.0, records[done].sent - time.perf_counter()))
            now = time.perf_counter()
            waiting = [i for i in range(done, min(done + most, len(jobs))) if records[i].sent <= now]
            for i in waiting:
                if traffic.offsets is None:  # a closed loop sends when a place is free
                    records[i].sent = now
            self._generate([jobs[i] for i in waiting], [records[i] for i in waiting])
            done += len(waiting)
            tell(f"serving by transformers: {done} of {len(jobs)} requests done")

    def _generate(self, jobs: Sequence[Job], records: Sequence[Record]) -> None:
        """Padded on the left, until the longest output is done; what a request didn't ask for isn't counted."""
        import torch

        width, steps = max(job.input_len for job in jobs), max(job.output_len for job in jobs)
        ids = torch.zeros(len(jobs), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, width - job.input_len :] = torch.tensor(job.prompt)
            mask[row, width - job.input_len :] = 1

        def saw(made: int) -> None:
            now = time.perf_counter()
            for job, record in zip(jobs, records, strict=True):
                if made <= job.output_len:
                    record.arrivals.append((now, 1))
                    record.ended = made == job.output_len

        with torch.inference_mode():
            self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                do_sample=False,
                max_new_tokens=steps,
                min_new_tokens=steps,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=_steps(saw, width),
            )


def _steps(saw: Callable[[int], None], width: int) -> Any:
    """A criterion that never stops and tells how many tokens each row has by now."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Steps(StoppingCriteria):  # type: ignore[misc, unused-ignore]
        def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            saw(input_ids.shape[1] - width)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    return StoppingCriteriaList([Steps()])
