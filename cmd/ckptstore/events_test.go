package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
)

// pipe is an output that fails after some writes, as a pipe whose reader has died.
type pipe struct {
	bytes.Buffer
	left int
}

var errClosedPipe = errors.New("the reader is gone")

func (p *pipe) Write(text []byte) (int, error) {
	if p.left--; p.left < 0 {
		return 0, errClosedPipe
	}
	return p.Buffer.Write(text)
}

// TestCursorStaysBeforeWhatWasNotPrinted: the next subscriber of a cursor starts with
// the first event that could not be printed.
func TestCursorStaysBeforeWhatWasNotPrinted(t *testing.T) {
	short, err := os.MkdirTemp("/tmp", "ck") //nolint:usetesting // a socket's path must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(short) })
	t.Setenv("XDG_RUNTIME_DIR", short)
	dir := filepath.Join(t.TempDir(), "store")
	if _, err := store.Init(t.Context(), dir, ""); err != nil {
		t.Fatal(err)
	}
	s, err := store.Open(t.Context(), store.Options{Location: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	for i := 1; i <= 8; i++ {
		fact, err := events.NewFact(store.Stamp("test"), events.Scope{Run: "r", Trial: "main", Actor: events.Rank(0)},
			events.Metrics{Attempt: 1, Iteration: i})
		if err == nil {
			_, err = s.Log.Append(t.Context(), fact)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	sel := selection{types: []events.Pattern{"report.*"}, from: 1, start: "all", cursor: "c"}
	var got []uint64
	for _, left := range []int{0, 1, 2, 0, 99, 99} {
		out := &pipe{left: left}
		a := &app{Console: &console.Console{Out: out, Err: out, Format: "jsonl"}}
		if err := a.events(t.Context(), s, sel); (left != 99) != errors.Is(err, errClosedPipe) || left == 99 && err != nil {
			t.Fatalf("after %v: %v", got, err)
		}
		for line := range bytes.Lines(out.Bytes()) {
			var r events.Recorded
			if err := json.Unmarshal(line, &r); err != nil {
				t.Fatal(err)
			}
			got = append(got, r.Sequence)
		}
	}
	for i, seq := range got {
		if seq != uint64(i+2) {
			t.Fatalf("printed are %v", got)
		}
	}
	if len(got) != 8 {
		t.Errorf("printed are %v", got)
	}
}
