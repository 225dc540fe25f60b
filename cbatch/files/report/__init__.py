"""The report of a run over a batch file, and the records of steps that it is made from."""

from cbatch.files.report.page import write_report

__all__ = ["write_report"]
