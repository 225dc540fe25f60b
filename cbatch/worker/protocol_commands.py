"""What a client says to a worker: its first line, and commands. Those of `runtime/interface.py` are made from it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, TypeAlias, cast

from msgspec import Meta, Struct, defstruct

from cbatch.embedding import TextSettings  # msgspec reads the annotation
from cbatch.messages import BatchPrompt
from cbatch.options import RunOptions
from cbatch.response import FinishReason, TokenLogprob, Usage
from cbatch.runtime.crossings import Crossing, crossings_of
from cbatch.runtime.interface import Count, Id, Orders, Questions, TokenId
from cbatch.support.checks import MAX_INT, MAX_TIME_S
from cbatch.worker.wire import Frames, WireItem, encode_call, told_options

Options: TypeAlias = "dict[str, Any] | None"
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_TIME_S)]


class LookedAhead(Struct, forbid_unknown_fields=True):
    """Prompts that will come, each with its options; `is_all`: no others will."""

    prompts: list[tuple[WireItem, dict[str, Any]]]
    is_all: bool = False


class LoadCommand(Struct, forbid_unknown_fields=True, kw_only=True):
    """The model of a worker that has none yet."""

    model: str | None = None
    settings: dict[str, Any] = {}
    look_ahead: LookedAhead | None = None
    cores: list[int] | None = None
    n_sharing: Count = 1
    text: str | None = None
    """JSON of all others, where names of files are not UTF-8."""


class Hello(Struct, forbid_unknown_fields=True, kw_only=True):
    """A client's first line."""

    cbatch: int
    frames: Frames = "lines"
    credit: Count | None = None
    """Bytes that the client takes before it grants more; None for any number."""
    parts: bool = False
    """Whether the client takes the log-probabilities of a large result in parts, in frames before it."""
    log_level: Annotated[int, Meta(ge=0, le=100)] = logging.WARNING
    load: LoadCommand | None = None


