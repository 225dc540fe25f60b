"""The sides of a comparison as its parent sees them: processes that it starts, and servers."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import IO, TYPE_CHECKING, Any, Protocol

from cbatch.bench.measured import Chains, MeasuredAnswer, WorkRequest
from cbatch.bench.openai_client import MOST_BOS, Address, OpenAIClient, ServerProblemError
from cbatch.bench.pacing import Now, Pace, drive
from cbatch.bench.server_process import cpu_s_of, rss_mib, served
from cbatch.bench.vector_process import all_answered
from cbatch.errors import CBatchError, ConfigError
from cbatch.support.interrupts import run_async
from cbatch.support.prefix_index import n_common
from cbatch.support.processes import command_of, environment
from cbatch.support.taken_cores import my_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from cbatch.bench.text_work import TextCall
    from cbatch.bench.vector_process import Rows
    from cbatch.engine_options import EngineOptions

PATIENCE_S = 120.0
"""Seconds in which a server must be up. Our choice."""

KINDS: Mapping[str, str] = {
    "engine": "cbatch as a library, answers streamed",
    "one": "cbatch with one slot: one request after another",
    "static": "cbatch with static batches: each begins when the one before it has ended",
    "llama": "llama_cpp.Llama, one request after another",
    "serve": "cbatch serve, over HTTP",
    "bare": "a hand-written loop of llama_decode that samples nothing",
}
"""Sides by name, with one line about each; servers of others come with --llama-server and --against."""

ONE_BY_ONE = ("one", "llama")
"""Sides that answer one request after another, whatever comes at once."""


VECTOR_KINDS = ("engine", "serve", "llama")
"""Sides that embed; `llama` is `Llama.embed`, which does not rerank."""


class SideError(CBatchError):
    """A side of a comparison cannot be measured; the others go on."""


class Startable(Protocol):
    """What may be started again and again."""

    def start(self) -> None:
        """Get ready; where it is ready, do nothing. Raises `SideError`."""

    def close(self) -> None:
        """End; `start` starts it anew."""


class RoundRunner(Startable, Protocol):
    """What answers the requests of a round."""

    def run(
        self, chains: Chains, pace: Pace, n_rows: int, *, is_streamed: bool
    ) -> tuple[list[MeasuredAnswer], float]:
        """Answer all requests; return the answers, and the seconds until the last. Raises `SideError`."""


class MeasuredSide(Startable, Protocol):
    """What is measured."""

    name: str

    @property
    def memory_mib(self) -> float | None:
        """The memory that its processes have of their own; None where nobody can know."""


class Side(MeasuredSide, RoundRunner, Protocol):
    """What answers the requests of a round, and is measured."""

    is_remote: bool
    """Whether it is a server that was there before, so that it cannot be started anew."""


class VectorSide(MeasuredSide, Protocol):
    """What answers the calls of a round, for embeddings or scores."""

    def answer(self, calls: Sequence[TextCall], n_clients: int) -> VectorRound:
        """Answer all calls, so many at once. Raises `SideError`."""

    def rows(self, call: TextCall) -> Rows:
        """Return what one call gives. Raises `SideError`."""


@dataclass(frozen=True, slots=True)
class VectorRound:
    """The time of a round: by the clock, and of all cores where the processes are known."""

    seconds: float
    cpu_s: float | None


class ProcessSide:
    """A side of `cbatch.bench.side_process`."""

    is_remote = False

    def __init__(self, kind: str, model: str, settings: Mapping[str, Any]) -> None:
        self.name = kind
        self._spec = {"kind": kind, "model": model, "settings": dict(settings)}
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str]
        self.cpu_s = 0.0
        """CPU seconds of the process in the last `run`."""

    def start(self) -> None:
        """Start the process and load the model."""
        if self._process is not None:
            return
        command = command_of("cbatch.bench.side_process")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # `close` closes it
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment(),
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which reports what was measured
        )
        try:
            self.do(self._spec)
        except BaseException:
            self.close()
            raise

    def do(self, job: Mapping[str, Any]) -> Any:
        """Send one line and return what comes back."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise SideError(f"{self.name}: was not started")
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise SideError(f"{self.name}: its process ended{self._last_words(process)}")
        found = json.loads(line)
        if "error" in found:
            raise SideError(f"{self.name}: {found['error']}")
        return found

    def _last_words(self, process: subprocess.Popen[str]) -> str:
        code = process.wait()
        self._log.seek(0)
        said = self._log.read().strip().splitlines()
        how = f" by signal {-code}" if code < 0 else f" with exit code {code}"
        return f"{how}: {said[-1]}" if said else how

    def run(
        self, chains: Chains, pace: Pace, n_rows: int, *, is_streamed: bool
    ) -> tuple[list[MeasuredAnswer], float]:
        """Send the job, and return its answers."""
        self.start()
        found = self.do(
            {
                "chains": [[asdict(request) for request in chain] for chain in chains],
                "n_clients": pace.n_clients,
                "arrivals_s": pace.arrivals_s,
                "n_rows": n_rows,
                "is_streamed": is_streamed,
            }
        )
        self.cpu_s = float(found["cpu_s"])
        answers = [_answer_of(answer) for answer in found["answers"]]
        return answers, float(found["seconds"])

    def answer(self, calls: Sequence[TextCall], n_clients: int) -> VectorRound:
        """Send calls for embeddings or scores, and return their time."""
        self.start()
        found = self.do({"calls": [*map(asdict, calls)], "n_clients": n_clients})
        return VectorRound(float(found["seconds"]), float(found["cpu_s"]))

    def rows(self, call: TextCall) -> Rows:
        """Return what one call gives."""
        self.start()
        found: Rows = self.do({"call": asdict(call)})["rows"]
        return found

    @property
    def memory_mib(self) -> float | None:
        """The memory of the process."""
        return None if self._process is None else _memory(self._process.pid)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
            self._log.close()


