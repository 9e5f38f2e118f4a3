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
}
