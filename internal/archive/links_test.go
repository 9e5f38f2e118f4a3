package archive

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/beneath"
)

// planted replaces a file with something that another user could plant there: a
// symbolic link to the original, or a pipe. It returns the new path of the file.
func planted(t *testing.T, path string, pipe bool) (away string) {
	t.Helper()
	away = filepath.Join(t.TempDir(), filepath.Base(path))
	err := os.Rename(path, away)
	if err == nil && pipe {
		err = unix.Mkfifo(path, 0o600)
	} else if err == nil {
		err = os.Symlink(away, path)
	}
	if err != nil {
		t.Fatal(err)
	}
	return away
}

// TestPlantedSegment checks that no operation reads a segment that is a symbolic link
// or a pipe, and that the error names it.
func TestPlantedSegment(t *testing.T) {
	t.Parallel()
	for _, pipe := range []bool{false, true} {
		dir := t.TempDir()
		limits := Limits{Messages: 10, Bytes: 1 << 20}
		had := sealed(t, dir, 10, limits)
		end := sealed(t, dir, 20, limits)
		all, err := list(dir)
		if err != nil || len(all) != 2 {
			t.Fatalf("%d segments, %v", len(all), err)
		}
		for i, s := range all {
			away := planted(t, s.Path, pipe)
			for what, do := range map[string]func() error{
				"opened and read": func() error {
					a, err := Open(dir, store, end)
					if err != nil {
						return err
					}
					_, err = a.At(s.First)
					return errors.Join(err, a.Close())
				},
				"verified": func() error {
					_, err := Verify(s.Path, store, Link{})
					return err
				},
				"verified ahead": func() error { return VerifyAhead(dir, store, Link{}, end) },
				"looked up": func() error {
					_, err := At(dir, store, Link{Last: s.Last})
					return err
				},
				"set aside": func() error {
					_, err := SetAside(dir, s.First)
					return err
				},
				"taken as sealed ahead": func() error {
					if i == 0 {
						_, err := Ahead(dir, store, Link{})
						return err
					}
					_, err := Ahead(dir, store, had)
					return err
				},
			} {
				err := do()
				var is *beneath.TypeError
				if !errors.As(err, &is) || is.Path != s.Path || is.Link() == pipe || !errors.Is(err, fs.ErrPermission) {
					t.Errorf("segment %d, pipe %v, %s: %v", i, pipe, what, err)
				}
			}
			if err := os.Rename(away, s.Path); err != nil {
				t.Fatal(err)
			}
		}
		if err := opened(t, dir, end).Verify(t.Context(), nil); err != nil {
			t.Error(err)
		}
	}
}

// TestPlantedHeads checks that heads behind a link are derived again in place of the
// link, and that its target stays unchanged.
func TestPlantedHeads(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	end := sealed(t, dir, 20, DefaultLimits)
	path := filepath.Join(dir, headsName(end.Last))
	away := planted(t, path, false)
	if err := os.WriteFile(away, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	opened(t, dir, end)
	if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() {
		t.Errorf("the heads are %v, %v", info, err)
	}
	if got, err := os.ReadFile(away); err != nil || string(got) != "precious" {
		t.Errorf("behind the link there is %q, %v", got, err)
	}
}

// TestPlantedDirectory checks that an archive whose directory is a link is neither read
// nor written.
func TestPlantedDirectory(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "sealed")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	end := sealed(t, dir, 20, DefaultLimits)
	away := planted(t, dir, false)
	for what, do := range map[string]func() error{
		"opened": func() error {
			_, err := Open(dir, store, end)
			return err
		},
		"sealed": func() error {
			_, err := Seal(dir, store, end, DefaultLimits, messages(end.Last, 1))
			return err
		},
		"extended": func() error { return Extend(dir, store, Link{}, end) },
		"tidied":   func() error { return Tidy(dir, Link{}) },
	} {
		if err := do(); !errors.As(err, new(*beneath.TypeError)) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if all, err := os.ReadDir(away); err != nil || len(all) != 2 {
		t.Errorf("%d files, %v", len(all), err)
	}
}

// BenchmarkOpen measures opening an archive, and each segment that is read.
func BenchmarkOpen(b *testing.B) {
	dir := b.TempDir()
	end := sealed(b, dir, 20, DefaultLimits)
	b.Run("archive", func(b *testing.B) {
		for b.Loop() {
			a, err := Open(dir, store, end)
			if err == nil {
				err = a.Close()
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	})
	s := Segment{First: 1, Last: 20, Path: filepath.Join(dir, segmentName(1, 20))}
	b.Run("segment", func(b *testing.B) {
		for b.Loop() {
			f, err := open(s, store)
			if err == nil {
				err = f.close()
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	})
}
