package sockets

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/ckptstore/ckptstore/internal/natstest"
)

func TestMain(m *testing.M) { natstest.Main(m) }

// short makes a directory with a path that is short enough for sockets, unless its name is long.
func short(t *testing.T, name string) string {
	t.Helper()
	top, err := os.MkdirTemp("/tmp", "ck") //nolint:usetesting // a short path, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(top) })
	dir := filepath.Join(top, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestRuntimeDirectory(t *testing.T) {
	id := uuid.NewString()
	name := "ckptstore-" + id[len(id)-12:]
	mine := fmt.Sprintf("ckptstore-%d", os.Getuid())
	near := func(t *testing.T) string { return short(t, "") }
	far := func(t *testing.T) string { return short(t, strings.Repeat("x", 100)) }
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
			if err := os.WriteFile(filepath.Join(xdg, name), nil, 0o600); err != nil {
				t.Fatal(err)
			}
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
			got, err := Dir(id)
			if c.says != "" {
				if err == nil || !strings.Contains(err.Error(), c.says) {
					t.Errorf("error %v, want %q in it", err, c.says)
				}
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
