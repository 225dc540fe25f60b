"""The engine that runs the items of a file: one that is given, or one that is loaded for them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cbatch.checks import shown
from cbatch.engine import Engine, load
from cbatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cbatch.messages import LookAhead


def check_engine(engine: object) -> None:
    """Check what is to answer.

    Raises:
        ConfigError: it is no engine.
    """
    if not isinstance(engine, Engine):
        raise ConfigError(f"engine must be an Engine, as load returns it, not {shown(engine)}")


@contextmanager
def engine_for(
    given: Engine | None,
    model: Any,
    settings: Mapping[str, Any],
    look_ahead: Callable[[], LookAhead | None],
    *,
    threaded: bool = False,
) -> Iterator[Engine]:
    """Lend the engine that is given, or one that is made to the measure of what comes first and closed afterwards.

    Args:
        given: is left open.
        model: what to load, see `cbatch.load`.
        settings: of `cbatch.load`, by name.
        look_ahead: tells what comes first; called where an engine is loaded.
        threaded: without a thread of its own it computes while somebody waits for a result.

    Raises:
        ConfigError: an engine is given, and a model or settings too.
        EngineError: the model cannot be loaded.
    """
    if given is None:
        with load(model, threaded=threaded, look_ahead=look_ahead(), **settings) as engine:
            yield engine
        return
    check_engine(given)
    if model is not None or settings:
        names = ", ".join(settings) or "model"
        raise ConfigError(f"{names}: the engine is loaded already; leave it out, or give no engine")
    yield given
