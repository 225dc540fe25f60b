"""The models that ship inside the package."""

from pathlib import Path

CHAT_MODEL = Path(__file__).with_name("chat.gguf")
DRAFT_MODEL = Path(__file__).with_name("draft.gguf")
"""A smaller one of the same vocabulary, to guess what the chat model will say."""
