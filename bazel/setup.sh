# Installs what is needed to build, test and run. tests/run.sh and examples/run.sh source it in the repository's root.
#
# Before it installs something it prints one line that says what. If it cannot, it ends the script with one line.
# Afterwards $TORCH_EXT_PYTHON is the interpreter that has torch (the build uses it, too), and `quiet_bazel` is Bazel
# with less output. If TORCH_EXT_PYTHON was set before, that interpreter is used and nothing is installed into it.
#
# Three arrays, set by the caller:
#   more_requirements  lists of Python packages to install in addition to requirements.txt
#   more_programs      programs that are needed; the system's packages have the same names
#   wished_packages    "program=package" or "/pattern/of/a/file=package": installed if possible, not needed

say() { printf 'torch_ext: %s\n' "$*"; }
die() {
  printf 'torch_ext: %s\n' "$*" >&2
  exit 1
}

quiet_bazel() {
  local command=$1 progress=--noshow_progress
  shift
  [ ! -t 2 ] || progress=--show_progress # a terminal overwrites these lines
  bazel "$command" "$progress" --show_result=0 --ui_event_filters=-info,-debug "$@"
}

# Runs a command that downloads. If it fails, ends with one line that says why. $1: what it does, for the message.
run_logged() {
  local what=$1 log why
  shift
  log=$(mktemp "${TMPDIR:-/tmp}/torch_ext.XXXXXX") || die "$what: no room for a log file in ${TMPDIR:-/tmp}."
  if "$@" >"$log" 2>&1; then
    rm -f "$log"
    return
  fi
  if grep -qi 'no space left' "$log"; then
    why="the disk is full"
  elif grep -qiE 'connection|timed out|resolve|network|unreachable' "$log"; then
    why="the network or the package index can't be reached"
  else
    why=$(grep -iE '^(e:|error)' "$log" | tail -n 1)
  fi
  die "$what failed: ${why:-see the log} (log: $log)"
}

# Installs the system's packages whose programs or files are missing.
install_packages() {
  local packages=()
  command -v bazel >/dev/null || packages+=(bazel-bootstrap)
  [ -d /usr/src/googletest/googletest ] || packages+=(libgtest-dev)
  command -v gcc >/dev/null || packages+=(gcc)
  command -v g++ >/dev/null || packages+=(g++)
  local program
  for program in ${more_programs[@]+"${more_programs[@]}"}; do
    command -v "$program" >/dev/null || packages+=("$program")
  done
  if [ -z "${TORCH_EXT_PYTHON:-}" ] && ! venv_works && [ -z "$(find_python)" ]; then
    packages+=(python3 python3-venv)
  fi
  [ ${#packages[@]} -gt 0 ] || return 0

  command -v apt-get >/dev/null || die "missing: ${packages[*]} (Debian's names), and there is no apt-get to install them with."
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "missing: ${packages[*]}. Install them as root: apt-get install ${packages[*]}"
  fi
  say "installing from the system's packages: ${packages[*]}"
  run_logged "apt-get update" as_root apt-get -o DPkg::Lock::Timeout=120 update
  run_logged "apt-get install ${packages[*]}" apt_install "${packages[@]}"
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

apt_install() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "$@"
}

# Whether the program $1 is installed or, if $1 is an absolute path with wildcards, a file matches it.
is_there() {
  case $1 in
    /*) compgen -G "$1" >/dev/null ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

# Installs the optional packages; if that fails, says so and continues.
install_wished_packages() {
  local wish packages=()
  for wish in ${wished_packages[@]+"${wished_packages[@]}"}; do
    is_there "${wish%%=*}" || packages+=("${wish#*=}")
  done
  [ ${#packages[@]} -gt 0 ] || return 0
  say "installing from the system's packages: ${packages[*]}"
  if ! command -v apt-get >/dev/null || ! { as_root apt-get -o DPkg::Lock::Timeout=120 update && apt_install "${packages[@]}"; } >/dev/null 2>&1; then
    say "could not install ${packages[*]}: going on without."
  fi
}

# Prints a Python 3.10-3.13 that can create virtual environments: the first for which the package index has a CPU build
# of the pinned torch, else the first. (Without a CPU build, the same pin installs gigabytes of CUDA packages.)
find_python() {
  local candidate first=
  for candidate in python3 python3.11 python3.12 python3.13 python3.10 /usr/bin/python3; do
    "$candidate" -c 'import sys, ensurepip, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null ||
      continue
    [ -n "$first" ] || first=$candidate
    if has_cpu_torch "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "$first"
}

# Whether the package index that $1's pip uses has the pinned torch as a CPU build.
has_cpu_torch() {
  "$1" -m pip --retries 1 --timeout 15 index versions torch 2>/dev/null | grep -qF "$(sed -n 's/^torch==//p' requirements.in)+cpu"
}

venv_works() { .venv/bin/python -m pip --version >/dev/null 2>&1; }

# Installs the lists $* into .venv, unless all were installed and have not changed. The lists are locks with hashes
# (bazel/lock_requirements.py). torch is installed by its version alone, because its files differ from index to index.
make_venv() {
  local list python torch note= free missing=() options=()
  for list in "$@"; do
    options+=(-r "$list")
    [ "$(cat ".venv/${list//\//-}.sha256" 2>/dev/null)" = "$(sha256sum <"$list")" ] || missing+=("$list")
  done
  [ ${#missing[@]} -gt 0 ] || return 0

  free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
  [ "$free" -ge 3 ] || die "the virtual environment needs 3 GB of disk, $PWD has $free GB free."
  if ! venv_works; then
    python=$(find_python)
    [ -n "$python" ] || die "no Python 3.10 to 3.13 with the venv module found: install one (Debian: python3 python3-venv)."
    rm -rf .venv
    run_logged "making the virtual environment .venv" "$python" -m venv .venv
    missing=("$@")
  fi
  torch=$(grep -h '^torch==' "${missing[@]/%.txt/.in}" || true)
  if [ -n "$torch" ]; then
    note=" (torch: its CUDA packages, several GB: the package index has no CPU build for this Python)"
    ! has_cpu_torch .venv/bin/python || note=" (torch: the CPU build, about 200 MB)"
  fi
  say "downloading into .venv what ${missing[*]} lists: $(grep -hvE '^(#|$)' "${missing[@]/%.txt/.in}" | xargs)$note"
  # All lists together, because the packages of one list may depend on those of another.
  run_logged "pip install" .venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes "${options[@]}"
  [ -z "$torch" ] || run_logged "pip install $torch" .venv/bin/python -m pip install --disable-pip-version-check --quiet "$torch"
  for list in "$@"; do
    sha256sum <"$list" >".venv/${list//\//-}.sha256"
  done
}

install_packages
install_wished_packages
if [ -n "${TORCH_EXT_PYTHON:-}" ]; then
  [ -x "$TORCH_EXT_PYTHON" ] || die "TORCH_EXT_PYTHON names $TORCH_EXT_PYTHON, which is not there."
else
  make_venv requirements.txt ${more_requirements[@]+"${more_requirements[@]}"}
  TORCH_EXT_PYTHON=$PWD/.venv/bin/python
fi
export TORCH_EXT_PYTHON
