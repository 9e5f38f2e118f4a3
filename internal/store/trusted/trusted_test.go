package trusted

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"
)

// TestLockedList does not wait forever while another process changes the list.
func TestLockedList(t *testing.T) {
	config, dir := t.TempDir(), t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", config)
	if _, err := Add(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	held, err := lock(t.Context(), filepath.Join(config, "ckptstore", fileName+".lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := Add(ctx, dir); !errors.Is(err, ErrLocked) {
		t.Errorf("while another process changes it: %v", err)
	}
}
