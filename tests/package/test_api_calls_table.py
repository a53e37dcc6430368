"""Tests that random call programs (tests/core/api_check.h) call every public C function that can fail. Exceptions are
listed here with their reasons."""

import re

from package_files import ROOT

# Functions that are in no table of call programs, and why: their errors are tested elsewhere.
REASONS = {
    "tx_cycle_rebuild": "goes on where a machine is (tests/core/cycle_test.cc)",
    "tx_nccl_about_this": "needs NCCL (tests/core/nccl_*_test.cc, against one that is pretended)",
    "tx_nccl_all_gather": "as tx_nccl_about_this",
    "tx_nccl_all_to_all": "as tx_nccl_about_this",
    "tx_nccl_comm_check": "as tx_nccl_about_this",
    "tx_nccl_comm_new": "as tx_nccl_about_this",
    "tx_nccl_compare": "as tx_nccl_about_this",
    "tx_nccl_digest": "as tx_nccl_about_this",
    "tx_nccl_memory_new": "as tx_nccl_about_this",
    "tx_nccl_open": "as tx_nccl_about_this",
    "tx_nccl_records": "as tx_nccl_about_this",
    "tx_nccl_unique_id": "as tx_nccl_about_this",
    "tx_torch_call": "needs torch (tests/torch)",
    "tx_torch_cuda_library": "needs torch (tests/torch/test_cuda_dispatch.py)",
    "tx_torch_objects": "needs torch (tests/torch)",
    "tx_torch_orthogonalise": "needs torch (tests/torch)",
    "tx_torch_parallel": "needs torch (tests/torch)",
    "tx_torch_register": "needs torch (tests/torch/test_load_library.py)",
}


def fallible_functions() -> set[str]:
    """Returns the functions that the public headers declare with the result tx_status."""
    headers = [path for path in (ROOT / "csrc").glob("torch_ext*.h") if path.name != "torch_ext_cuda.h"]
    assert len(headers) > 2
    text = "\n".join(path.read_text() for path in headers)
    return set(re.findall(r"^TX_API tx_status (tx_\w+)\(", text, flags=re.MULTILINE))


def rows() -> set[str]:
    """Returns the functions in the tables of call programs."""
    files = list((ROOT / "tests/core").glob("ops_api_*_test.cc"))
    assert len(files) > 3
    return {name for path in files for name in re.findall(r'\{"(tx_\w+)", api::', path.read_text())}


def test_every_function_that_can_fail_is_in_a_table_or_says_why_not() -> None:
    describes = {"tx_policy_describe"}  # reports errors by -1 instead of a tx_status
    assert fallible_functions() - rows() == set(REASONS), "a row in tests/core/ops_api_*_test.cc, or a reason here"
    assert rows() - fallible_functions() == describes, "rows of functions that are not there"
