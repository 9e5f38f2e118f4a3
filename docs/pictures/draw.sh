#!/usr/bin/env bash
# Draws the pictures of this directory from their text, and records the demo.
#
#	draw.sh [OUT]    OUT: another directory for the pictures
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:-$here}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for source in "$here"/*.d2; do
	svg=$out/$(basename "$source" .d2).svg
	layout=dagre
	[ "$(basename "$source")" = architecture.d2 ] && layout=elk
	go run oss.terrastruct.com/d2@v0.7.2 --theme 0 --layout "$layout" --pad 20 "$source" "$svg"
	# A test compares this digest with the text.
	echo "<!-- drawn from $(basename "$source") $(sha256sum <"$source" | cut -d' ' -f1) -->" >>"$svg"
	chmod 644 "$svg"
done
cd "$here/../.."
go build -o "$work/trainer" ./cmd/trainer
cd "$work"
python3 "$here/record.py" "$out/demo.svg" --title "trainer demo" -- "$work/trainer" demo
