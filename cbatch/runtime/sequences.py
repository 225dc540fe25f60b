"""Makes sequences from a prompt and its options."""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cbatch.core.driver import SequenceDriver
from cbatch.core.request import Request
from cbatch.errors import (
    ConfigError,
    PromptError,
    UnsupportedOptionError,
)
from cbatch.options import MAX_SEED, NO_OPTIONS, Grammar, RunOptions, values_of
from cbatch.runtime.choices import member_id
from cbatch.runtime.no_effect import idle_options
from cbatch.runtime.validation import check_chat, check_fits, check_labels
from cbatch.support.checks import check_seconds, shown
from cbatch.support.plain import are_same

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cbatch.backend import Backend, Vocab
    from cbatch.chat.chat_format import ChatFormat
    from cbatch.engine_options import ScheduleOptions
    from cbatch.messages import BatchPrompt
    from cbatch.response import BatchResult
    from cbatch.runtime.output import Origin


UNNAMED = "-"
"""The id of a request that is checked and not run, in errors."""

_N_NAMED = 3
"""Variables that a warning names; more are counted."""


class OptionsMerger:
    """Puts options over others and keeps the last answer, for many requests have equal options. From any thread."""

    def __init__(self) -> None:
        self._last = (RunOptions(),) * 3

    def over(self, own: RunOptions, others: RunOptions) -> RunOptions:
        """Return `own` completed by `others`: the same object for the same options."""
        if own.logits_processor is not None:  # the caller's object, which need not be comparable
            return own.over(others)
        last_own, last_others, settled = self._last
        is_known = last_own is own or are_same(values_of(last_own), values_of(own))
        if last_others is not others or not is_known:
            settled = own.over(others)
            self._last = own, others, settled
        return settled


class SequenceMaker:
    """Makes sequences from prompts, with merged and checked options. From any thread; renders no chat."""

    def __init__(self, backend: Backend, schedule: ScheduleOptions, chats: ChatFormat) -> None:
        self.owner = secrets.token_hex(8)
        """The mark of the engine, by which its results are known."""
        self._backend, self._schedule = backend, schedule
        self._chats = chats
        self._settled = OptionsMerger()
        self._last_unused: tuple[Mapping[str, Any] | None, tuple[str, ...]] = None, ()
        self._n_trained = backend.model_facts.n_ctx_train

    def of_prompt(
        self,
        item: BatchPrompt,
        id: str,
        run_options: RunOptions,
        now: float,
        ends_s: float,
        *,
        name: str = "",
        job: int = 0,
    ) -> list[SequenceDriver]:
        """Return the sequences of a prompt, one for each choice; a `ConfigError` of its options names it `name`."""
        request = self.request(item, id, run_options, now, ends_s, name=name, job=job)
        n_choices, options = request.options.n_choices, request.options
        if options.choice_probs:
            return [self.of_request(label, now) for label in _labels(request)]
        if n_choices == 1:
            return [self.of_request(request, now)]
        choices = [self.of_request(_choice(request, i), now) for i in range(n_choices)]
        for driver in choices:
            driver.reply.echo = choices[0].reply.echo
        return choices

    def request(
        self,
        item: BatchPrompt,
        id: str,
        run_options: RunOptions,
        now: float,
        ends_s: float,
        *,
        name: str = "",
        job: int = 0,
    ) -> Request:
        """Return what a prompt asks for, with merged options. Raises as `of_prompt`."""
        try:
            options = self._settled.over(RunOptions.of(item.options), run_options)
            check_fits(options, self._backend, self._schedule)
            check_chat(item, options, self._backend.vocab)
            check_labels(item, options)
            grammar = options.structure or self._chats.grammar(item, options)
            is_open = options.structure is None and self._chats.is_grammar_open(item, options)
        except UnsupportedOptionError:
            raise
        except ConfigError as error:
            raise ConfigError(f"{name or f'request {id!r}'}: {error}") from None
        deadline_s = min(ends_s, now + check_seconds("timeout_s", options.timeout_s))
        request = self._request(item, id, options, deadline_s, grammar, job)
        return replace(request, grammar=None, is_grammar_open=True) if is_open else request

    def is_own_fault(self, item: BatchPrompt, run_options: RunOptions) -> bool:
        """Whether a prompt that was refused could run without the options of its own."""
        if are_same(values_of(RunOptions.of(item.options)), values_of(NO_OPTIONS)):
            return False
        try:
            self.request(replace(item, options=None), UNNAMED, run_options, 0.0, math.inf)
        except ConfigError:
            return False
        return True

    def of_request(self, request: Request, now: float) -> SequenceDriver:
        """Return the sequence of one request, submitted `now`."""
        vocab, is_shown = self._backend.vocab, request.options.skip_special_tokens is False
        piece = vocab.shown_piece if is_shown else vocab.piece
        reader = self._chats.reader(request.prompt, request.options)
        driver = SequenceDriver.of(request, piece, now, reader)
        driver.reply.is_watched = True  # a reader may come: the first delivery knows
        self._warn(driver)
        return driver

    def _request(
        self,
        item: BatchPrompt,
        id: str,
        options: RunOptions,
        deadline_s: float,
        grammar: Grammar | None,
        job: int,
    ) -> Request:
        vocab = self._backend.vocab
        seed = secrets.randbits(32) if options.seed is None else options.seed
        own = () if options.ignore_eos else vocab.end_tokens
        asked_stops, stops = options.stop_sets(own)
        sampling = options.sampling(self._backend.sampling_defaults, seed, vocab.suppressed_tokens)
        return Request(
            id,
            item,
            options,
            sampling,
            stops,
            deadline_s,
            options.adapters,
            options.n_logprobs,
            options.n_prompt_logprobs,
            job=job,
            owner=self.owner,
            grammar=grammar,
            dry_breakers=options.dry_breakers(sampling),
            can_shift=self._backend.memory.can_shift and not self._backend.cuts,
            n_trained=self._n_trained,
            asked_stops=asked_stops,
        )

    def _warn(self, driver: SequenceDriver) -> None:
        """Warn of options without effect: cells that nothing can use, a variable that the chat template never names."""
        request, cuts = driver.request, self._backend.cuts
        options = request.options
        driver.warnings += idle_options(request.prompt, options, request.sampling)
        if options.prefill_only and driver.own_cuts(cuts).multiple != cuts.multiple:
            driver.warnings.append(
                "prefill_only leaves no cells for other requests: with exact=True, a scored prompt is not computed in "
                f"chunks of {cuts.multiple}, as shared cells are"
            )
        if given := options.chat_template_kwargs:
            driver.warnings += self._unused_in(given)

    def _unused_in(self, given: Mapping[str, Any]) -> Sequence[str]:
        """Return a warning of the variables that the chat template never names; choices have the same ones."""
        last, warning = self._last_unused
        if last is not given:
            template = self._backend.vocab.template
            names = [name for name in given if template and name not in _words_of(template)]
            warning = (_unused(names),) if names else ()
            self._last_unused = given, warning
        return warning


