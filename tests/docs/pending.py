"""Things that pages mention although they do not exist yet. A test that misses one of them skips and names it. When it
exists, `test_nothing_that_has_come_is_pending` fails until its line is removed here."""

# Names as `code_checks.missing_names` returns them, pages, commands of `python -m torch_ext`, and messages -> a note.
PENDING: dict[str, str] = {}
