"""What the pages speak of and the tree does not have yet. A page that needs one of these is skipped there, by name; one
that has come fails `test_nothing_that_has_come_is_pending` until its line is gone."""

# Names as `code_checks.missing_names` gives them, pages, commands of `python -m torch_ext`, and messages.
PENDING: dict[str, str] = {}
