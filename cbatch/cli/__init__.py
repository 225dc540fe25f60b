"""The commands, `cbatch run`, `ask`, `info` and so on: a module each, and what they share."""

from cbatch.cli import (
    ask,
    bench,
    cache,
    daemon,
    doctor,
    embed,
    info,
    rerank,
    run,
    serve,
    sort,
    status,
    synth,
    tune,
    verify,
)
from cbatch.cli.main import make_app

app = make_app(
    *(run.run, ask.ask, embed.embed, rerank.rerank, info.info, bench.bench, synth.synth),
    *(sort.sort, status.status, daemon.daemon, serve.serve, verify.verify, doctor.doctor),
    tune.tune,
)
app.add_typer(cache.app, name="cache")

__all__ = ["app"]
