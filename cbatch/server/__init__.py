"""A server over an engine: `create_app` returns an ASGI application that speaks OpenAI's and Anthropic's formats.

It needs the extra `server`: `pip install ".[server]"` in a clone. It is imported when it is first used.
"""

from typing import TYPE_CHECKING

__all__ = ["create_app"]

if TYPE_CHECKING:
    from cbatch.server.app import create_app
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from cbatch.server.app import create_app

        return create_app
