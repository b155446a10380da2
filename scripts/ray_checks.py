"""Two nodes on loopback, a replica on each, sessions that stream, and a replica that is killed midway.

`ray_checks.py [--model NAME]` prints what became of every request. It ends with 0 if all were answered or failed
cleanly, every session stayed on one replica, and only those of the killed one moved. Then a client leaves, and
a replica is killed while it reads a prompt. Needs the extras `serve`, `ray` and `dev`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import httpx2 as httpx

STORE = 100 << 20
"""Bytes of each node's object store: Ray's least is 75 MiB, and requests are small."""
DEADLINE = 300.0
LEAVING = 60.0
"""Seconds in which the engine must notice that a client has left."""
READING = 0.5
"""Seconds after which a replica is killed that reads a prompt; reading must take longer."""


@dataclass
class Turn:
    """One request."""

    session: str
    replica: str = ""
    end: str = ""
    """answered, failed (cleanly), or what was wrong."""
    why: str = ""
    cached: int = 0
    text: str = ""
    early: bool = True
    """Sent before the kill."""


@dataclass
class Run:
    """All of a run that its parts share."""

    url: str
    tokens: int
    turns: list[Turn] = field(default_factory=list)
    busy: dict[str, int] = field(default_factory=dict)
    """Streams that have begun, by replica."""
    killed: str = ""


@contextmanager
def two_nodes() -> Iterator[int]:
    """A cluster on loopback with Serve on it -> the port of its proxy."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "object_store_memory": STORE, "resources": {"engine": 1}}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield port
    finally:
        if ray.is_initialized():
            serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def replica_actor(name: str) -> Any:
    """The actor of the replica that calls itself `name`."""
    import ray

    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["name"].endswith(f"#Server#{name}"):
            return ray.get_actor(each["name"], namespace=each["namespace"])
    raise SystemExit(f"There is no replica {name}.")


def process_of(name: str) -> int:
    """The process id of a replica."""
    import ray

    found: int = ray.get(replica_actor(name).__ray_call__.remote(lambda _: os.getpid()))
    return found


