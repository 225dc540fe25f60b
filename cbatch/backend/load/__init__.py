"""From a path to a backend that runs: file checks, devices, free memory, sizes, the exactness probe."""
