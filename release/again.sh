#!/usr/bin/env bash
# again.sh DIR WORK ARCH [PYTHON [ONLY]]
#
# Makes the packages of DIR again, or ONLY wheels or packages, from a copy of the repository
# in WORK, and fails if a byte differs. With FRESH=1 it compiles everything again, in place
# of taking what the Go command has cached.
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
go tool -modfile=tools.mod task release OUT="$work/again" ARCH="$3" PYTHON="${4:-}" ONLY="${5:-}" >/dev/null
(cd "$first" && sha256sum --quiet --check SHA256SUMS)
if [ -z "${5:-}" ]; then
	diff -r "$first" "$work/again"
else
	[ -s "$work/again/SHA256SUMS" ] || { echo "no package was made again" && exit 1; }
	(cd "$work/again" && for file in *; do
		[ "$file" = SHA256SUMS ] || cmp "$first/$file" "$file"
	done)
fi
echo "$(wc -l <"$work/again/SHA256SUMS") packages, made twice: equal bytes"
