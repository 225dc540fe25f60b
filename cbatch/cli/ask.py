"""`cbatch ask`: one answer, streamed, or a conversation."""

import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

import cbatch
from cbatch.cli.main import ExitCode, write
from cbatch.cli.option_table import Given, name_of, option, takes
from cbatch.cli.terminal import busy, say
from cbatch.files.places import stdin
from cbatch.support.checks import check_whole

_MAX_SLOTS = 16  # for several answers at once: as many as other commands have


@takes(
    *("model", "ctx_per_seq", "cache_type_k", "cache_type_v", "flash_attn", "memory_mib"),
    *("threads", "gpu_layers", "llama_library", "adapter", "mmproj", "chat_template"),
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos"),
    *("choice", "choice_probs", "set", "chat_template_kwargs"),
)
def ask(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The question; - reads stdin.")
    ] = None,
    *,
    interactive: Annotated[
        bool, option("--interactive", "-i", help="Hold a conversation; an empty line ends it.")
    ] = False,
    system: Annotated[str | None, option(help="System message.", default="nothing")] = None,
    image: Annotated[
        list[Path] | None,
        option(help="A picture to put before the question; may be repeated.", default="none"),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        option(help="A sound to put before the question; may be repeated.", default="none"),
    ] = None,
    given: Given,
) -> None:
    """Answer one question as a chat; the answer goes to stdout as it comes.

    Without an argument, the question is read from stdin. With several answers
    (--set n=3), the first is streamed and the others follow. Warnings and
    log-probabilities (--set logprobs=3) go to stderr. Ctrl-C ends the command;
    with -i it ends only the answer, which stays in the conversation.

    Example: cbatch ask "Why is the sky blue?" -m model.gguf --max-tokens 64
    """
    options = given.run_options()
    settings = {"parallel": min(options.n_sequences, _MAX_SLOTS), **given.engine_settings()}
    if system is not None:
        check_whole("system", system)
    question = "" if interactive and prompt is None else _first_question(prompt)
    with _open(given["model"], options, settings) as engine:
        pictures = [{"type": "image", "image": path} for path in image or []]
        sounds = [{"type": "audio", "audio": path} for path in audio or []]
        conversation = Conversation(engine, system, shown=[*pictures, *sounds])
        try:
            if interactive:
                n_failed = _converse(conversation, question, forget_interrupt=ctx.obj.forget)
            else:
                n_failed = _show(conversation, question)
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None
    if n_failed:
        raise typer.Exit(ExitCode.SOME_FAILED)


_NO_LONGER = ", and the model was not trained for longer texts"


class Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(
        self,
        engine: cbatch.Engine,
        system: str | None = None,
        shown: Sequence[Mapping[str, object]] = (),
    ) -> None:
        self._engine, self._shown = engine, shown
        self.n_answers = engine.options.n or 1
        self.has_template = bool(engine.model_facts.chat_template)
        n_trained = engine.model_facts.n_ctx_train
        self.can_grow = not n_trained or engine.n_window < n_trained
        """Whether the model was trained for longer texts than a slot holds."""
        self.result: cbatch.BatchResult | None = None
        """Of the last question; None where it failed or was left."""
        self.others: list[str] = []
        """The texts of its other answers."""
        self.messages: list[Mapping[str, Any]] = []
        if system is not None:
            self._add("system", system)

    def answer(self, question: str) -> Generator[str, None, None]:
        """Yield the first answer as it comes, thinking included, which does not stay in the conversation.

        A partial answer stays; a question without one does not. `result` and `others` have the rest at the end.

        Raises:
            RequestError: the question cannot be answered.
        """
        parts: list[str] = []
        others = [""] * (self.n_answers - 1)
        self.result, self.others = None, others
        self._add("user", self._with_media(question))
        try:
            response = self._engine.submit(self.messages)
            with closing(iter(response)) as chunks:
                for chunk in chunks:
                    if chunk.index:
                        others[chunk.index - 1] += chunk.text
                        continue
                    parts.append(chunk.content)
                    if chunk.text:
                        yield chunk.text
            self.result = response.result()
        finally:
            self._keep("".join(parts))

    def _with_media(self, question: str) -> object:
        """Return what the user says: the first question has the pictures and sounds before it."""
        if not self._shown or any(message["role"] == "user" for message in self.messages):
            return question
        return [*self._shown, {"type": "text", "text": question}]

    def _keep(self, text: str) -> None:
        if text:
            self._add("assistant", text)
        else:
            self.messages.pop()

    def _add(self, role: str, content: object) -> None:
        self.messages.append({"role": role, "content": content})


