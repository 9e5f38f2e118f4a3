package launch_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/launch"
)

// passesOn is a storage that passes its steps on to the store's own. setUp, if
// not nil, is called before Reader.SetUp.
type passesOn struct {
	setUp func(ref checkpoint.Ref) error
}

// Writer implements data.Storage.
func (passesOn) Writer(at data.Location) data.Writer { return at.Writer }

// Reader implements data.Storage.
func (s passesOn) Reader(at data.Location) data.Reader { return &passedOn{at.Reader, at.Ref, s.setUp} }

type passedOn struct {
	data.Reader
	ref   checkpoint.Ref
	setUp func(checkpoint.Ref) error
}

// SetUp implements data.Reader.
func (r *passedOn) SetUp(ctx context.Context, m checkpoint.Manifest, isCoordinator bool) error {
	if r.setUp != nil {
		if err := r.setUp(r.ref); err != nil {
			return err
		}
	}
	return r.Reader.SetUp(ctx, m, isCoordinator)
}

// ofStep3 is a storage with its own result for the checkpoint of step 3.
func ofStep3(says func() error) passesOn {
	return passesOn{func(ref checkpoint.Ref) error {
		if ref.Checkpoint == "step-3.a1" {
			return says()
		}
		return nil
	}}
}

// TestOwnStorageFallsBack: a checkpoint whose files a storage does not find, or
// finds damaged, is passed over. Files of the store's own are checked too.
func TestOwnStorageFallsBack(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		storage passesOn
		damage  func(t *testing.T, dir string)
		says    string
	}{
		"a data file of the store's own": {passesOn{}, damages["data"].do, damages["data"].says},
		"an index of the store's own":    {passesOn{}, damages["index"].do, damages["index"].says},
		"the manifest":                   {passesOn{}, damages["bit of the manifest"].do, "the job's own storage"},
		"not there": {ofStep3(func() error {
			return fmt.Errorf("object 7: %w", fs.ErrNotExist)
		}), nil, "object 7"},
		"damaged": {ofStep3(func() error {
			return fmt.Errorf("look: %w", &data.CorruptError{File: "object 8", Block: -1, Problem: "it is short"})
		}), nil, "object 8 is damaged: it is short"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newJob(t, 2, savesThree...).must()
			if c.damage != nil {
				c.damage(t, filesOf(t, "step-3.a1"))
			}
			j := newJob(t, 2, loadsResume...)
			j.store.Storage = c.storage
			j.must()
			if got := j.out.lines("[rank0] resumes "); !slices.Equal(got, []string{"step-2.a1 with 2"}) {
				t.Errorf("resumes %q", got)
			}
			wantText(t, j.log, "checkpoint passed over", "checkpoint=step-3.a1", c.says)
		})
	}
}

// TestOwnStorageCannotReadNow: an error about anything but a checkpoint's files
// ends the job, which does not go back in time.
func TestOwnStorageCannotReadNow(t *testing.T) {
	t.Parallel()
	newJob(t, 2, savesThree...).must()
	for says, storage := range map[string]passesOn{
		"dial the server: connection refused": ofStep3(func() error { return errors.New("dial the server: connection refused") }),
		"SetUp of the storage panicked":       ofStep3(func() error { panic("no such bucket") }),
	} {
		for _, resume := range []string{"auto", "require"} {
			j := newJob(t, 2, loadsResume...)
			j.store.Storage, j.cfg.Resume = storage, resume
			err := j.run()
			if err == nil || errors.Is(err, launch.ErrNotWhole) {
				t.Errorf("--resume %s: %s: %v", resume, says, err)
				continue
			}
			for _, part := range []string{"step-3.a1 cannot be read now", says, "start the job again"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("--resume %s: %q is not in %v", resume, part, err)
				}
			}
			if n := len(j.out.lines("[rank")); n > 0 {
				t.Errorf("--resume %s: %d lines of workers", resume, n)
			}
		}
	}
}

// TestOwnStorageHasNoSlots: a restore through a storage reads nothing from this
// node's slots, so their contents replace no file.
func TestOwnStorageHasNoSlots(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		storage data.Storage
		want    string
	}{
		"the store's own": {nil, "step-5.a2"},
		"a storage":       {passesOn{}, "step-4.a2"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newJob(t, 1, savesThree...).must()
			file := filepath.Join(filesOf(t, "step-5.a2"), "r00000.safetensors")
			j := newJob(t, 1, append(slices.Clone(losesNewest), file)...)
			j.store.Storage, j.cfg.MaxRestarts = c.storage, 1
			j.must()
			if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
				t.Fatalf("the file is there: %v", err)
			}
			if got := j.out.lines("resumes "); !slices.Equal(got, []string{c.want}) {
				t.Errorf("resumes %q, want %s", got, c.want)
			}
		})
	}
}
