package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/projections"
)

// Times are printed in the local zone, which is fixed here, once: a server that a test
// started may still read it while the next test runs.
func TestMain(m *testing.M) {
	time.Local = time.UTC
	os.Exit(m.Run())
}

// TestGoldenLs: ls prints the recorded log of package projections as it did when the
// log was recorded.
func TestGoldenLs(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "projections", "testdata", "golden-log-v1.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	rows := projections.NewMemory()
	for line := range bytes.Lines(text) {
		var r events.Recorded
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		if err := projections.Apply(rows, r); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	a := &app{Console: &console.Console{Out: &out, Err: &out, Format: "table"}}
	for _, all := range []bool{false, true} {
		l := answer.Listing{Checkpoints: []answer.Listed{}}
		for _, run := range []string{"killed", "sweep"} {
			list, err := projections.Checkpoints(rows, run, all)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range list {
				l.Checkpoints = append(l.Checkpoints, answer.ListedFrom(c))
			}
		}
		if err := a.printListing(l); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(filepath.Join("testdata", "golden-ls.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if out.String() != string(want) {
		t.Errorf("ls prints\n%s\nwant\n%s", out.String(), want)
	}
}
