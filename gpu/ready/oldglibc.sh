#!/usr/bin/env bash
# Builds ./gpu/ready against an older C library, so that it runs on older machines.
#
#	gpu/ready/oldglibc.sh OUTPUT
#
#	SUITE    the Debian release that provides the C library (bullseye: glibc 2.31)
#	MIRROR   where to download it (http://deb.debian.org/debian)
#
# Needs Debian's apt-get and dpkg, gcc, objdump and Go. Installs nothing. Prints the
# newest version of glibc that the binary requires.
set -euo pipefail
output=$(realpath -m "${1:?usage: gpu/ready/oldglibc.sh OUTPUT}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/lists/partial "$work"/cache/archives/partial "$work/root" "$work/deb"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${MIRROR:-http://deb.debian.org/debian} ${SUITE:=bullseye} main" >"$work/sources.list"
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
	-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update
(cd "$work/deb" && "${apt[@]}" download "libc6/$SUITE" "libc6-dev/$SUITE" "linux-libc-dev/$SUITE")
for package in "$work"/deb/*.deb; do
	dpkg -x "$package" "$work/root"
done
# Links to absolute paths would lead to this machine's own library.
find "$work/root" -type l -lname '/*' | while read -r link; do
	ln -sfn "$work/root$(readlink "$link")" "$link"
done
library=$work/root/usr/lib/x86_64-linux-gnu
printf '#!/bin/sh\nexec gcc --sysroot=%s -B%s/ -L%s -L%s "$@"\n' "$work/root" "$library" "$library" "$work/root/lib/x86_64-linux-gnu" >"$work/cc"
chmod +x "$work/cc"
CGO_ENABLED=1 CC=$work/cc go build -trimpath -o "$output" ./gpu/ready
objdump -T "$output" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1