async def turn(run: Run, client: httpx.AsyncClient, session: str, messages: list[dict[str, str]]) -> Turn:
    """Sends one turn and reads its stream."""
    made = Turn(session, early=not run.killed)
    body = {
        "messages": messages,
        "session_id": session,
        "max_tokens": run.tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = done = False
    try:
        async with client.stream("POST", f"{run.url}/v1/chat/completions", json=body) as got:
            made.replica = got.headers.get("x-coattn-replica", "")
            if got.status_code != 200:
                error = json.loads(await got.aread())["error"]
                made.why = f"{got.status_code} {error['code']}"
                made.end = "failed" if got.status_code == 503 else made.why
                return made
            async for line in got.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    made.end, made.why = "failed", f"in the stream: {event['error']['code']}"
                    continue
                if not begun:
                    begun = True
                    run.busy[made.replica] = run.busy.get(made.replica, 0) + 1
                for choice in event["choices"]:
                    made.text += choice["delta"].get("content") or ""
                    if choice["finish_reason"]:
                        made.end = "answered"
                if event.get("usage"):
                    made.cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        if not done:
            made.end = "cut off without an error"
    except (httpx.HTTPError, json.JSONDecodeError, KeyError) as error:
        made.end = f"{type(error).__name__}: {error}"
    finally:
        if begun:
            run.busy[made.replica] -= 1
    return made


async def talk(run: Run, client: httpx.AsyncClient, session: str, turns: int) -> None:
    """A session from beginning to end. A turn that failed is not part of it."""
    messages = [{"role": "system", "content": f"Be brief, {session}."}]
    for i in range(turns):
        asked = {"role": "user", "content": f"After {7 * i}?"}
        made = await turn(run, client, session, [*messages, asked])
        run.turns.append(made)
        if len(run.turns) % 10 == 0:
            print(f"{len(run.turns)} requests done", flush=True)
        if made.end == "answered":
            messages += [asked, {"role": "assistant", "content": made.text}]


async def strike(run: Run, after: int, count: int) -> None:
    """Kills a replica with a stream on it once so many requests are done."""
    while len(run.turns) < count:
        victims = [name for name, busy in run.busy.items() if busy]
        if len(run.turns) >= after and victims:
            victim = max(victims, key=lambda name: run.busy[name])
            process = await asyncio.to_thread(process_of, victim)
            if run.busy[victim]:
                os.kill(process, signal.SIGKILL)
                run.killed = victim
                return
        await asyncio.sleep(0.005)


async def go(run: Run, sessions: int, turns: int) -> None:
    """All sessions at once."""
    count = sessions * turns
    async with httpx.AsyncClient(timeout=DEADLINE, trust_env=False) as client:
        talks = [talk(run, client, f"session-{i}", turns) for i in range(sessions)]
        await asyncio.gather(strike(run, count * 2 // 5, count), *talks)


async def read_and_die(run: Run, prompt: str) -> list[str]:
    """Kills a replica while it reads a prompt, before any event -> what was wrong with the answer."""
    async with httpx.AsyncClient(timeout=DEADLINE, trust_env=False) as client:
        short, long = ([{"role": "user", "content": text}] for text in ("Hello.", prompt))
        home = (await turn(run, client, "reader", short)).replica
        process = await asyncio.to_thread(process_of, home)
        asked = asyncio.create_task(turn(run, client, "reader", long))
        await asyncio.sleep(READING)
        if asked.done() or run.busy.get(home):
            return ["the prompt was read before its replica could be killed"]
        os.kill(process, signal.SIGKILL)
        made = await asked
    print(f"killed {home} while it read a prompt: {made.end} by {made.replica}{made.why}")
    return [] if made.end == "answered" and made.replica != home else ["that prompt was not answered by another"]


async def leave(run: Run, tokens: int) -> list[str]:
    """Closes a stream after its first event -> what was wrong with what the engine did then."""
    body = {"prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(timeout=DEADLINE, trust_env=False) as client:
        async with client.stream("POST", f"{run.url}/v1/completions", json=body) as got:
            asked = {"x-coattn-replica": got.headers["x-coattn-replica"]}
            async for line in got.aiter_lines():
                if line.startswith("data: "):
                    break
        left = time.monotonic()
        while True:
            status = (await client.get(f"{run.url}/v1/coattn/status", headers=asked)).json()
            cancelled = status["live"]["counts"]["requests"].get("cancelled", 0)
            if not status["live"]["requests"] or time.monotonic() - left > LEAVING:
                break
            await asyncio.sleep(0.1)
    print(f"a client left: {cancelled} request cancelled, seen after {time.monotonic() - left:.1f} s")
    return [] if cancelled == 1 else ["the request of a client who left was not cancelled"]


def until_two() -> None:
    """Returns when both replicas are in service again."""
    from ray import serve

    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        states = serve.status().applications["coattn"].deployments["Server"].replica_states
        if {str(getattr(state, "value", state)): count for state, count in states.items()} == {"RUNNING": 2}:
            return
        time.sleep(0.5)
    raise SystemExit("The killed replica was not replaced.")


def judge(run: Run, count: int) -> list[str]:
    """Prints what happened -> what was wrong."""
    again = 0
    wrong = [] if len(run.turns) == count else [f"{len(run.turns)} of {count} requests came to an end"]
    print(f"{'session':<11} {'replicas':<24} answered  failed  hits")
    for session in sorted({each.session for each in run.turns}):
        mine = [each for each in run.turns if each.session == session]
        good = [each for each in mine if each.end == "answered"]
        path = [name for name, _ in groupby(each.replica for each in good)]
        hits, failed = sum(each.cached > 0 for each in good), sum(each.end == "failed" for each in mine)
        print(f"{session:<11} {' -> '.join(path):<24} {len(good):>8} {failed:>7} {hits:>5}")
        if len(path) > 1 and (len(path) > 2 or path[0] != run.killed):
            wrong.append(f"{session} moved: {' -> '.join(path)}")
        if len(good) > 2 and not hits:
            wrong.append(f"{session} never found what was stored")
        again += sum(each.early and path[0] == run.killed != each.replica for each in good)
    for each in run.turns:
        if each.end == "failed":
            print(f"failed cleanly: {each.session} on {each.replica or 'nobody'}, {each.why}")
        elif each.end != "answered":
            wrong.append(f"{each.session} on {each.replica}: {each.end}")
    ends = [each.end for each in run.turns]
    answered, failed = ends.count("answered"), ends.count("failed")
    print(
        f"{count} requests: {answered} answered, {failed} failed cleanly; killed {run.killed}; "
        f"{again} in flight on it were answered by another"
    )
    return wrong if run.killed else [*wrong, "no replica was killed"]


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", default="full")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--chunk", type=int, help="tokens of a prompt read in a step")
    parser.add_argument("--words", type=int, default=150, help="sentences of the long prompt")
    given = parser.parse_args()
    begin = time.monotonic()
    with two_nodes() as port:
        from ray import serve

        from coattn.serve.cluster.app import build

        options = {
            "model": given.model,
            "method": given.method,
            "dtype": "float32",
            "device": "cpu",
            "max_batch": 4,
            "max_length": given.max_length,
            "chunk": given.chunk,
            "replicas": 2,
            "replica": {
                "health_check_period_s": 1,
                "ray_actor_options": {
                    "num_cpus": 1,
                    "resources": {"engine": 1},
                    "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}},
                },
            },
        }
        print(f"two nodes after {time.monotonic() - begin:.1f} s", flush=True)
        serve.run(build(options), name="coattn")
        print(f"two replicas of {given.model} under {given.method} after {time.monotonic() - begin:.1f} s", flush=True)
        run = Run(f"http://127.0.0.1:{port}", given.tokens)
        asyncio.run(go(run, given.sessions, given.turns))
        wrong = judge(run, given.sessions * given.turns)
        until_two()
        print(f"two replicas again after {time.monotonic() - begin:.1f} s", flush=True)
        wrong += asyncio.run(leave(run, given.max_length - 16))
        wrong += asyncio.run(read_and_die(run, "The sea is wide. " * given.words))
    for each in wrong:
        print(f"wrong: {each}")
    print(f"{'ok' if not wrong else 'not ok'}, {time.monotonic() - begin:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
