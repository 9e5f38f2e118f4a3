#!/usr/bin/env bash
# Has schemathesis judge the HTTP API of a demo's store, by its own document: as a reader, and
# twice as an operator, whose decisions change the store.
#
#	judge.sh ST [SECONDS [PASS…]]   ST is the program schemathesis; SECONDS for each pass (60);
#	                                passes are reader:named, operator:decided and operator:any
#
# BIN names a folder with ckptstore and trainer; without it they are built. A failure is printed
# with the request as a curl command. SEED repeats a run.
set -euo pipefail
st=$(realpath "$1") seconds=${2:-60} seed=${SEED:-$RANDOM}
passes=("${@:3}")
[ ${#passes[@]} -gt 0 ] || passes=(reader:named operator:decided operator:any)
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

work=$(mktemp -d)
server=
# shellcheck disable=SC2317 # called by the trap
finish() {
	if [ -n "$server" ]; then
		kill "$server" 2>/dev/null || true
		wait "$server" 2>/dev/null || true
	fi
	rm -rf "$work"
}
trap finish EXIT
if [ -z "${BIN:-}" ]; then
	BIN=$work/bin
	go build -o "$BIN/" ./cmd/ckptstore ./cmd/trainer
fi

"$BIN/trainer" demo --dir "$work/demo" >"$work/demo.txt" 2>&1 || { cat "$work/demo.txt"; exit 1; }
for user in reader operator; do
	printf '%s %s %s\n' "$user" "$user" "$(printf 'token-of-%s' "$user" | sha256sum | cut -d' ' -f1)"
done >"$work/users"
chmod 600 "$work/users"
touch "$work/serve.txt"
"$BIN/ckptstore" serve --store "$work/demo/store" --http 127.0.0.1:0 --http-users "$work/users" 2>"$work/serve.txt" &
server=$!
for _ in $(seq 1200); do
	url=$(sed -n 's/.*HTTP API at \(http[^;]*\)\/;.*/\1/p' "$work/serve.txt")
	[ -n "$url" ] && break
	sleep 0.1
done
[ -n "${url:-}" ] || { cat "$work/serve.txt"; exit 1; }
# With names that are there, requests come further; and without at_least they do not wait.
cat >"$work/named.toml" <<'TOML'
[parameters]
"path.run" = "killed"
"path.id" = "latest"
"query.trial" = "main"
"query.at_least" = 0
"query.ref" = "killed@latest"
"query.a" = "killed"
"query.b" = "reference"
TOML
# Lengths of names count bytes, and a schema counts characters: names in decisions are ASCII.
printf '[generation]\ncodec = "ascii"\n' >"$work/any.toml"
# 412 is the answer to an If-Match with an older decision.
cat >>"$work/any.toml" <<'TOML'
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "3xx", "401", "403", "404", "409", "412", "429"]
TOML
cat "$work/named.toml" "$work/any.toml" >"$work/decided.toml"
failed=0
for pass in "${passes[@]}"; do
	echo "-- as ${pass%:*}, $pass, seed $seed"
	# The stream never ends. at_least waits for 10 s.
	(cd "$work" && "$st" --config-file "$work/${pass#*:}.toml" run "$url/api/v1/openapi.json" --header "Authorization: Bearer token-of-${pass%:*}" \
		--exclude-operation-id stream --checks all --max-examples 20 --max-time "$seconds" --seed "$seed" \
		--suppress-health-check all --request-timeout 60 --max-response-time 30 --continue-on-failure --output-sanitize false --no-color) || failed=1
done
exit "$failed"
