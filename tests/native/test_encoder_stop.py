"""What ends the graph of an encoder, asked as ggml's scheduler asks it."""

from __future__ import annotations

from cbatch.backend.llama.library import library


def test_graph_pauses_at_every_sixteenth_node_and_goes_on() -> None:
    lib = library()
    stop = lib.cbatch_graph_stop_init()
    pauses = [lib.cbatch_graph_callback(None, True, stop) for _ in range(48)]
    assert [i for i, is_pause in enumerate(pauses) if is_pause] == [15, 31, 47]
    assert lib.cbatch_graph_callback(None, False, stop)
    lib.cbatch_graph_stop_free(stop)


def test_graph_ends_at_the_next_pause_once_it_is_stopped() -> None:
    lib = library()
    stop = lib.cbatch_graph_stop_init()
    lib.cbatch_graph_stop_set(stop)
    assert not any(lib.cbatch_graph_callback(None, False, stop) for _ in range(3))
    lib.cbatch_graph_stop_free(stop)
