package cmd_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the schemas in testdata/schema and docs/reference/commands.md")

// TestDemoJSON runs the demo and then every command on its store, with --json.
// All must state the same facts, in the form that testdata/schema records.
func TestDemoJSON(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "demo")
	kept := formerDemo(t, dir)
	lines := strings.Split(strings.TrimSpace(output(t, 0, "trainer", "demo", "--json", "--dir", dir)), "\n")
	last := lines[len(lines)-1]
	schema(t, "demo", last)
	if _, err := os.Stat(kept); err != nil {
		t.Errorf("the demo removed what is not its own: %v", err)
	}
	var demo struct {
		Accuracy                                                   float64
		BitwiseEqual, ReshardedEqual, ReplayEqual, CorruptionFound bool
		Committed, Aborted                                         int
	}
	decode(t, strings.ReplaceAll(last, "_", ""), &demo)
	if demo.Accuracy < 0.93 || !demo.BitwiseEqual || !demo.ReshardedEqual || !demo.ReplayEqual || !demo.CorruptionFound || demo.Aborted != 1 {
		t.Errorf("the demo ended with %s", last)
	}

	store := "--store=" + filepath.Join(dir, "store")
	all := output(t, 0, "ckptstore", "ls", "--all", "--json", store)
	schema(t, "ls", all)
	state, committed, aborted := facts(t, all, "")
	if committed != demo.Committed || aborted != demo.Aborted {
		t.Errorf("ls has %d committed and %d aborted checkpoints, the demo %d and %d", committed, aborted, demo.Committed, demo.Aborted)
	}

	show := output(t, 0, "ckptstore", "show", "killed@latest", "--json", store)
	schema(t, "show", show)
	var shown struct {
		Checkpoint struct{ ID, Manifest string }
		Tensors    []struct{ FQN string }
	}
	decode(t, show, &shown)
	if state["killed "+shown.Checkpoint.ID] != "committed "+shown.Checkpoint.Manifest || len(shown.Tensors) != 13 {
		t.Errorf("show prints %+v, ls prints %q", shown, state["killed "+shown.Checkpoint.ID])
	}

	// Five ranks would read all tensors between them, regardless of which rank saved them.
	reshard := output(t, 0, "ckptstore", "show", "killed@latest", "--reshard", "5", "--json", store)
	schema(t, "show-reshard", reshard)
	var resharded struct {
		Tensors []struct {
			Shape []int
			Bytes int
		}
		Values []struct {
			Bytes   int
			PerRank bool `json:"per_rank"`
		}
		Reshard struct {
			Bytes, Read int
			Ranks       []struct {
				Missing int
				Files   []struct{ Rank, Bytes, Read int }
			}
		}
	}
	decode(t, reshard, &resharded)
	wanted := 0
	for _, t := range resharded.Tensors {
		if wanted += t.Bytes; len(t.Shape) == 0 {
			wanted += 4 * t.Bytes
		}
	}
	for _, v := range resharded.Values {
		if wanted += v.Bytes; !v.PerRank {
			wanted += 4 * v.Bytes
		}
	}
	if r := resharded.Reshard; r.Bytes != wanted || r.Read < r.Bytes || len(r.Ranks) != 5 || r.Ranks[0].Missing != 0 || len(r.Ranks[4].Files) == 0 {
		t.Errorf("5 ranks want %d bytes; %s", wanted, reshard)
	}

	// The demo keeps no output, and its trainer is this one.
	logs := exec.CommandContext(t.Context(), "ckptstore", "logs", "killed", store)
	said, _ := logs.CombinedOutput()
	if code := logs.ProcessState.ExitCode(); code != 4 || !strings.Contains(string(said), "had no log directory") || strings.Contains(string(said), "version") {
		t.Errorf("logs of the demo's job: exit code %d: %s", code, said)
	}

	events := output(t, 0, "ckptstore", "events", "killed", "--json", store)
	perKind := map[string]int{}
	for line := range strings.Lines(events) {
		var e struct{ Type string }
		decode(t, line, &e)
		if perKind[e.Type]++; len(perKind) == 1 && perKind[e.Type] == 1 {
			var envelope map[string]any // the data is what package events records
			decode(t, line, &envelope)
			delete(envelope, "data")
			text, err := json.Marshal(envelope)
			if err != nil {
				t.Fatal(err)
			}
			schema(t, "event", string(text))
		}
	}
	killedCommits := 0
	for id, s := range state {
		if strings.HasPrefix(id, "killed ") && strings.HasPrefix(s, "committed ") {
			killedCommits++
		}
	}
	if n := perKind["ckpt.checkpoint.committed.v1"]; n != killedCommits {
		t.Errorf("events has %d commits of run killed, ls %d", n, killedCommits)
	}

	metricsAgree(t, store, perKind["ckpt.report.metrics.v1"])

	replay := strings.Split(strings.TrimSpace(output(t, 0, "ckptstore", "replay", "--json", store)), "\n")
	whole := replay[len(replay)-1]
	schema(t, "replay", whole)
	if replayed, _, _ := facts(t, whole, "replay"); !maps.Equal(replayed, state) {
		t.Errorf("replay prints %v, ls prints %v", replayed, state)
	}
	var full struct {
		Replay struct {
			Sequence   int
			ViewsEqual bool `json:"views_equal"`
		}
	}
	decode(t, whole, &full)
	if !full.Replay.ViewsEqual || full.Replay.Sequence != len(replay)-1 {
		t.Errorf("replay of %d events ends with %+v", len(replay)-1, full)
	}
	half := output(t, 0, "ckptstore", "replay", "--until-seq", fmt.Sprint(full.Replay.Sequence/2), "--json", store)
	halfLines := strings.Split(strings.TrimSpace(half), "\n")
	then, committedThen, _ := facts(t, halfLines[len(halfLines)-1], "replay")
	if committedThen == 0 || committedThen >= committed || len(then) >= len(state) {
		t.Errorf("half of the log has %d commits, all of it %d", committedThen, committed)
	}

	verify := output(t, 0, "ckptstore", "verify", "--json", store)
	schema(t, "verify", verify)
	var verified struct {
		Checkpoints int
		Findings    []any
	}
	decode(t, verify, &verified)
	if verified.Checkpoints != committed || len(verified.Findings) != 0 {
		t.Errorf("verify prints %s", verify)
	}

	schema(t, "verify-log", output(t, 0, "ckptstore", "verify", "--log", "--json", store))
	status := output(t, 0, "ckptstore", "views", "status", "--json", store)
	schema(t, "views-status", status)
	var read struct {
		FullRead struct{ Sequence int } `json:"full_read"`
	}
	if decode(t, status, &read); read.FullRead.Sequence != full.Replay.Sequence {
		t.Errorf("the log has %d events, the last full read ended at %d", full.Replay.Sequence, read.FullRead.Sequence)
	}

	damage(t, filepath.Join(dir, "store", "data", "reference", "main", "step-40.a1", "r00002.safetensors"))
	schema(t, "verify-findings", output(t, 6, "ckptstore", "verify", "--json", store))

	offlineAgrees(t, dir, store, state)
}

