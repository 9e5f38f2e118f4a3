//go:build !cgo || !linux

package gpu

import (
	"errors"
	"strings"
	"testing"
)

func TestListSaysThatItWasNotBuilt(t *testing.T) {
	devices, err := List(t.Context())
	if len(devices) != 0 || !errors.Is(err, ErrNotBuilt) || !strings.Contains(err.Error(), "without cgo") {
		t.Errorf("got %v, %v", devices, err)
	}
	if _, err := Inspect(t.Context()); !errors.Is(err, ErrNotBuilt) {
		t.Errorf("inspect: %v", err)
	}
	if err := Watch(t.Context(), nil); !errors.Is(err, ErrNotBuilt) {
		t.Errorf("watch: %v", err)
	}
	if _, err := systemHolders(t.Context(), 1); !errors.Is(err, ErrNotBuilt) {
		t.Errorf("holders: %v", err)
	}
}
