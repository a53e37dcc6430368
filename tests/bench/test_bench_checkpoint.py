"""Tests the peak memory of saving and loading: through torch.distributed.checkpoint there is no second copy of the
state, and through a file only the decoded one."""

from bench import checkpoint_rows, workload


def test_peak_memory_through_dcp_is_at_most_a_tenth_over_the_state() -> None:
    shapes = workload.gpt2(vocabulary=6000, layers=4)
    saving, loading = checkpoint_rows.measure("8bit", "dcp", shapes, seed=0)
    assert saving.state == loading.state and saving.decoded >= saving.state * 0.99
    assert saving.extra <= 0.1 * saving.state
    assert loading.state <= loading.extra <= 1.1 * loading.state


def test_peak_memory_of_a_file_is_state_and_decoded_state() -> None:
    shapes = workload.gpt2(vocabulary=6000, layers=4)
    saving, loading = checkpoint_rows.measure("8bit", "file", shapes, seed=0)
    assert saving.extra <= 1.1 * (saving.state + saving.decoded) - saving.state
    assert loading.extra <= 1.1 * (loading.state + loading.decoded)