def _answer_of(data: Mapping[str, Any]) -> MeasuredAnswer:
    lists = {name: tuple(data[name]) for name in ("gaps_s", "tokens")}
    return MeasuredAnswer(**{**data, **lists})


def _memory(pid: int) -> float | None:
    with suppress(OSError):
        return rss_mib(pid)
    return None


class BareSide(ProcessSide):
    """Loops of `llama_decode` alone, in a process."""

    def decode_tps(self, n_rows: int, n_steps: int) -> float:
        """Return the tokens that so many rows decode in a second."""
        return self._tps(n_rows, n_steps, is_prefill=False)

    def prompt_tps(self, n_rows: int) -> float:
        """Return the prompt tokens that are computed in a second, in chunks over so many rows."""
        return self._tps(n_rows, 0, is_prefill=True)

    def _tps(self, n_rows: int, n_steps: int, *, is_prefill: bool) -> float:
        self.start()
        found = self.do({"n_rows": n_rows, "n_steps": n_steps, "is_prefill": is_prefill})
        return float(found["n_tokens"] / found["seconds"])


@dataclass(frozen=True, slots=True)
class Started:
    """A server that runs: its address, and its processes where they are known."""

    url: str
    pids: Callable[[], Sequence[int]]


class HttpSide:
    """A server that speaks OpenAI's completions."""

    def __init__(
        self,
        name: str,
        start: Callable[[], AbstractContextManager[Started]],
        client: Callable[[Address], OpenAIClient],
        *,
        is_remote: bool = False,
    ) -> None:
        self.name, self.is_remote = name, is_remote
        self._start, self._make = start, client
        self._client: OpenAIClient | None = None
        self._stack = ExitStack()
        self.pids: Callable[[], Sequence[int]] = tuple
        """The ids of its processes, where they are known."""

    def start(self) -> None:
        """Start the server, or look whether it is there."""
        if self._client is not None:
            return
        try:
            started = self._stack.enter_context(self._start())
            client = self._make(Address.of(started.url))
            run_async(client.find_model())
        except (CBatchError, OSError) as error:
            self.close()
            raise SideError(f"{self.name}: {error}") from None
        except BaseException:
            self.close()
            raise
        self._client, self.pids = client, started.pids

    def check(self, probes: Sequence[WorkRequest], expected: Sequence[str]) -> list[str]:
        """Return notes on the server, after probes that it must answer as the model does.

        Raises:
            SideError: it answers none of them, or has another model.
        """
        self.start()
        client = self.client
        answers = run_async(_probe(client, probes))
        for probe, answer in zip(probes, answers, strict=True):
            if answer.error:
                raise SideError(f"{self.name}: {answer.error}")
            n_theirs = answer.n_prompt
            if n_theirs is not None and abs(n_theirs - probe.n_prompt) > MOST_BOS:
                raise SideError(
                    f"{self.name}: counts {n_theirs} tokens in a prompt that has {probe.n_prompt}: it has another model"
                )
        pairs = [(ours, a.text) for ours, a in zip(expected, answers, strict=True) if ours]
        if pairs and not any(map(_is_alike, pairs)):
            raise SideError(
                f"{self.name}: answers all {len(pairs)} test prompts differently: it has another model"
            )
        notes = [] if client.has_extras else ["it refuses ignore_eos, top_k and min_p"]
        if any(answer.n_prompt is None for answer in answers):
            notes.append("it reports no usage, so tokens are counted in its text")
        return notes

    def run(
        self, chains: Chains, pace: Pace, n_rows: int, *, is_streamed: bool
    ) -> tuple[list[MeasuredAnswer], float]:
        """Send all requests."""
        self.start()
        client = self.client

        async def ask(request: WorkRequest, sent_s: float, now: Now) -> MeasuredAnswer:
            return await client.ask(request, sent_s, now, is_streamed=is_streamed)

        answers, seconds = run_async(drive(chains, pace, ask))
        return [*map(client.counted, answers)], seconds

    def answer(self, calls: Sequence[TextCall], n_clients: int) -> VectorRound:
        """Send calls for embeddings or scores, and return their time."""
        self.start()
        before = [cpu_s_of(pid) for pid in self.pids()]
        seconds = run_async(all_answered(calls, n_clients, self._rows))
        cpu_s = sum(cpu_s_of(pid) for pid in self.pids()) - sum(before) if before else None
        return VectorRound(seconds, cpu_s)

    def rows(self, call: TextCall) -> Rows:
        """Return what one call gives."""
        self.start()
        return run_async(self._rows(call))

    async def _rows(self, call: TextCall) -> Rows:
        try:
            return await self.client.rows(call)
        except (ServerProblemError, OSError, EOFError, ValueError) as error:
            raise SideError(f"{self.name}: {error}") from None

    @property
    def client(self) -> OpenAIClient:
        """What asks the server, once it is started."""
        assert self._client is not None
        return self._client

    @property
    def draws_as_asked(self) -> bool:
        """Whether the server takes the options by which tokens are drawn."""
        return self._client is not None and self._client.has_extras

    @property
    def memory_mib(self) -> float | None:
        """The memory of the processes that are ours."""
        found = [_memory(pid) for pid in self.pids()] if self._client is not None else []
        return sum(n for n in found if n is not None) if found else None

    def close(self) -> None:
        """End the server if it is ours."""
        self._client, self.pids = None, tuple
        self._stack.close()
        self._stack = ExitStack()


