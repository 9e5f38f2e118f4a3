#!/usr/bin/env bash
# again.sh DIR WORK ARCH [PYTHON]
#
# Makes the packages of DIR again, from a copy of the repository in WORK, and fails if a byte
# differs. With FRESH=1 it compiles everything again, in place of taking what the Go command has
# cached.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
first=$(realpath "$1")
work=$(realpath "$2")
git -c safe.directory='*' clone --quiet --no-hardlinks . "$work/another/place"
# Changes that are not committed.
git -c safe.directory='*' diff --binary HEAD | git -C "$work/another/place" apply --allow-empty
cd "$work/another/place"
[ -z "${FRESH:-}" ] || export GOCACHE=$work/cache
umask 077
go tool -modfile=tools.mod task release OUT="$work/again" ARCH="$3" PYTHON="${4:-}" >/dev/null
(cd "$first" && sha256sum --quiet --check SHA256SUMS)
diff -r "$first" "$work/again"
echo "$(wc -l <"$work/again/SHA256SUMS") packages, made twice: equal bytes"
