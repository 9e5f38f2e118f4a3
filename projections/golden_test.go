package projections

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
)

var update = flag.Bool("update", false, "write golden files of a new version of the folds; existing ones are never changed")

// goldenLogs are the recorded logs with their SHA-256, in the order of recording. They
// represent the logs in users' stores, so they are never edited: a later kind gets its
// own log.
var goldenLogs = []struct{ name, sum string }{
	{"golden-log-v1", "15f76672b0821d2f78ee05efa144f12840282f06374713540a271fecdb4df0cf"},
	{"golden-log-tags", "642ad735c9428dec07eea6e3c2debf48ad9ea63c1e4da4325012f9fcaa373d52"},
	{"golden-log-sessions", "0f1cff4f41a7f7f98d6db8651d17c22173c70a98947a9f6dc437ca83df8b4c3c"},    // processes whose exit was not observed, and a load from another run
	{"golden-log-voids", "2c7143fd3f3ec3c3b7d2aa0e6d98923a3f3b77ab590a14adc218aeaca2c1668d"},       // invalid messages, and their record
	{"golden-log-nodes", "25804c4e3c7f61caeb5e447ef6ec4c528142d3a6a69a3e2c0d0ef2ea19b8b23b"},       // saves of two nodes
	{"golden-log-uploads", "4dbf92f68cd5abca04d8754f842bcc2361d2672d7a41ace27c3d872fe6857be6"},     // a save to a bucket, which the next trainer finishes
	{"golden-log-replicas", "c0db701aab40cf14333d390b255d36cea8a48e750fe91ac9032740ba914ddab9"},    // saves whose slots have a copy on another node
	{"golden-log-excluded", "f64d514a1f0c43cef1ab60375f77f535918dfc630b2efff603b7b9b423cfe5a2"},    // a node that was measured and excluded
	{"golden-log-search", "29bd22efb3ada43effc82fba4e9d371558eedcfa6cc65f91a5232260e50f4eca"},      // trials of a search, whose tuner was killed
	{"golden-log-audit", "87b4d1e6ae53fa333ccbe7c97efbddadee09851918d5ce3dcda573e188f6ff13"},       // a run map in the log
	{"golden-log-slow", "95077cc1f43a550838f875ffccf98d7c0a5906c6ee0ea9f86c28af2d59782663"},        // nodes that are slow and well again, and their clocks
	{"golden-log-access", "29c630b6a71e66a3473baa1d43e4f8e652b8549eac74c39180aa70c4cac4cc85"},      // a user who was given access and lost it
	{"golden-log-coordinator", "95de6a7bfb7524ec59b5cc2f4c031a23b89f2869f9e775db7b12828c30ccddc7"}, // a living group that another node coordinates
	{"golden-log-keys", "7ccac50a661ff6cebe870de85f952545aceee68c34114250e132596846012805"},        // keys that sign decisions, a signed one, and their end
	{"golden-log-terms", "50170287bc65ced1081183dc375d99df8fd0a5acc16982dad5b3e84625fb5931"},       // the same, and its first coordinator records late that the group has stopped
	{"golden-log-ends", "e9904d6b44fce05563061ad2dfcf69b09dba83ad732930beb078ba503383a91a"},        // the same, and its first coordinator records late that the job has ended
}

func readGolden(t *testing.T, name, want string) []events.Recorded {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name+".jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprintf("%x", sha256.Sum256(text)); got != want {
		t.Fatalf("%s has SHA-256 %s, want %s: it was edited; take the change back", name, got, want)
	}
	var log []events.Recorded
	for line := range bytes.Lines(text) {
		var r events.Recorded
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatalf("line %d: %v", len(log)+1, err)
		}
		if log = append(log, r); r.Sequence != uint64(len(log)) {
			t.Fatalf("event %d is in line %d", r.Sequence, len(log))
		}
	}
	return log
}

// TestGoldenLog checks that old recorded logs are replayed to the states recorded with
// them, by every version of the program with the same version of the folds.
func TestGoldenLog(t *testing.T) {
	kinds, names := map[events.Kind]bool{}, map[string]bool{}
	for _, g := range goldenLogs {
		if names[g.name] {
			t.Errorf("%s is listed twice", g.name)
		}
		names[g.name] = true
		log := readGolden(t, g.name, g.sum)
		rows := NewMemory()
		for _, r := range log {
			kinds[r.Kind] = true
			if err := Apply(rows, r); err != nil {
				t.Fatal(err)
			}
		}
		got := goldenState(t, rows, len(log))
		path := filepath.Join("testdata", fmt.Sprintf("%s.folds-%d.txt", g.name, Version))
		want, err := os.ReadFile(path)
		if os.IsNotExist(err) && *update {
			want = []byte(got)
			err = os.WriteFile(path, want, 0o644)
		}
		if err != nil {
			t.Fatalf("%v: the version of the folds is new; record its state with -update", err)
		}
		if got != string(want) {
			t.Errorf("the recorded log is folded to another state now. Views on disk are kept as long as projections.Version (%d) stays: "+
				"raise it, and record the new state with -update.\n%s", Version, lineDiff(string(want), got))
		}
	}
	for _, k := range events.Pattern("*.*").Kinds() {
		if !kinds[k] {
			t.Errorf("no log has an event of kind %s: record another log that has one", k)
		}
	}
}

// goldenState returns the digest of all rows, and the checkpoints for people to
// compare.
func goldenState(t *testing.T, rows *Memory, events int) string {
	t.Helper()
	var b strings.Builder
	sum, err := Digest(rows)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(&b, "folds %d\nevents %d\nrows %d\ndigest %x\n", Version, events, rows.Len(), sum)
	runs, err := Runs(rows)
	if err != nil {
		t.Fatal(err)
	}
	for _, run := range runs {
		list, err := Checkpoints(rows, run.Name, true)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range list {
			fmt.Fprintf(&b, "%s/%s@%s %s visible=%v parent=%q bytes=%d\n", c.Run, c.Trial, c.ID, c.State, c.Visible(), c.Parent, c.Bytes)
		}
	}
	return b.String()
}

// lineDiff returns the lines that differ.
func lineDiff(want, got string) string {
	var b strings.Builder
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range max(len(w), len(g)) {
		var before, now string
		if i < len(w) {
			before = w[i]
		}
		if i < len(g) {
			now = g[i]
		}
		if before != now {
			fmt.Fprintf(&b, "- %s\n+ %s\n", before, now)
		}
	}
	return b.String()
}
