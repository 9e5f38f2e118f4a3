package gpu

import (
	"context"
	"errors"
	"strings"
	"testing"
)

// wantChecks compares the results of checks, and parts of their texts.
func wantChecks(t *testing.T, got []Check, want ...[2]string) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("checks %+v, want %v", got, want)
	}
	for n, name := range []string{CheckInventory, CheckHealth, CheckAssignment} {
		if got[n].Name != name || string(got[n].Result) != want[n][0] || !strings.Contains(got[n].Text, want[n][1]) || got[n].Text == "" {
			t.Errorf("check %+v, want %s with result %s and text %q", got[n], name, want[n][0], want[n][1])
		}
	}
}

// TestReadinessWithoutDevices: checks that cannot run are not run, with a reason.
// A failing driver differs from a machine without devices.
func TestReadinessWithoutDevices(t *testing.T) {
	for name, c := range map[string]struct {
		inventory Inventory
		err       error
		want      [3][2]string
	}{
		"no driver": {Inventory{}, ErrNoDriver, [3][2]string{{"not run", "no NVIDIA driver"}, {"not run", "no NVIDIA driver"}, {"not run", "no NVIDIA driver"}}},
		"not built": {Inventory{}, ErrNotBuilt, [3][2]string{{"not run", "CGO_ENABLED=1"}, {"not run", "CGO_ENABLED=1"}, {"not run", "CGO_ENABLED=1"}}},
		"no device": {Inventory{Driver: "550"}, nil, [3][2]string{{"not run", "driver 550, and no device"}, {"not run", "no device"}, {"not run", "no device"}}},
		"hangs":     {Inventory{}, context.DeadlineExceeded, [3][2]string{{"failed", "deadline"}, {"not run", "the inventory failed"}, {"not run", "the inventory failed"}}},
		"fails":     {Inventory{}, errors.New("count devices: broken"), [3][2]string{{"failed", "count devices: broken"}, {"not run", "the inventory failed"}, {"not run", "the inventory failed"}}},
	} {
		t.Run(name, func(t *testing.T) {
			checks, ids := readiness(c.inventory, c.err, nil)
			wantChecks(t, checks, c.want[:]...)
			if len(ids) > 0 {
				t.Errorf("devices %q", ids)
			}
		})
	}
}
