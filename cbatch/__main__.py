"""`python -m cbatch`: the same as `cbatch`."""

from cbatch.cli import app

app(prog_name="cbatch")