@lru_cache(1)
def _words_of(template: str) -> frozenset[str]:
    """Return the words of a chat template, among them all names of variables."""
    return frozenset(re.findall(r"\w+", template))


def _unused(names: Sequence[str]) -> str:
    some = ", ".join(map(shown, names[:_N_NAMED]))
    more = f" and {len(names) - _N_NAMED:,} more" if len(names) > _N_NAMED else ""
    return f"chat_template_kwargs has {some}{more}, which the chat template does not use"


def _choice(request: Request, i: int) -> Request:
    """Return a request for one of several choices: each has its own seed, the first one the request's."""
    sampling = replace(request.sampling, seed=(request.sampling.seed + i) % (MAX_SEED + 1))
    # the prompt is scored once; `Choices` copies the scores to the others
    n_top = request.n_prompt_logprobs if i == 0 else None
    id = member_id(request.id, i)
    return replace(request, id=id, sampling=sampling, n_prompt_logprobs=n_top)


def _labels(request: Request) -> list[Request]:
    """Return a request for each text of which one is to be chosen: it is put behind the prompt, and scored."""
    n_top = request.options.n_logprobs or 0
    request = replace(
        request,
        options=RunOptions(max_tokens=0, prompt_logprobs=n_top).over(request.options),
        n_logprobs=None,
        n_prompt_logprobs=n_top,
        grammar=None,
    )
    return [
        replace(request, id=member_id(request.id, i), ending=text)
        for i, text in enumerate(request.options.choice or ())
    ]


def extended(origin: Origin, id: str, result: BatchResult, n_tokens: int, now: float) -> Request:
    """Return a request for up to `n_tokens` more after a result, submitted `now`."""
    old = origin.request
    n_echoed = origin.usage.prompt_tokens if old.options.echo else 0
    output = origin.token_ids[n_echoed:]
    return replace(
        _with_prompt(old, result),
        id=id,
        options=RunOptions(max_tokens=len(output) + n_tokens, prefill_only=False).over(old.options),
        deadline_s=now + check_seconds("timeout_s", old.options.timeout_s),
        output=output,
        output_logprobs=(result.logprobs or ())[n_echoed:],
        continues=origin.number,
    )


def _with_prompt(request: Request, result: BatchResult) -> Request:
    """Return a request with the prompt's log-probabilities of its result, where these are complete."""
    found = result.prompt_logprobs or ()
    if len(found) != result.usage.prompt_tokens or None in found[1:]:
        return request
    options = request.options
    if options.prompt_logprobs != options.n_prompt_logprobs:  # the echo has more alternatives
        found = (None, *(result.logprobs or ())[1 : len(found)])
    return replace(request, n_prompt_logprobs=None, prompt_logprobs=found)


def check_in_vocab(tokens: Sequence[int], vocab: Vocab) -> None:
    """Refuse tokens that a vocabulary does not have."""
    if tokens and max(tokens) >= vocab.n_vocab:
        raise PromptError(f"token {max(tokens)} is not in the vocabulary of {vocab.n_vocab}")
