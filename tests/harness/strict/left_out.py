"""Tests that cannot run on the stand-in: why, by what their node IDs begin with."""

_FRAMES = "the stall watchdog finds collectives by torch's frames, and the innermost ones are the stand-in's"
LEFT_OUT = {
    "tests/dist/pipelines/test_follow.py::test_a_rank_that_exits_ends_the_job_with_its_cause": (
        "an operation with a rank that has ended does not fail; with gloo it does"
    ),
    "tests/dist/pipelines/test_pipe_stages.py::test_after_an_error_with_pending_transfers_further_calls_are_refused": (
        "its ranks end while transfers wait for their peers"
    ),
    "tests/dist/comm/test_stall.py::test_a_stalled_forward_is_reported_by_every_waiting_rank": _FRAMES,
    "tests/dist/comm/test_stall.py::test_a_stalled_backward_is_reported_with_the_module_of_its_forward": _FRAMES,
}
