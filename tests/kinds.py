"""One way to make an engine, over which tests of its face run: in a thread, in a worker, and in a pool of two workers.

`OVER` names the modules whose tests run over each kind, and the tests that are of a thread alone, with the reason. In
each run a test has to make an engine of its kind, so that none is run over workers for nothing.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cbatch.engine import Engine
from cbatch.engine_options import ScheduleOptions
from cbatch.runtime.local import LocalRuntime
from tests.worker.links import workers_over

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cbatch.backend import Backend

Kind: TypeAlias = Literal["thread", "worker", "pool"]


@dataclass(slots=True)
class _Chosen:
    kind: Kind = "thread"
    made: list[Kind] = field(default_factory=list)


_CHOSEN = _Chosen()


@contextmanager
def chosen(kind: Kind) -> Iterator[list[Kind]]:
    """Have `engine_on` make engines of this kind in the block; gives the kinds that it made."""
    _CHOSEN.kind, _CHOSEN.made = kind, []
    try:
        yield _CHOSEN.made
    finally:
        _CHOSEN.kind = "thread"


def engine_on(
    backend: Backend,
    *,
    schedule: ScheduleOptions | None = None,
    threaded: bool = True,
    cache_dir: Any = None,
    **more: Any,
) -> Engine:
    """Make an engine on a backend: of the kind that the test runs over, or by hand in this thread.

    A pool's second worker has a backend of its own, which is like the first.
    """
    kind = _CHOSEN.kind if threaded else "thread"
    if kind == "thread":
        return Engine(backend, schedule=schedule, threaded=threaded, cache_dir=cache_dir, **more)
    _CHOSEN.made.append(kind)
    backends = [backend] if kind == "worker" else [backend, copy.deepcopy(backend)]
    runtimes = [
        partial(LocalRuntime, one, schedule or ScheduleOptions(), cache_dir=cache_dir)
        for one in backends
    ]
    return Engine(opener=lambda _: workers_over(*runtimes), **more)


class Reason(Enum):
    """Why a test is not one of each kind."""

    BY_HAND = "its engine has no thread, or it makes none"
    OWNER = "it looks into the thread that computes, or at its clock"
    DEATH = "an engine that fails is another thing than a worker that died: see tests/worker/test_deaths.py"
    AT_ONCE = "orders have to be known at once, not when a worker reads them"
    LONG = "its subject is scheduling, and it takes long"
    ONE_BACKEND = (
        "it looks into the only backend, or has it stop: over a worker, but not over a pool"
    )


def over(file: str, test: str) -> tuple[Kind, ...]:
    """Return the kinds over which a test of a file runs; none where it knows nothing of kinds."""
    reason = next((r for r, names in OVER.get(file, {}).items() if test in names.split()), None)
    if file not in OVER or reason not in (None, Reason.ONE_BACKEND):
        return ()
    return ("thread", "worker") if reason else ("thread", "worker", "pool")


OVER: dict[str, dict[Reason, str]] = {
    "tests/test_engine.py": {
        Reason.BY_HAND: """
            test_cancel_by_the_reader_of_a_stream
            test_cancel_from_another_thread_by_hand_waits_for_the_step
            test_chunks_come_while_the_request_runs
            test_close_by_hand_ends_what_runs_and_what_waits
            test_ctrl_c_while_waiting_by_hand_cancels_the_batch_alone
            test_extending_begins_a_new_life_of_the_id
            test_id_as_text_is_whoever_bears_it_now
            test_id_of_a_result_given_to_a_new_prompt_begins_a_new_life
            test_late_order_touches_nobody_though_the_id_comes_again
            test_refused_prompt_and_its_later_namesake_are_told_apart
            test_request_pauses_after_as_many_tokens_as_the_resume_says
            test_resume_for_what_is_no_number_of_tokens_is_refused
            test_step_by_hand_on_a_backend_that_raises_says_so
            test_timeout_leaves_the_batch_running
            test_two_readers_by_hand_take_turns
        """,
        Reason.ONE_BACKEND: """
            test_auto_ids_of_two_runs_in_flight_differ
            test_cancel_all_spares_what_comes_later
            test_cancel_at_the_first_token_leaves_two_texts_and_four_errors
            test_cancelled_queued_item_never_runs
            test_cancelled_running_item_keeps_its_text_and_harms_nobody
            test_close_ends_every_waiter
            test_close_from_several_threads_at_once
            test_dropping_the_last_reference_ends_the_thread
            test_engine_nobody_holds_ends_after_its_last_request
            test_ids_are_known_at_once_and_results_come_in_input_order
            test_late_cancel_spares_the_next_occupant_of_the_slot
            test_response_cancels_its_own_items_only
            test_response_keeps_its_engine
            test_streaming_begun_late_still_gives_everything
        """,
        Reason.DEATH: """
            test_backend_that_raises_ends_every_request_with_the_cause
        """,
    },
    "tests/test_feed.py": {
        Reason.BY_HAND: """
            test_ctrl_c_inside_the_generator_by_hand_is_ctrl_c
            test_step_by_hand_reads_the_generator
        """,
        Reason.ONE_BACKEND: """
            test_feed_does_not_interrupt_a_run_behind_others_that_wait
            test_generator_is_read_no_further_than_reader_and_slots_need
            test_generator_that_nobody_reads_from_stops_at_its_bound
            test_leaving_ends_the_reading
            test_nothing_is_kept_of_what_was_given_out
        """,
        Reason.DEATH: """
            test_engine_that_dies_while_it_is_fed_tells_the_reader
            test_engine_that_dies_while_its_generator_hangs_tells_the_reader
        """,
    },
    "tests/test_extend.py": {
        Reason.BY_HAND: """
            test_full_queue_refuses_and_frees_the_id
            test_part_that_was_cancelled_in_its_prompt_goes_on
            test_part_whose_time_was_over_goes_on_with_the_same_time
        """,
        Reason.ONE_BACKEND: """
            test_altered_result_is_refused_and_costs_nobody_else_anything
            test_chunks_of_a_part_are_the_whole_text_with_one_end
            test_extension_can_be_cancelled_by_its_id
            test_extension_whose_key_is_in_flight_is_refused
            test_id_in_flight_is_refused_until_it_has_ended
            test_part_that_is_cancelled_again_keeps_the_first_and_goes_on
            test_part_that_was_cancelled_goes_on
            test_result_of_one_that_never_ran_is_refused_with_its_error
            test_result_with_nothing_to_go_on_from_is_refused
            test_two_parts_under_exact_have_the_shapes_of_one_run
            test_what_is_no_number_of_tokens_is_refused
        """,
        Reason.AT_ONCE: """
            test_full_pool_that_preempts_changes_no_part
        """,
    },
    "tests/test_async.py": {
        Reason.BY_HAND: """
            test_a_missing_model_raises_where_the_engine_is_entered
            test_a_scope_cancelled_while_loading_has_closed_the_engine
            test_a_task_cancelled_often_while_leaving_has_closed_the_engine
            test_a_task_cancelled_often_while_loading_leaves_no_model
            test_a_task_cancelled_while_loading_has_the_loading_end_soon
            test_a_wrong_setting_raises_at_once
            test_engine_without_a_thread_works_in_a_loop
            test_two_hundred_that_vanish_leave_nothing
            test_who_is_cancelled_before_entering_loads_nothing
        """,
        Reason.ONE_BACKEND: """
            test_a_cancelled_task_frees_the_slots
            test_a_scope_cancelled_twice_while_leaving_has_closed_the_engine
            test_a_slow_reader_gets_every_token_and_stops_nobody
            test_an_exception_in_the_body_frees_the_slots
            test_break_frees_the_slots_and_keeps_the_partial_text
            test_closing_the_reader_frees_the_slots
            test_what_closing_raises_is_raised_to_who_leaves
        """,
        Reason.AT_ONCE: """
            test_one_wakeup_serves_all_readers_of_a_loop
        """,
        Reason.DEATH: """
            test_a_failing_backend_ends_everyone_who_waits
        """,
    },
    "tests/test_windows.py": {
        Reason.BY_HAND: """
            test_ctrl_c_while_cells_move_changes_no_token
            test_mover_cancelled_at_the_border_keeps_its_text_and_frees_its_slot
            test_mover_paused_at_the_border_goes_on_in_its_slot_and_out_of_it
            test_mover_preempted_at_the_border_goes_on
            test_numbers_that_are_none_are_refused
            test_plan_moves_the_cells_of_that_slot_alone
            test_prompt_alone_fills_the_window_though_it_may_move
        """,
        Reason.ONE_BACKEND: """
            test_answer_goes_past_the_window_and_its_neighbour_notices_nothing
            test_answer_without_a_cap_goes_on_until_it_is_cancelled
            test_closing_ends_movers_with_what_they_have
            test_failed_steps_change_no_token
            test_full_pool_changes_no_token
            test_memory_that_cannot_move_refuses_and_queues_nothing
            test_movers_in_slots_of_their_own_share_beginnings
            test_text_of_a_moving_window_is_all_of_it_in_chunks_too
        """,
        Reason.LONG: """
            test_turns_change_no_token
            test_turns_of_a_window_that_keeps_nothing_change_no_token
        """,
    },
    "tests/test_interrupts.py": {
        Reason.BY_HAND: """
            test_block_in_another_thread_is_an_ordinary_one
            test_closing_while_another_thread_loads_breaks_that_off
            test_ctrl_c_comes_before_the_error_of_its_block
            test_ctrl_c_in_a_block_is_raised_behind_it
            test_ctrl_c_in_a_block_within_a_block_is_raised_behind_both
            test_ctrl_c_while_loading_frees_the_model_and_the_next_use_loads_again
            test_ctrl_c_while_work_is_done_aside_is_raised_when_it_has_ended
            test_frames_of_what_was_postponed_are_given_up
            test_handler_set_in_a_block_stays
            test_handler_that_closes_an_engine_by_hand_ends_who_waits_for_it
            test_handler_that_raises_nothing_is_called_at_once
            test_handler_that_uses_an_engine_by_hand_in_every_step_finds_it_whole
            test_handlers_held_back_by_a_block_are_called_after_it_in_order
            test_latch_that_was_waited_for_in_vain_lets_everybody_through
            test_other_signals_that_raise_are_postponed_too
        """,
        Reason.AT_ONCE: """
            test_handler_that_closes_an_engine_being_closed_waits_for_nobody
        """,
    },
    "tests/test_request_log.py": {
        Reason.BY_HAND: """
            test_level_is_asked_for_without_making_a_line
        """,
    },
    "tests/runtime/test_choices.py": {
        Reason.BY_HAND: """
            test_best_of_candidates_that_never_ran_leave_the_best_of_the_others
            test_choice_before_the_one_that_scores_has_no_prompt_scores
            test_choices_pause_each_for_itself_and_are_resumed_together
            test_choices_that_never_ran_do_not_count_as_computed
            test_choices_that_no_time_was_left_for_are_the_error_of_their_request
            test_id_with_a_nul_is_refused
            test_request_of_which_one_choice_was_cut_off_says_so
            test_text_of_a_token_that_is_no_whole_character_shows_as_unknown
        """,
        Reason.ONE_BACKEND: """
            test_cancel_all_counts_requests_not_choices
            test_cancel_ends_all_choices_and_counts_one_request
            test_cancel_ends_choices_too_that_wait_for_room_in_the_queue
            test_closing_ends_all_choices
            test_extended_choice_scores_the_prompt_where_the_first_did_not
            test_id_is_free_when_the_result_arrives
            test_id_is_taken_until_the_last_choice_has_ended
            test_leaving_a_batch_cancels_its_choices
            test_pause_holds_all_choices_until_resume
            test_pause_holds_choices_too_that_wait_for_room_in_the_queue
            test_winding_down_spares_a_request_of_which_a_choice_runs
        """,
        Reason.DEATH: """
            test_best_of_whose_engine_dies_is_an_error_of_the_engine
        """,
        Reason.AT_ONCE: """
            test_winding_down_ends_choices_too_that_wait_for_room_in_the_queue
        """,
    },
    "tests/runtime/test_echo.py": {
        Reason.ONE_BACKEND: """
            test_a_step_scores_no_more_than_there_is_room_for
            test_cancelled_prompt_tells_as_far_as_it_came
            test_company_that_is_not_scored_is_computed_beside
            test_request_that_never_ran_tells_nothing_of_its_prompt
        """,
    },
    "tests/runtime/test_leaving.py": {
        Reason.BY_HAND: """
            test_who_leaves_an_engine_by_hand_frees_the_slots_for_the_next
        """,
        Reason.ONE_BACKEND: """
            test_everyone_who_waits_for_one_batch_is_told_once
            test_leaving_after_close_is_harmless
            test_many_that_vanish_in_threads_of_their_own_leave_nothing
            test_slots_are_free_before_the_next_plan
            test_who_leaves_frees_the_slots_for_the_next
        """,
        Reason.OWNER: """
            test_cancel_by_the_owner_does_not_wait_for_itself
        """,
    },
    "tests/test_tool_calls.py": {
        Reason.BY_HAND: """
            test_character_that_a_cancel_cuts_comes_out_as_broken
        """,
        Reason.AT_ONCE: """
            test_extended_answer_begins_with_the_parts_it_had
            test_parts_come_before_the_end
        """,
    },
    "tests/test_structure.py": {
        Reason.ONE_BACKEND: """
            test_breakers_that_cannot_be_found_fail_their_request_alone
            test_cancel_while_compiling_ends_at_once
            test_compiler_that_panics_fails_the_request_alone
            test_first_request_with_dry_holds_up_neither_its_caller_nor_others
            test_others_run_while_one_compiles
            test_request_with_dry_and_a_grammar_waits_for_both
            test_those_that_wait_for_a_grammar_fill_the_queue
            test_timeout_while_compiling_ends_at_its_time
        """,
        Reason.AT_ONCE: """
            test_close_while_compiling_ends_everybody_and_begins_no_other
        """,
    },
    "tests/test_pressure.py": {
        Reason.BY_HAND: """
            test_duplicate_id_is_refused_before_anybody_waits
            test_free_slots_count_as_room
            test_full_queue_rejects_with_its_numbers
            test_ids_of_a_rejected_batch_are_free_at_once
            test_late_command_for_an_earlier_life_of_an_id_is_refused
            test_options_at_odds_are_refused_and_both_are_named
            test_options_that_agree_are_taken
            test_paused_one_can_be_cancelled_and_closed
            test_paused_one_gives_nothing_until_it_is_resumed
            test_paused_ones_slot_counts_as_room
            test_paused_ones_time_is_waited_for_without_a_thread
            test_queue_of_nobody_takes_as_many_as_there_are_slots
            test_queue_without_a_limit_takes_any_number
            test_recorder_may_ask_for_statistics_while_another_thread_waits
            test_records_come_while_they_are_asked_for
            test_rejected_batch_leaves_nothing
            test_slots_that_followers_wait_for_are_no_room_in_the_queue
            test_snapshot_stays_as_it_was
            test_sooner_of_two_times_counts
            test_statistics_begun_anew_count_what_comes_later
            test_time_of_a_request_ends_it_with_its_text_or_with_an_error
            test_time_of_a_run_counts_while_it_waits_for_room
            test_time_of_a_run_ends_what_is_left_of_it_and_nothing_else
            test_tokens_that_never_fit_never_wait
            test_wrong_option_of_a_request_is_refused_and_nothing_is_queued
            test_wrong_value_is_refused_by_its_name
        """,
        Reason.ONE_BACKEND: """
            test_all_that_wait_for_room_are_cancelled_with_all_others
            test_cancel_of_one_that_waits_makes_room_for_another
            test_choices_that_wait_for_room_are_cancelled_together
            test_close_while_half_a_batch_waits_for_room_disturbs_no_run
            test_close_while_somebody_waits_for_room_tells_it_and_leaves_nobody
            test_event_loop_is_told_at_once_though_another_thread_waits_for_room
            test_event_loop_is_told_not_to_wait_for_room
            test_event_loop_may_wait_for_room_in_a_thread
            test_generator_waits_for_room_too
            test_generator_waits_though_the_queue_rejects
            test_generators_prompt_that_waits_for_room_ends_with_its_batch
            test_id_of_one_that_was_cancelled_while_it_waited_for_room_is_free
            test_no_time_at_all_ends_everything_before_it_runs
            test_one_that_waits_for_room_can_be_cancelled
            test_one_that_waits_for_room_can_be_paused_and_others_pass_it
            test_pause_and_resume_change_no_token
            test_queued_cancel_is_answered_before_the_running_one_ends
            test_recorder_that_raises_is_called_no_more_and_harms_no_request
            test_rejected_ids_can_be_submitted_once_there_is_room
            test_run_returns_when_the_last_one_is_in_and_never_more_wait
            test_statistics_are_never_begun_anew_in_the_middle_of_a_run
            test_time_of_a_run_ends_a_generator_that_is_read_in_a_thread
            test_two_threads_that_wait_for_room_both_get_in
            test_waiting_for_room_changes_no_stream_and_no_order
            test_winding_down_while_a_prompt_waits_for_room_spares_what_runs
            test_wrong_time_of_a_run_is_refused_and_nothing_is_queued
        """,
        Reason.DEATH: """
            test_error_that_strikes_again_at_the_end_is_told_to_everybody
            test_computation_that_always_fails_ends_the_engine_and_tells_all_once
            test_failure_while_somebody_waits_for_room_tells_it
        """,
        Reason.OWNER: """
            test_time_of_a_run_ends_the_reading_of_a_generator_that_never_ends
        """,
    },
}