// metricsAgree checks that metrics --all has every report, and metrics one row for each
// iteration of the line.
func metricsAgree(t *testing.T, store string, reports int) {
	t.Helper()
	type table struct {
		Iterations, Width int
		Rows              []struct {
			Iteration, Reports int
			Metrics            map[string]map[string]any
		}
	}
	var line, all, few table
	text := output(t, 0, "ckptstore", "metrics", "killed", "--metric", "loss", "--json", store)
	schema(t, "metrics", text)
	decode(t, text, &line)
	text = output(t, 0, "ckptstore", "metrics", "killed", "--all", "--json", store)
	schema(t, "metrics-all", text)
	decode(t, text, &all)
	decode(t, output(t, 0, "ckptstore", "metrics", "killed", "--points", "7", "--json", store), &few)
	if len(all.Rows) != reports || len(line.Rows) != line.Iterations || len(all.Rows) <= len(line.Rows) {
		t.Errorf("metrics has %d rows, and with --all %d; the line has %d iterations, the log %d reports", len(line.Rows), len(all.Rows), line.Iterations, reports)
	}
	if len(few.Rows) > 7 || few.Rows[len(few.Rows)-1].Metrics["loss"]["last"] != line.Rows[len(line.Rows)-1].Metrics["loss"]["last"] {
		t.Errorf("in few rows: %+v", few)
	}
}

