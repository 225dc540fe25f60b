"""The models that ship inside the package."""

from pathlib import Path

CHAT_MODEL = Path(__file__).with_name("chat.gguf")
DRAFT_MODEL = Path(__file__).with_name("draft.gguf")
"""A smaller one of the same vocabulary, to guess what the chat model will say."""

DEMO_CHATS = Path(__file__).with_name("demo.jsonl")
"""What `cbatch run --demo` asks: 64 chats, one on each line, in the format of batch files."""