async def _probe(client: OpenAIClient, probes: Sequence[WorkRequest]) -> list[MeasuredAnswer]:
    start = time.perf_counter()
    return [await client.try_out(probe, lambda: time.perf_counter() - start) for probe in probes]


def _is_alike(texts: tuple[str, str]) -> bool:
    """Whether half of two answers is the same: kernels may round the rest apart."""
    n_same = n_common(*texts)
    return n_same > 0 and 2 * n_same >= min(map(len, texts))


# ---- servers ----


@contextmanager
def there_already(url: str) -> Iterator[Started]:
    """Give a server that somebody else runs."""
    yield Started(url, tuple)


@contextmanager
def cbatch_server(model: str, arguments: Sequence[str]) -> Iterator[Started]:
    """Run `cbatch serve` for the block."""
    with served(model, *arguments) as server:
        yield Started(f"http://127.0.0.1:{server.port}/v1", lambda: [server.pid, *server.workers])


@contextmanager
def llama_server(
    program: str, model: str, options: EngineOptions, more: Sequence[str] = ()
) -> Iterator[Started]:
    """Run llama-server for the block, with the same slots, memory and threads, and `more` arguments.

    Raises:
        SideError: it cannot be started.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [program, "-m", model, *llama_server_arguments(options), *more]
    command += ["--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        except OSError as error:
            raise SideError(f"{program}: cannot be started: {error.strerror}") from None
        try:
            _await_health(port, process, log)
            yield Started(f"http://127.0.0.1:{port}/v1", lambda: [process.pid])
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def llama_server_arguments(options: EngineOptions) -> list[str]:
    """Return the arguments by which llama-server has an engine's slots, memory and threads."""
    n_threads = options.n_threads or len(my_cores())
    n_slots, n_window = options.parallel or 1, options.ctx_per_seq or 0
    words = ["-np", str(n_slots), "-c", str(n_slots * n_window)]
    words += ["-kvu"] if options.kv == "unified" else ["-no-kvu"]
    words += ["-t", str(n_threads), "-tb", str(n_threads), "--no-webui"]
    given = {
        "-ctk": options.cache_type_k,
        "-ctv": options.cache_type_v,
        "-fa": options.flash_attn,
        "-ngl": options.n_gpu_layers,
    }
    for name, value in given.items():
        if value not in (None, "auto"):
            words += [name, str(value)]
    return words


def _await_health(port: int, process: subprocess.Popen[bytes], log: Any) -> None:
    address = replace(Address.of(f"http://127.0.0.1:{port}"), path="")
    client = OpenAIClient(address, lambda text: ())
    end_s = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < end_s:
        with suppress(ServerProblemError, OSError, EOFError):  # it does not listen yet
            if run_async(client.is_healthy()):
                return
        time.sleep(0.05)
    log.seek(0)
    said = log.read().strip().splitlines()
    raise SideError(f"llama-server did not start: {said[-1] if said else process.args!r}")


def check_kinds(names: Sequence[str], known: Collection[str] = KINDS) -> None:
    """Raise a `ConfigError` for an unknown side."""
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown side {name!r}; known are {', '.join(known)}")
