"""The commands: `cbatch run`, `cbatch synth`; one module each, and what they share."""

from cbatch.cli import run, synth
from cbatch.cli.main import make_app

app = make_app(run.run, synth.synth)

__all__ = ["app"]
