"""Step plans computed by llama.cpp: a context, its memory, and what is computed and sampled in it."""
