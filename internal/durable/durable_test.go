package durable

import (
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// losing is a disk that forgets unsynced data. It calls look before each of its
// steps.
type losing struct {
	*vfs.MemFS
	look func(step string)
}

var _ files = losing{}

type losingFile struct {
	vfs.File
	name string
	look func(step string)
}

func (f losingFile) Name() string { return f.name }

func (f losingFile) Write(p []byte) (int, error) {
	f.look("write")
	return f.File.Write(slices.Clone(p))
}

func (f losingFile) Sync() error {
	f.look("sync")
	return f.File.Sync()
}

func (f losingFile) Close() error {
	f.look("close")
	return f.File.Close()
}

func (l losing) createTemp(dir string) (tempFile, error) {
	l.look("create")
	name := filepath.Join(dir, TempPrefix+"1")
	f, err := l.Create(name, vfs.WriteCategoryUnspecified)
	return losingFile{f, name, l.look}, err
}

func (l losing) rename(from, to string) error {
	l.look("rename")
	return l.Rename(from, to)
}

func (l losing) remove(name string) error { return l.Remove(name) }

func (l losing) syncDir(dir string) error {
	l.look("sync the directory")
	d, err := l.OpenDir(dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return d.Sync()
}

// TestWrite cuts the power before each step and keeps none, some or all of the
// unsynced data. The file must then hold the old or the new content, complete;
// after the last step, the new content. The notes without which a store cannot be
// opened and the record of the log's end are written this way, so that a crash
// cannot make every start fail.
func TestWrite(t *testing.T) {
	t.Parallel()
	fs, before := vfs.NewCrashableMem(), ""
	const path = "dir/end.json"
	if err := fs.MkdirAll("dir", 0o700); err != nil {
		t.Fatal(err)
	}
	steps := 0
	check := func(step, now string, may ...string) {
		t.Helper()
		for n, percent := range []int{0, 20, 50, 80, 100} {
			clone := fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rand.New(rand.NewPCG(uint64(steps), uint64(n)))})
			got := ""
			if f, err := clone.Open(path); err == nil {
				text, err := io.ReadAll(f)
				if err != nil || f.Close() != nil {
					t.Fatal(err)
				}
				got = "file: " + string(text)
			}
			if !slices.Contains(may, got) {
				t.Errorf("power lost before step %q of writing %.9s, %d%% of the rest on the disk: found %.9q", step, now, percent, got)
			}
		}
	}
	for n := range 3 {
		text := strings.Repeat(fmt.Sprint(n), 10_000)
		now := "file: " + text
		l := losing{fs, func(step string) {
			steps++
			check(step, text, before, now)
		}}
		if n == 0 { // the directory's own name
			if err := l.syncDir(""); err != nil {
				t.Fatal(err)
			}
		}
		if err := replace(l, path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		check("none", text, now)
		before = now
	}
}