// damage flips a bit near the end of a file, in one of its last chunks.
func damage(t *testing.T, path string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)-100] ^= 1
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// offlineAgrees moves the log and the views away, and checks ls --offline.
func offlineAgrees(t *testing.T, dir, store string, want map[string]string) {
	for _, part := range []string{"log", "views"} {
		if err := os.Rename(filepath.Join(dir, "store", part), filepath.Join(dir, part)); err != nil {
			t.Fatal(err)
		}
	}
	offline := output(t, 0, "ckptstore", "ls", "--offline", "--json", store)
	schema(t, "ls-offline", offline)
	got, _, _ := facts(t, offline, "")
	want = maps.Clone(want)
	maps.DeleteFunc(want, func(_, s string) bool { return !strings.HasPrefix(s, "committed ") })
	if !maps.Equal(got, want) {
		t.Errorf("ls --offline prints %v, ls --all printed %v", got, want)
	}
	// Without the log, every other command fails with a clear error.
	if out := output(t, 6, "ckptstore", "ls", store); out != "" {
		t.Errorf("ls without a log prints %q", out)
	}
}

// facts returns the state and manifest of each checkpoint in a listing.
func facts(t *testing.T, text, within string) (state map[string]string, committed, aborted int) {
	t.Helper()
	type listing struct {
		Checkpoints []struct{ Run, ID, State, Manifest string }
	}
	var l listing
	if within == "" {
		decode(t, text, &l)
	} else {
		var outer map[string]listing
		decode(t, text, &outer)
		l = outer[within]
	}
	state = map[string]string{}
	for _, c := range l.Checkpoints {
		state[c.Run+" "+c.ID] = c.State + " " + c.Manifest
		switch c.State {
		case "committed":
			committed++
		case "aborted":
			aborted++
		}
	}
	return state, committed, aborted
}

func output(t *testing.T, code int, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if got := cmd.ProcessState.ExitCode(); got != code {
		t.Fatalf("%s %v: exit code %d, want %d: %v\n%s%s", name, args, got, code, err, out, stderr.String())
	}
	return string(out)
}

func decode(t *testing.T, text string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), into); err != nil {
		t.Fatalf("%v in %.300q", err, text)
	}
}

// schema compares the members and types of a JSON text with the recorded ones. A member
// that is gone or has another type breaks compatibility; record a new member with
// -update.
func schema(t *testing.T, name, text string) {
	t.Helper()
	var v any
	decode(t, text, &v)
	paths := map[string]bool{}
	walk(paths, "", v)
	got := strings.Join(slices.Sorted(maps.Keys(paths)), "\n") + "\n"
	file := filepath.Join("testdata", "schema", name+".txt")
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v: record it with -update", err)
	}
	if string(want) != got {
		t.Errorf("%s --json has these members:\n%s\nwant:\n%s", name, got, want)
	}
}

func walk(paths map[string]bool, at string, v any) {
	switch v := v.(type) {
	case map[string]any:
		for k, member := range v {
			walk(paths, at+"."+k, member)
		}
	case []any:
		if len(v) == 0 {
			paths[at+"[]"] = true
		}
		for _, e := range v {
			walk(paths, at+"[]", e)
		}
	default:
		paths[fmt.Sprintf("%s %T", at, v)] = true
	}
}
