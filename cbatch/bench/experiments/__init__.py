"""Benchmarks of one question each, behind docs: `python -m cbatch.bench.experiments.NAME`. Not in the wheel."""
