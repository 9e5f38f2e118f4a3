package shm

import (
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

// A process that only looks whether a directory has an owner does not keep it from its next owner.
func TestOwnWhileOthersLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shared, log := t.TempDir(), slog.New(slog.DiscardHandler)
		other, err := Own(shared, "directory", log)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Own(shared, "directory", log); !errors.Is(err, ErrOwned) {
			t.Errorf("it has an owner: %v", err)
		}
		time.AfterFunc(look/2, func() { _ = other.Close() })
		d, err := Own(shared, "directory", log)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}
