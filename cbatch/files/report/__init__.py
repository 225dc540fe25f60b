"""The report of a run over a batch file, and the records of steps that it is made from."""
