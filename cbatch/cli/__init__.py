"""The commands: `cbatch run`, `cbatch ask`, `cbatch info`, `cbatch synth`; one module each, and what they share."""

from cbatch.cli import ask, info, run, synth
from cbatch.cli.main import make_app

app = make_app(run.run, ask.ask, info.info, synth.synth)

__all__ = ["app"]
