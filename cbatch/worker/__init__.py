"""An engine in a process of its own: its protocol, and pools of workers."""

from cbatch.worker.start import connect

__all__ = ["connect"]
