#!/bin/sh
# Runs a test with its arguments: a program for aarch64 in QEMU's user mode, anything else (a script) directly. Byte 18
# of an ELF file is its machine: b7 is aarch64.
if [ "$(head -c 4 "$1" | od -An -tx1 | tr -d ' ')" = 7f454c46 ] && [ "$(od -An -tx1 -j18 -N1 "$1" | tr -d ' ')" = b7 ]; then
  exec qemu-aarch64 -L /usr/aarch64-linux-gnu "$@"
fi
exec "$@"
