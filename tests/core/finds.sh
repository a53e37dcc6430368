#!/usr/bin/env bash
# finds.sh PROGRAM TEXT: passes if the program fails and its output matches TEXT, a basic regular expression.
set -uo pipefail
unset XML_OUTPUT_FILE GTEST_OUTPUT # the program's failures must not be in this test's report
if printed=$("$1" 2>&1); then
  echo "$1 did not fail: the bug that was put in is not found"
  exit 1
fi
grep -q -- "$2" <<<"$printed" || { echo "$printed"; echo "$1 failed without saying: $2"; exit 1; }