class ProtocolCommand(
    Struct, tag_field="op", forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """A command; with `n` it is answered by a reply with that number."""

    n: int | str | None = None


MAX_JOB = 2**40
"""Numbers of jobs are below it. Our choice."""


class RunCommand(ProtocolCommand, tag="run"):
    """The ids; all items are queued, or none."""

    items: Annotated[list[WireItem], Meta(min_length=1, description="prompts")]
    options: Options = None
    stream: Annotated[bool, Meta(description="chunks as they come")] = False
    by_token: Annotated[
        bool, Meta(description="a chunk for each token, even if it has no text yet")
    ] = False
    seconds: Annotated[Seconds | None, Meta(description="time limit of all items")] = None
    age_s: Annotated[Seconds, Meta(description="seconds since the items were submitted")] = 0.0
    fed: Annotated[
        bool, Meta(description='wait for room in the queue even with `when_full="reject"`')
    ] = False
    may_wait: Annotated[
        bool,
        Meta(
            description="if false, the reply comes at once and the items wait for room in the queue"
        ),
    ] = True
    paused: Annotated[bool, Meta(description="compute nothing until they are resumed")] = False
    checked: Annotated[
        bool, Meta(description="refuse a prompt that cannot run at once, not when its turn comes")
    ] = False
    part: Annotated[
        bool,
        Meta(description="the items are a part of a call's: one with wrong options fails alone"),
    ] = False
    job: Annotated[
        int,
        Meta(
            ge=0,
            lt=MAX_JOB,
            description="draft tokens may come from answers with the same number, too; 0: none",
        ),
    ] = 0

    texts: Annotated[
        TextSettings | None,
        Meta(
            description="embed the items, or score them as documents; a result's `embedding` is float32 numbers, in "
            "JSON as base64"
        ),
    ] = None


class HeardTop(Struct):
    """The log-probability of one of the likeliest tokens as it came; in JSON, NaN and infinity are null."""

    token_id: int
    data: bytes
    logprob: float | None

    def made(self) -> TokenLogprob:
        """Return the log-probability."""
        number = float("nan") if self.logprob is None else self.logprob
        return TokenLogprob(self.token_id, self.data, number)


class HeardToken(HeardTop):
    """The log-probability of a token as it came, with the likeliest at its place."""

    top: list[HeardTop] = []

    def made(self) -> TokenLogprob:
        """Return the log-probability."""
        made = super().made()
        return TokenLogprob(made.token_id, made.data, made.logprob, made_tokens(self.top) or ())


def made_tokens(found: Sequence[HeardTop | None] | None) -> tuple[Any, ...] | None:
    """Return log-probabilities that came; None stays None."""
    return None if found is None else tuple(token and token.made() for token in found)


class HeardResult(Struct):
    """The fields of a result that going on needs, as it came."""

    finish_reason: FinishReason
    usage: Usage
    seed: Annotated[int, Meta(ge=0)]
    token_ids: list[TokenId] = []
    logprobs: list[HeardToken] | None = None
    prompt_logprobs: list[HeardToken | None] | None = None
    origin: Annotated[int, Meta(ge=-1)] | None = None


class Extend(ProtocolCommand, tag="extend"):
    """The id; a request that continues a result is queued."""

    prompt: WireItem
    result: Annotated[HeardResult, Meta(description="as it came")]
    n_tokens: Count
    options: Options = None
    stream: bool = False
    by_token: bool = False
    paused: bool = False


class Stream(ProtocolCommand, tag="stream"):
    """Nothing; chunks of these requests come from now on."""

    ids: list[Id]


class CancelCommand(ProtocolCommand, tag="cancel"):
    """How many were in flight."""

    ids: list[Id]
    waiting: Annotated[bool, Meta(description="only those that never had a slot")] = False


class TakeBack(ProtocolCommand, tag="take_back"):
    """The ids that never had a slot; they are as if they had not been asked, and have no result."""

    ids: list[Id]


class RecordSteps(ProtocolCommand, tag="record_steps"):
    """Nothing; records come among `steps`."""

    on: bool


class Credit(ProtocolCommand, tag="credit"):
    """Nothing; so many more bytes may be written."""

    bytes: Annotated[int, Meta(ge=1, le=MAX_INT)]


class Close(ProtocolCommand, tag="close"):
    """Nothing, last: requests are cancelled, their results come before it."""


class Abort(ProtocolCommand, tag="abort"):
    """Nothing: the process ends, where that is allowed for tests."""


class Crossed(ProtocolCommand):
    """A call of a method that is declared in `runtime/interface.py`, with its arguments as fields."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Crossed:
        """Return the call with these arguments."""
        told: dict[str, Any] = {name: _told(value) for name, value in arguments.items()}
        return cls(**told)


def _told(value: object) -> object:
    """Return an argument as it is sent."""
    if isinstance(value, RunOptions):
        return told_options(value)
    return WireItem.of(value, value.id or "") if isinstance(value, BatchPrompt) else value


_KINDS: dict[Any, Any] = {BatchPrompt: WireItem, RunOptions: Options}
"""The types of prompts and options as they are sent."""


def _command_of(crossing: Crossing) -> type[Crossed]:
    fields: list[Any] = []
    for name, (kind, default) in crossing.parameters.items():
        default = None if kind is RunOptions else default
        own = () if default is inspect.Parameter.empty else (default,)
        fields.append((name, _KINDS.get(kind, kind), *own))
    more = {"__doc__": crossing.summary}
    found = defstruct(
        crossing.op, fields, bases=(Crossed,), tag=crossing.op, namespace=more, kw_only=True
    )
    return cast("type[Crossed]", found)


CROSSINGS = {_command_of(c): c for c in (*crossings_of(Orders), *crossings_of(Questions))}
"""The methods that may be called over the border, by their commands."""

ORDERS = frozenset(crossings_of(Orders))
"""Those of `Orders`; the others are of `Questions`."""

ASIDES = frozenset(c for c in crossings_of(Questions) if c.op != "cancel_all")
"""Those that change no request: their answers may come between the parts of a result."""

COMMAND_OF = {crossing: kind for kind, crossing in CROSSINGS.items()}

_KINDS_OF_COMMANDS: Sequence[type[ProtocolCommand]] = (
    *(RunCommand, Extend, Stream, CancelCommand, TakeBack, RecordSteps),
    *CROSSINGS,
    *(Credit, Close),
)

COMMANDS = {str(kind.__struct_config__.tag): kind for kind in _KINDS_OF_COMMANDS}
"""Every command of the protocol."""

COMMAND: Any = reduce(or_, COMMANDS.values())
ANY_COMMAND: Any = COMMAND | Abort
"""The type of a command; and where tests may end the process."""


def command_of(method: Any, *arguments: object) -> ProtocolCommand:
    """Return the command for a call of a method of `Orders` or `Questions`."""
    crossing = method.crossing
    return COMMAND_OF[crossing].of(crossing.arguments(*arguments))


def resume_of(id: str, n_tokens: int | None) -> ProtocolCommand:
    """Return the command to resume a request."""
    return command_of(Orders.resume, id, n_tokens)


def first_line(hello: Hello) -> bytes:
    """Return a client's first line, with its end. Raises as `encode_call`."""
    return encode_call(hello, "lines") + b"\n"
