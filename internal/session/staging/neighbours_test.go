package staging

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// A sealed slot that another user may have put there, or may change, is not adopted:
// not for a save, not for a restore, and not for a repair.
func TestPlantedSlots(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test makes files of another user: run it as root")
	}
	const attacker = 20002
	for what, c := range map[string]struct {
		plant func(path, elsewhere string) error
		taken bool
	}{
		"this user's own": {func(path, elsewhere string) error { return os.Rename(elsewhere, path) }, true},
		"another user's": {func(path, elsewhere string) error {
			return errors.Join(os.Rename(elsewhere, path), os.Chown(path, attacker, attacker))
		}, false},
		"linked elsewhere": {func(path, elsewhere string) error { return os.Link(elsewhere, path) }, false},
		"a link":           {func(path, elsewhere string) error { return os.Symlink(elsewhere, path) }, false},
		"open to all": {func(path, elsewhere string) error {
			return errors.Join(os.Rename(elsewhere, path), os.Chmod(path, 0o666))
		}, false},
	} {
		t.Run(what, func(t *testing.T) {
			shared := t.TempDir()
			dead, err := Open(shared, storeA, "run", 0, nil, quiet)
			if err != nil {
				t.Fatal(err)
			}
			data, h, p := slotOf(t)
			storeSealed(data, h.Generation)
			elsewhere := filepath.Join(t.TempDir(), "slot")
			if err := errors.Join(os.WriteFile(elsewhere, data, 0o600), c.plant(dead.path("r00003.save.1"), elsewhere), dead.dir.Close()); err != nil {
				t.Fatal(err)
			}
			chunks, err := OpenSealedChunks(shared, storeA)
			if err != nil {
				t.Fatal(err)
			}
			at := p.offsets[0]
			if got, _, err := chunks.Chunk(t.Context(), checkpoint.Item{Value: true, Bytes: 100}, checkpoint.Sum(data[at:at+100])); (got != nil) != c.taken || err != nil {
				t.Errorf("a repair takes %d bytes from it: %v", len(got), err)
			}
			chunks.Close()
			a, err := Open(shared, storeA, "run", 0, nil, quiet)
			if err != nil {
				t.Fatal(err)
			}
			found := a.Sealed(h.Attempt, quiet)
			if (len(found) == 1) != c.taken {
				t.Errorf("%d slots are adopted", len(found))
			}
			for _, s := range found {
				s.Close()
			}
			if err := a.KeepLeft(h.Checkpoint, quiet); err != nil {
				t.Error(err)
			}
			held, release := a.Hold(h.Checkpoint)
			if (len(held) == 1) != c.taken {
				t.Errorf("a restore finds %d slots", len(held))
			}
			release()
			if err := a.Close(); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(dead.dir.Path()); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the directory is left: %v", err)
			}
		})
	}
}
