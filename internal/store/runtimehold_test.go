package store

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"testing"
)

// TestRuntimeDirectoryGoes: the last process that closes a store removes its
// runtime directory.
func TestRuntimeDirectoryGoes(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner := open(t, dir)
	second := open(t, dir)
	at := owner.Runtime
	shut(t, second)
	if _, err := os.Stat(at); err != nil {
		t.Errorf("the directory of an open store: %v", err)
	}
	shut(t, owner)
	if _, err := os.Stat(at); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory of a closed store is left: %v", err)
	}
	s := open(t, dir)
	must(t, s, "run", begun("step-1"))
	shut(t, s)
	url, p := server(t)
	if _, err := Init(t.Context(), url, t.TempDir()); err != nil {
		t.Fatal(err)
	}
	s = open(t, url)
	at = s.Runtime
	shut(t, s)
	if _, err := os.Stat(at); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory of a closed store with a URL is left: %v", err)
	}
	p.end()
}

// TestLongRuntimeDirectory opens one for real.
func TestLongRuntimeDirectory(t *testing.T) {
	dir := made(t)
	owner := open(t, dir)
	t.Setenv("TMPDIR", shortDir(t, ""))
	t.Setenv("XDG_RUNTIME_DIR", shortDir(t, strings.Repeat("x", 100)))
	second := open(t, dir)
	if second.Owns() || second.Runtime == owner.Runtime {
		t.Errorf("owns: %v, in %s", second.Owns(), second.Runtime)
	}
	must(t, second, "run", begun("step-1"))
	shut(t, second)
	shut(t, owner)
	must(t, open(t, dir), "run", begun("step-2"))
}
