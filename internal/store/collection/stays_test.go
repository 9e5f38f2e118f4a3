package collection

import (
	"io/fs"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// TestLockedFiles: a locked checkpoint is left alone until its lock ends, but for an hour at most,
// because the lock of one file may end before that of another; a legal hold or a refusal may end at
// any time.
func TestLockedFiles(t *testing.T) {
	t.Parallel()
	ref := checkpoint.RefOf("run", "main", "step-1.a1")
	for name, c := range map[string]struct {
		locked object.LockedError
		alone  bool
	}{
		"lock":    {object.LockedError{Until: time.Now().Add(48 * time.Hour)}, true},
		"ended":   {object.LockedError{Until: time.Now().Add(-time.Second)}, false},
		"hold":    {object.LockedError{Hold: true, Until: time.Now().Add(time.Hour)}, false},
		"refused": {object.LockedError{Refused: fs.ErrPermission, Until: time.Now().Add(time.Hour)}, false},
	} {
		var l lockedFiles
		if l.add(ref, &c.locked); l.has(ref) != c.alone {
			t.Errorf("%s: it is left alone: %t", name, !c.alone)
		}
		if again := time.Until(l.until[ref]); again > lockedAtMost {
			t.Errorf("%s: it is tried again in %v", name, again)
		}
	}
}
