package data_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/data"
)

// precious is a directory outside of the data, with files named as those of a
// checkpoint and of an abandoned write.
func precious(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"COMMIT.json", "r00000.safetensors", "thesis.tex", "sub/id_rsa"} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(name), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// whole fails if precious files have changed.
func whole(t *testing.T, dir string) {
	t.Helper()
	files := 0
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if files++; err == nil && !strings.HasSuffix(path, string(text)) {
			t.Errorf("%s has %q", path, text)
		}
		return err
	})
	if err != nil || files != 4 {
		t.Errorf("%d of 4 precious files are left, %v", files, err)
	}
}

// plant makes a link.
func plant(t *testing.T, to, path string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.Symlink(to, path)); err != nil {
		t.Fatal(err)
	}
}

// The leftovers of an aborted save are removed, and links in or in place of its directory, but
// not the targets of links.
func TestRemoveLinks(t *testing.T) {
	for name, lay := range map[string]func(t *testing.T, dir, away string){
		"its place":   func(t *testing.T, dir, away string) { plant(t, away, dir) },
		"a directory": func(t *testing.T, dir, away string) { plant(t, away, filepath.Join(dir, "sub")) },
		"below":       func(t *testing.T, dir, away string) { plant(t, away, filepath.Join(dir, "a", "b", "sub")) },
		"a receipt":   func(t *testing.T, dir, away string) { plant(t, away+"/COMMIT.json", filepath.Join(dir, "COMMIT.json")) },
		"a manifest":  func(t *testing.T, dir, away string) { plant(t, away+"/COMMIT.json", filepath.Join(dir, "manifest-00")) },
		"a pipe": func(t *testing.T, dir, _ string) {
			if err := errors.Join(os.MkdirAll(dir, 0o755), unix.Mkfifo(filepath.Join(dir, "COMMIT.json"), 0o600)); err != nil {
				t.Fatal(err)
			}
		},
		"a pipe in its place": func(t *testing.T, dir, _ string) {
			if err := errors.Join(os.MkdirAll(filepath.Dir(dir), 0o755), unix.Mkfifo(dir, 0o600)); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root, away := onDisk(t), precious(t)
			dir := filepath.Join(root.Dir(), ref.String())
			lay(t, dir, away)
			if err := root.Remove(t.Context(), ref); err != nil {
				t.Error(err)
			}
			if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("it is still there: %v", err)
			}
			whole(t, away)
		})
	}
}

// A link above the checkpoint is not passed, and named.
func TestLinksAbove(t *testing.T) {
	for _, up := range []int{1, 2, 3} {
		root, away := onDisk(t), precious(t)
		at := filepath.Join(root.Dir(), ref.String())
		for range up {
			at = filepath.Dir(at)
		}
		plant(t, away, at)
		for what, err := range map[string]error{
			"remove": root.Remove(t.Context(), ref), "remove committed": root.RemoveCommitted(t.Context(), ref),
			"set up": root.Writer(ref).SetUp(t.Context(), true),
		} {
			if !errors.As(err, new(*beneath.TypeError)) || !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), at+" is a symbolic link") {
				t.Errorf("%s with a link at %s: %v", what, at, err)
			}
		}
		whole(t, away)
		if up == 3 { // that of all data
			continue
		}
		receipts, damaged, err := root.Checkpoints(t.Context())
		if err != nil || len(receipts) > 0 || len(damaged) != 1 || !damaged[0].Link() || damaged[0].File != at {
			t.Errorf("listed %v, %v, %v", receipts, damaged, err)
		}
		if newest, damaged, err := root.Newest(t.Context(), 10, 10); err != nil || len(newest) > 0 || len(damaged) != 1 || damaged[0].File != at {
			t.Errorf("newest %v, %v, %v", newest, damaged, err)
		}
		if links, err := root.Links(t.Context()); err != nil || len(links) != 1 || links[0].File != at {
			t.Errorf("links %v, %v", links, err)
		}
		if err := root.Examine(t.Context(), func(data.Examined) error { return nil }); !errors.As(err, new(*beneath.TypeError)) {
			t.Errorf("examined past a link: %v", err)
		}
	}
}

// A checkpoint with a file that was moved away and linked to is damaged, and a
// save makes no second name of the link.
func TestLinkedFiles(t *testing.T) {
	root := onDisk(t)
	m := every()
	receipt := m.save(t, root)
	dir := filepath.Join(root.Dir(), ref.String())
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) < 4 {
		t.Fatal(entries, err)
	}
	for _, e := range entries {
		path, away := filepath.Join(dir, e.Name()), filepath.Join(t.TempDir(), e.Name())
		if err := os.Rename(path, away); err != nil {
			t.Fatal(err)
		}
		plant(t, away, path)
		report := verify(t, root, receipt.Manifest)
		if len(report.Findings) == 0 || report.Findings[0].Kind != data.Unreadable || !strings.Contains(report.Findings[0].Problem, path+" is a symbolic link") {
			t.Errorf("%s: found %v", e.Name(), report.Findings)
		}
		if err := os.Rename(away, path); err != nil {
			t.Fatal(err)
		}
	}
	if report := verify(t, root, receipt.Manifest); !report.Clean() {
		t.Errorf("put back: %v", report.Findings)
	}
	away := filepath.Join(t.TempDir(), "moved")
	if err := os.Rename(dir, away); err != nil {
		t.Fatal(err)
	}
	plant(t, away, dir)
	if report := verify(t, root, receipt.Manifest); report.Clean() || !strings.Contains(report.Findings[0].Problem, dir+" is a symbolic link") {
		t.Errorf("all of it: %v", report.Findings)
	}
}

// The leftovers of killed processes are removed, and files that were put in their place.
func TestSweepLinks(t *testing.T) {
	root, away := onDisk(t), precious(t)
	pending := filepath.Join(root.Dir(), ".pending")
	plant(t, away, filepath.Join(pending, "0011223344556677"))
	plant(t, away, filepath.Join(pending, "1011223344556677", "sub"))
	if err := unix.Mkfifo(filepath.Join(pending, "2011223344556677"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := root.SweepPending(t.Context()); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(pending); err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
	whole(t, away)
}
