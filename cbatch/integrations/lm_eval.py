"""A model for lm-evaluation-harness: the model `cbatch`, computed by an engine in this process.

`python -m cbatch.integrations.lm_eval run --model cbatch --model_args path=model.gguf --tasks …` is the harness's own
command; in Python, import this module or pass a `CbatchLM` to `lm_eval.simple_evaluate`.

Source: lm_eval 0.4.13, api/model.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

import cbatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lm_eval.api.instance import Instance

    from cbatch.engine import Engine

_N_OUTPUT = 256
"""Tokens of an answer where a task does not say. Source: lm_eval models/huggingface.py, `max_gen_toks`."""

_CAPS = ("max_gen_toks", "max_new_tokens", "max_tokens")
_RENAMED = {"repetition_penalty": "repeat_penalty"}


@register_model("cbatch")
class CbatchLM(TemplateLM):
    """An engine as the harness asks it: all requests of a call are one batch."""

    def __init__(
        self,
        path: str | None = None,
        *,
        engine: Engine | None = None,
        pretrained: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        add_bos_token: bool | None = None,
        **options: Any,
    ) -> None:
        """Load a model, or take a loaded engine, which stays the caller's.

        Args:
            path: a GGUF file; None for the model that ships with cbatch.
            engine: an engine to use instead.
            pretrained: another name of `path`, as other models of the harness have it.
            batch_size: slots, as `parallel` of `cbatch.load`; "auto" or 1, the harness's default, for its default.
            max_batch_size: most slots.
            device: "cpu" keeps the model off the GPUs; anything else is as cbatch finds it.
            add_bos_token: False leaves out the BOS token before contexts, which the model's file asks for.
            options: for `cbatch.load`, such as `exact=True`, `ctx_per_seq`, `n_threads` or `replicas`.

        Raises:
            CBatchError: as `cbatch.load`.
        """
        super().__init__()
        given = [str(n) for n in (batch_size, max_batch_size)]
        sizes = [int(n) for n in given if n.isdigit() and int(n) > 1]
        if sizes:
            options.setdefault("parallel", min(sizes))
        if device == "cpu":
            options.setdefault("n_gpu_layers", 0)
        self.engine = engine or cbatch.load(path or pretrained, **options)
        self._facts = self.engine.model_facts
        self._adds_bos = self._facts.adds_bos and add_bos_token is not False

    @property
    def eot_token_id(self) -> int:
        """The token that ends texts."""
        return self._facts.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context."""
        return self._facts.bos_id if self._facts.bos_id >= 0 else self._facts.eos_id

    @property
    def max_length(self) -> int:
        """Tokens of context and continuation."""
        return self.engine.n_window

    @property
    def tokenizer_name(self) -> str:
        """What the harness's cache of prompts depends on."""
        return self._facts.path or "cbatch"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the model's template; there is one."""
        return self._facts.chat_template if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a chat as text; without `add_generation_prompt` its last message is continued."""
        return self.engine.render(chat_history)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the tokens of a text, BOS before it where the model's file asks for it."""
        adds_bos = self._adds_bos if add_special_tokens is None else add_special_tokens
        return self.engine.tokenize(string, add_special=adds_bos) if string else []

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [(self._context(context, len(end)), end) for _, context, end in requests]
        scores = self.engine.score(pairs, progress=not disable_tqdm).results()
        # `sum`, as in the harness's own models: `Score.logprob` is rounded once, and may differ in the last bit
        found = [(sum(t.logprob for t in score.tokens), score.is_greedy) for [score] in scores]
        for (texts, _, _), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def _context(self, tokens: list[int], n_behind: int) -> cbatch.BatchPrompt:
        """Return the end of a context that fits the window with what is behind it, as the harness's models do."""
        return cbatch.BatchPrompt(tokens=tokens[-max(1, self.max_length - n_behind) :])

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihoods of whole texts."""
        texts = [request.args[0] for request in requests]
        prompts = [cbatch.BatchPrompt(tokens=self.tok_encode(text)) for text in texts]
        scores = self.engine.score_texts(prompts, progress=not disable_tqdm).results()
        for text, score in zip(texts, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score.logprob)
        return [score.logprob for score in scores]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answers to texts, cut before the strings of `until`."""
        prompts = [self._prompt(*request.args) for request in requests]
        response = self.engine.run(prompts, progress=not disable_tqdm)
        answers = [result.text for result in response.results()]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _prompt(self, context: str, asked: Mapping[str, Any]) -> cbatch.BatchPrompt:
        """Return a request for an answer; an argument that cbatch does not know is refused when it runs."""
        options = {_RENAMED.get(name, name): value for name, value in asked.items()}
        caps = [options.pop(name) for name in _CAPS if name in options]
        n_output = int(caps[0]) if caps else _N_OUTPUT
        until = options.pop("until", None) or []
        if not options.pop("do_sample", options.get("temperature")):
            options["temperature"] = 0
        options["stop"] = [until] if isinstance(until, str) else [text for text in until if text]
        tokens = self.tok_encode(context)[-max(1, self.max_length - n_output) :]
        return cbatch.BatchPrompt(tokens=tokens, options={**options, "max_tokens": n_output})


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
