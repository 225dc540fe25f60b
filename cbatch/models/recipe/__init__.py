"""How the models that ship inside were made: `python -m cbatch.models.recipe`.

1. `tasks` (with `words`, `turns`, `talk` and `stories`) makes chats by rules, from a seed, as many as wanted.
2. `pieces` learns a vocabulary from some of them; `export` writes it as a GGUF without a real network, and
   llama.cpp loads that: the tokens that are trained on are the tokens of the engine.
3. `train` teaches `net`, the big model, its answers; then the draft learns from the big model what comes next.
4. `export` writes both as GGUF files, and `measure` asks them held-out questions through the engine.

It needs PyTorch, which cbatch itself does not: `pip install torch` (the CPU build will do).
"""
