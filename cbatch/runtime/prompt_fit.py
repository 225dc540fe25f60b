"""Whether a prompt fits the window, how long its output may be, and which of its tokens a moving window keeps."""

from __future__ import annotations

from collections.abc import Sequence

from cbatch.core.driver import MovingWindow, SequenceDriver
from cbatch.core.request import Request
from cbatch.core.span import PromptScores
from cbatch.errors import PromptError, PromptTooLongError

MAX_OUTPUT = 2**31 - 1
"""The cap of an unlimited output, possible with a moving window."""

N_WINDOWS = 16
"""Windows that a prompt may fill of which `n_discard` leaves out tokens: tokenizing takes time. Our choice."""


def output_cap(
    request: Request, n_prompt: int, n_window: int, n_first: int = 0
) -> tuple[int, list[str]]:
    """Return the maximum output length for a prompt of `n_prompt` tokens, with a warning if more was asked for.

    Args:
        n_prompt: tokens of its prompt.
        n_first: tokens that a moving window keeps by default.

    Raises:
        PromptError: the prompt has no token.
        PromptTooLongError: the window is too small for the prompt, for the prompt and a strict cap, or for what is kept
            of a prompt with left-out tokens; or such a prompt fills more than `N_WINDOWS` windows.
    """
    options = request.options
    if not n_prompt:
        raise PromptError("the prompt is empty: it has no token")
    cap = 0 if options.prefill_only else options.max_tokens
    is_whole = bool(options.prefill_only) or request.n_prompt_logprobs is not None
    slides = bool(options.n_discard) and not is_whole
    n_least = _n_least(request, cap, slides=slides)
    if n_prompt + n_least > n_window:
        n_kept = _n_keep(request, n_prompt, n_first)
        keeps_few, is_short = n_kept <= n_window - 2, n_prompt <= N_WINDOWS * n_window
        if not (slides and keeps_few and is_short):
            raise PromptTooLongError(
                n_prompt,
                n_window,
                n_least,
                n_keep=n_kept if slides and not keeps_few else None,
                can_slide=request.can_shift and not (is_whole or slides) and keeps_few and is_short,
                can_lower=bool(options.strict_max_tokens) and n_prompt < n_window,
                n_trained=request.n_trained,
            )
    n_most = MAX_OUTPUT if options.n_discard else n_window - n_prompt
    if cap is None or cap <= n_most:
        return n_most if cap is None else cap, []
    why = f"the prompt has {n_prompt} tokens and the window {n_window}"
    return n_most, [f"max_tokens is {n_most}, not {cap}: {why}"]


def _n_least(request: Request, cap: int | None, *, slides: bool) -> int:
    """Return the output length that must fit: a strict cap, or one token more than there is."""
    options = request.options
    if options.strict_max_tokens and cap is not None and not options.n_discard:
        return cap
    n_next = 1 if slides else 1 + len(request.output)
    return n_next if cap is None else min(cap, n_next)


def _n_keep(request: Request, n_prompt: int, n_first: int) -> int:
    """Return how many tokens a moving window keeps: by default `n_first`; the option −1 means the whole prompt."""
    n_keep = n_first if request.options.n_keep is None else request.options.n_keep
    return n_prompt if n_keep < 0 else n_keep


def set_prompt(
    driver: SequenceDriver,
    tokens: Sequence[int],
    n_window: int,
    n_first: int = 0,
    n_before: int = 0,
) -> None:
    """Give a sequence the tokens of its prompt.

    A moving window keeps the first `n_first` of them, unless the request says otherwise. A scored prompt is scored from
    token `n_before` on; with 0, from where the request says.

    Raises:
        RequestFailedError: see `output_cap`. Nothing has changed then.
    """
    request, n_prompt = driver.request, len(tokens)
    n_cap, warnings = output_cap(request, n_prompt, n_window, n_first)
    driver.warnings += warnings
    driver.begin(tokens, n_window, n_cap)
    if request.n_prompt_logprobs is not None:
        n_before = n_before or request.options.prompt_logprobs_start or 1
        driver.scores = PromptScores(n_prompt - 1, min(n_before, n_prompt) - 1)
    if request.options.n_discard:
        _keep_in_window(driver, _n_keep(request, n_prompt, n_first), request.options.n_discard)


def _keep_in_window(driver: SequenceDriver, n_asked: int, n_asked_to_discard: int) -> None:
    """Make the window a moving one, and leave out tokens of a prompt that does not fit; warn where limits differ."""
    n_prompt, n_window = driver.n_prompt, driver.n_window
    n_keep = min(n_asked, n_prompt, n_window - 2)
    n_discard = min(n_asked_to_discard, n_window - n_keep - 1)
    driver.window = window = MovingWindow(n_keep, n_discard, driver.given)
    if n_keep < n_asked:
        why = (
            f"prompt has {n_prompt} tokens"
            if n_keep == n_prompt
            else f"window has {n_window} tokens"
        )
        driver.warnings.append(f"n_keep is {n_keep}, not {n_asked}: the {why}")
    if n_discard < n_asked_to_discard:
        why = f"the window has {n_window} tokens, of which {n_keep} are kept"
        driver.warnings.append(f"n_discard is {n_discard}, not {n_asked_to_discard}: {why}")
    n_over = n_prompt - n_window
    if n_over > 0:
        window.n_left_out = n_left_out = -(-n_over // n_discard) * n_discard
        del driver.tokens[n_keep : n_keep + n_left_out]
        driver.n_prompt -= n_left_out
        driver.warnings.append(
            f"{n_left_out} tokens after the first {n_keep} were left out (n_discard): a window has {n_window}"
        )
