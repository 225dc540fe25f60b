"""A server over an engine: `create_app` returns an ASGI application that speaks OpenAI's and Anthropic's formats.

It needs the extra `server`: `pip install ".[server]"` in a clone.
"""

from cbatch.server.app import create_app

__all__ = ["create_app"]
