#!/usr/bin/env bash
# Judges the page.
#
#	run.sh check            build it again and compare with the committed files
#	run.sh browse [DIR]     show a demo's store in Chromium; DIR gets screenshots
#	run.sh pixel [N]        print the time from N appended events to the changed picture
#	run.sh speed [STORE]    print the times of cold loads; without STORE, of one with 10,000
#	                        checkpoints and 1,000,000 reports, which takes minutes to make
#	run.sh spike [STORE]    find the pixels of a spike among a million values, and of a NaN, at every zoom;
#	                        STORE is one of ckptstore bench age --spike 777777 --keep
#	run.sh answers STORE [N] print the times of the API's answers, N (300) of each kind, and of a drag of
#	                        the moment, on a large store, such as one of ckptstore bench age --keep
#	run.sh pictures DIR     take the pictures of docs/howto/ui.md; needs pngquant
#
# All need node_modules, as of `npm ci`. CHROMIUM names the browser (chromium).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ ! -d node_modules ]; then
	echo "internal/page/node_modules is missing: run npm ci in internal/page" >&2
	exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

case ${1:-} in
check)
	npm run --silent check
	npm run --silent build -- --outDir "$work/dist" --emptyOutDir --logLevel warn
	if ! diff -r dist "$work/dist"; then
		echo "the page differs from its source: run 'task page' and commit internal/page/dist" >&2
		exit 1
	fi
	npm run --silent unit
	echo "the page is what its source gives: $(find dist -type f | wc -l) files"
	;;
browse)
	(cd ../.. && go build -o "$work/bin/" ./cmd/ckptstore ./cmd/trainer)
	PAGE_BIN=$work/bin PAGE_WORK=$work PAGE_SHOTS=${2:-} npm run --silent browse
	;;
pixel)
	(cd ../.. && go build -o "$work/bin/" ./cmd/ckptstore ./cmd/trainer)
	PAGE_BIN=$work/bin node test/pixel.mjs "${2:-50}"
	;;
speed)
	(cd ../.. && go build -o "$work/bin/" ./cmd/ckptstore)
	store=${2:-}
	if [ -z "$store" ]; then
		"$work/bin/ckptstore" bench age --checkpoints 10000 --events 1070400 --runs 50 --rounds 1 --verify-log=false --keep --dir "$work"
		store=$(echo "$work"/age-*/store)
	fi
	PAGE_BIN=$work/bin node test/speed.mjs "$store"
	;;
spike)
	(cd ../.. && go build -o "$work/bin/" ./cmd/ckptstore)
	store=${2:-}
	if [ -z "$store" ]; then
		"$work/bin/ckptstore" bench age --checkpoints 100 --events 1000000 --runs 1 --rounds 1 --spike 777777 --verify-log=false --keep --dir "$work"
		store=$(echo "$work"/age-*/store)
	fi
	PAGE_BIN=$work/bin node test/spike.mjs "$store" 777777
	;;
answers)
	(cd ../.. && go build -o "$work/bin/" ./cmd/ckptstore)
	PAGE_BIN=$work/bin node test/answers.mjs "$2" "${3:-300}"
	;;
pictures)
	(cd ../.. && go build -o "$work/bin/" ./cmd/ckptstore ./cmd/trainer)
	PAGE_BIN=$work/bin PAGE_PICTURES=$2 node test/pictures.mjs
	pngquant --force --strip --ext .png 64 "$2"/page-*.png
	;;
*)
	echo "usage: run.sh check | browse [DIR] | pixel [N] | speed [STORE] | spike [STORE] | answers STORE [N] | pictures DIR" >&2
	exit 2
	;;
esac
