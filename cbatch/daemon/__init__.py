"""The lines of `cbatch daemon`: slots and turns of one engine, as system 002's daemon has them."""
