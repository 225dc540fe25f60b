"""`python -m cbatch.cli`: the same as `cbatch`."""

from cbatch.cli import app

app(prog_name="cbatch")
