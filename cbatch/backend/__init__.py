"""The border to llama.cpp: what the rest of the house sees of it is a protocol.

`llama_cpp` is imported in `cbatch.backend.bindings` alone.
"""

from cbatch.backend.protocol import Backend, Embedder, Grammars, Message, Vocab

__all__ = ["Backend", "Embedder", "Grammars", "Message", "Vocab"]
