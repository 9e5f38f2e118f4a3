package terminal_test

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/terminal"
)

// The output does not depend on how the input is split into calls.
func TestWriterIsText(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := hostile().Draw(t, "text")
		var out bytes.Buffer
		w := terminal.NewWriter(&out)
		for rest := []byte(text); len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "length of a call")
			part := bytes.Clone(rest[:n])
			if got, err := w.Write(part); got != n || err != nil {
				t.Fatalf("Write of %d bytes: %d, %v", n, got, err)
			}
			clear(part) // it belongs to the caller again
			rest = rest[n:]
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		if got, want := out.String(), terminal.Text(text); got != want {
			t.Fatalf("%q is written as %q, want %q", text, got, want)
		}
	})
}

func TestWriterHidesNoError(t *testing.T) {
	t.Parallel()
	r, out := io.Pipe()
	closed := errors.New("the reader is gone")
	if err := r.CloseWithError(closed); err != nil {
		t.Fatal(err)
	}
	w := terminal.NewWriter(out)
	if _, err := w.Write([]byte("text\xe2")); !errors.Is(err, closed) {
		t.Errorf("Write: %v, want %v", err, closed)
	}
	if err := w.Flush(); !errors.Is(err, closed) {
		t.Errorf("Flush of the beginning of a character: %v, want %v", err, closed)
	}
}
