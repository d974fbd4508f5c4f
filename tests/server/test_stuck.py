"""Engines that hang, and engines and ranks that are killed: nobody waits long, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, OpenAI
from server.running import ENDLESS, eventually
from server.served import STREAM, Served, alive, children, connected, serving

FOREVER = {**STREAM, "max_tokens": ENDLESS}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
PROMISE = 5.0  # seconds in which streams tell that the engine is gone
AT_ONCE = 1.0


def everyone(served: Served) -> list[int]:
    """The engine's process, and further ranks if there are any."""
    return [served.engine, *children(served.engine)]


def first_chunks(client: OpenAI, count: int) -> list[Iterator[Any]]:
    streams = [iter(client.completions.create(model="tiny", stream=True, **FOREVER)) for _ in range(count)]
    for stream in streams:
        next(stream)
    return streams


def how_it_ended(stream: Iterator[Any]) -> tuple[str, float]:
    """The error event of a stream, and when it came."""
    try:
        for _ in stream:
            pass
    except APIError as error:
        return error.message, time.monotonic()
    return "no error", time.monotonic()


@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 0), (2, 1)], ids=["engine", "rank 0 of 2", "rank 1 of 2"])
def test_when_a_process_of_the_engine_is_killed_all_streams_say_so(patient: Path, ranks: int, victim: int) -> None:
    with serving(patient, "--tp", str(ranks)) as served, connected(served) as client:
        processes = everyone(served)
        assert len(processes) == ranks
        streams = first_chunks(client, 3)
        os.kill(processes[victim], signal.SIGSTOP)  # so that no stream is over before
        with ThreadPoolExecutor(3) as pool:
            endings = [pool.submit(how_it_ended, stream) for stream in streams]
            killed = time.monotonic()
            os.kill(processes[victim], signal.SIGKILL)
            for message, when in (ending.result() for ending in endings):
                assert "ended by signal 9" in message
                assert when - killed < PROMISE
        assert served.ended() == 1
        assert time.monotonic() - killed < 2 * PROMISE
        assert not [one for one in processes if alive(one)]
        assert "ended by signal 9" in served.said
        assert "Traceback" not in served.said


@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 1)], ids=["engine", "rank 1 of 2"])
def test_a_second_interrupt_ends_a_hung_engine_at_once(patient: Path, ranks: int, victim: int) -> None:
    with serving(patient, "--tp", str(ranks), "--drain-seconds", "600") as served, connected(served) as client:
        processes = everyone(served)
        stream = client.completions.create(model="tiny", stream=True, **FOREVER)
        os.kill(processes[victim], signal.SIGSTOP)
        served.process.send_signal(signal.SIGINT)
        assert eventually(lambda: "Stopping" in served.said)
        again = time.monotonic()
        served.process.send_signal(signal.SIGINT)
        served.process.wait()
        assert time.monotonic() - again < AT_ONCE
        assert served.ended() == 130
        assert eventually(lambda: not [one for one in processes if alive(one)])
        with pytest.raises(APIError):  # it was cut off
            list(stream)
        assert "Traceback" not in served.said


def test_a_hung_engine_does_not_hold_up_the_end_once_its_time_is_over(patient: Path) -> None:
    with serving(patient, "--drain-seconds", "0.5") as served, connected(served) as client:
        engine = served.engine
        stream = client.completions.create(model="tiny", stream=True, **FOREVER)
        os.kill(engine, signal.SIGSTOP)
        told = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        assert "shutting down" in how_it_ended(iter(stream))[0]
        assert served.ended() == 0
        assert time.monotonic() - told < PROMISE  # it was 6 s beyond the time to drain
        assert not alive(engine)


def test_if_the_server_is_killed_a_hung_engine_ends_with_it(patient: Path) -> None:
    with serving(patient, "--tp", "2") as served:
        processes = everyone(served)
        for one in processes:
            os.kill(one, signal.SIGSTOP)
        served.process.kill()
        assert eventually(lambda: not [one for one in processes if alive(one)])