def _open(
    model: Path | None, options: cbatch.RunOptions, settings: Mapping[str, Any]
) -> cbatch.Engine:
    with busy(f"loading {name_of(model)}"):
        return cbatch.load(model, options=options, **settings)


def _converse(
    conversation: Conversation, question: str, *, forget_interrupt: Callable[[], object]
) -> int:
    """Answer questions until there are no more; return how many failed."""
    n_failed = 0
    if stdin().isatty():
        say("cbatch: type an empty line to end the conversation")
    question = question or _next_question()
    while question:
        with suppress(KeyboardInterrupt):
            n_failed += _show(conversation, question)
        forget_interrupt()
        question = _next_question()
    return n_failed


def _show(conversation: Conversation, question: str) -> int:
    """Write an answer to stdout as it comes, or an error to stderr; return how many failed."""
    try:
        _stream(conversation, question)
    except cbatch.RequestError as error:
        say(f"cbatch: {_advice(error, conversation)}")
        return 1
    if conversation.result is not None:
        _tell(conversation.result, conversation)
    return 0


def _tell(result: cbatch.BatchResult, conversation: Conversation) -> None:
    """Print the log-probabilities and warnings of an answer on stderr."""
    for number, choice in enumerate(result.choices or (result,), 1):
        if choice.logprobs is not None:
            name = f"answer {number}, " if result.choices else ""
            say(f"{name}log-probability {sum(t.logprob for t in choice.logprobs):.4f}")
        for token in choice.logprobs or ():
            rest = "  ".join(f"{_quoted(t)} {t.logprob:.4f}" for t in token.top)
            say(f"{token.logprob:9.4f}  {_quoted(token)}{'   of ' if rest else ''}{rest}")
    for text, probability in (result.choice_probs or {}).items():
        say(f"{probability:9.4f}  {json.dumps(text, ensure_ascii=False)}")
    for warning in dict.fromkeys(w for r in (result, *result.choices) for w in r.warnings):
        say(f"cbatch: warning: {warning}")
    if any(choice.finish_reason == "window" for choice in result.choices or (result,)):
        more = ": raise --ctx-per-seq" if conversation.can_grow else _NO_LONGER
        say(f"cbatch: the answer ends here because the slot is full{more}")


def _quoted(token: cbatch.TokenLogprob) -> str:
    return json.dumps(token.text, ensure_ascii=False)


def _stream(conversation: Conversation, question: str) -> None:
    end = ""
    if conversation.n_answers > 1:
        write("[1]\n")
    try:
        with closing(conversation.answer(question)) as parts:
            for text in parts:
                end = "" if text.endswith("\n") else "\n"
                write(text)
    finally:
        write(end)
    for number, text in enumerate(conversation.others, 2):
        write(f"[{number}]\n{text}{'' if text.endswith(chr(10)) else chr(10)}")


def _advice(error: cbatch.RequestError, conversation: Conversation) -> str:
    if isinstance(error, cbatch.PromptTooLongError):
        words = f"the conversation has {error.n_prompt} tokens, but the slot holds {error.n_limit}"
        if conversation.can_grow:
            return f"{words}: start a new one, or raise --ctx-per-seq"
        return f"{words}{_NO_LONGER}: start a new one"
    if not conversation.has_template:
        return "this model has no chat template: give one, such as --chat-template chatml"
    return str(error)


def _first_question(prompt: str | None) -> str:
    if prompt is None or prompt == "-":
        if stdin().isatty():
            say("cbatch: type the question, then Ctrl-D on a line of its own")
        prompt = _decode(stdin().read())
    if not prompt.strip():
        raise cbatch.ConfigError("the question is empty: give a PROMPT, or text on stdin")
    check_whole("the question", prompt)
    return prompt


def _next_question() -> str:
    if not stdin().isatty():
        return _decode(stdin().readline()).strip()
    try:
        return _prompted().strip()
    except EOFError:
        say("")  # the cursor is in the middle of a line
        return ""
    except KeyboardInterrupt:
        say("")
        raise


def _prompted() -> str:
    if not sys.stdout.isatty():  # `input` would write its prompt between the answers
        typer.echo("> ", err=True, nl=False)
        return input()
    with suppress(ImportError):
        import readline  # noqa: F401  # lets `input` edit lines
    return input("> ")


def _decode(data: bytes) -> str:
    try:
        return data.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise cbatch.ConfigError(f"<stdin>: not UTF-8: {error.reason}") from error
