package store

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestRuntimeDirectory(t *testing.T) {
	id := NewID()
	name := "ckptstore-" + id[len(id)-12:]
	mine := fmt.Sprintf("ckptstore-%d", os.Getuid())
	near := func(t *testing.T) string { return shortDir(t, "") }
	far := func(t *testing.T) string { return shortDir(t, strings.Repeat("x", 100)) }
	for _, c := range []struct {
		name     string
		xdg, tmp func(t *testing.T) string
		spoil    func(t *testing.T, xdg, tmp string)
		inTmp    bool
		says     string // "": no error
	}{
		{name: "as usual", xdg: near, tmp: near},
		{name: "not set", xdg: func(*testing.T) string { return "" }, tmp: near, inTmp: true},
		{name: "not there", xdg: func(*testing.T) string { return "/nowhere" }, tmp: near, inTmp: true},
		{name: "too long", xdg: far, tmp: near, inTmp: true},
		{name: "all too long", xdg: far, tmp: far, says: "XDG_RUNTIME_DIR"},
		{name: "readable by others", xdg: near, tmp: near, says: "not private", spoil: func(t *testing.T, xdg, _ string) {
			if err := os.Mkdir(filepath.Join(xdg, name), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(filepath.Join(xdg, name), 0o755); err != nil {
				t.Fatal(err)
			}
		}},
		{name: "a link to elsewhere", xdg: near, tmp: near, says: "not private", spoil: func(t *testing.T, xdg, tmp string) {
			if err := os.Symlink(tmp, filepath.Join(xdg, name)); err != nil {
				t.Fatal(err)
			}
		}},
		{name: "a file", xdg: near, tmp: near, says: "not private", spoil: func(t *testing.T, xdg, _ string) {
			write(t, filepath.Join(xdg, name), "")
		}},
		{name: "others may write above it", xdg: func(*testing.T) string { return "" }, tmp: near, says: "not private", spoil: func(t *testing.T, _, tmp string) {
			if err := os.Mkdir(filepath.Join(tmp, mine), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(filepath.Join(tmp, mine), 0o777); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			xdg, tmp := c.xdg(t), c.tmp(t)
			if c.spoil != nil {
				c.spoil(t, xdg, tmp)
			}
			t.Setenv("XDG_RUNTIME_DIR", xdg)
			t.Setenv("TMPDIR", tmp)
			got, err := runtimeDir(id)
			if c.says != "" {
				wrong(t, err, nil, c.says)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			want := filepath.Join(xdg, name)
			if c.inTmp {
				want = filepath.Join(tmp, mine, name)
			}
			if got != want {
				t.Errorf("%s, want %s", got, want)
			}
		})
	}
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
