"""Adapters to other libraries, each over the public `Engine`; who imports one has its host installed."""
