package gpu

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// eight returns eight devices, the last of them in MIG mode with three instances.
func eight() []Device {
	var out []Device
	for i := range 8 {
		out = append(out, Device{UUID: fmt.Sprintf("GPU-%c%d", 'h'-rune(i), i), Index: i})
	}
	out[7].MIG = true
	out[7].Instances = []Instance{{UUID: "MIG-a1"}, {UUID: "MIG-a2"}, {UUID: "MIG-b"}}
	return out
}

func TestVisible(t *testing.T) {
	for value, want := range map[string][]string{
		"":                   nil,
		"-1":                 nil,
		"NoDevFiles":         nil,
		"0":                  {"GPU-h0"},
		"3,1":                {"GPU-e3", "GPU-g1"},
		" 3 , GPU-g1 ":       {"GPU-e3", "GPU-g1"},
		"2,-1,3":             {"GPU-f2"},
		"GPU-b":              {"GPU-b6"},
		"MIG-a2":             {"MIG-a2"},
		"MIG-b,MIG-a1,GPU-h": {"MIG-b", "MIG-a1", "GPU-h0"},
	} {
		got, err := Visible(eight(), value)
		if err != nil || !slices.Equal(units(got), want) {
			t.Errorf("%q: %v, %v, want %q", value, got, err, want)
		}
	}
}

func TestVisibleRefuses(t *testing.T) {
	for value, want := range map[string]string{
		"8":        `"8" is no device of this machine, which has GPU-h0, `,
		"GPU-z":    `"GPU-z" is no device`,
		"0,":       `"" is no device ID`,
		"01":       "write it as 1",
		"0,GPU-h0": `"GPU-h0" is GPU-h0, which is already in the list`,
		"7":        `"7" is a device in MIG mode, which processes cannot use directly; name one of its instances (MIG-a1, MIG-a2, MIG-b)`,
		"MIG-a":    `"MIG-a" is a prefix of both MIG-a1 and MIG-a2`,
		"all":      `"all" is no device`,
	} {
		got, err := Visible(eight(), value)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "CUDA_VISIBLE_DEVICES") {
			t.Errorf("%q: %v, %v, want %q", value, got, err, want)
		}
	}
	if _, err := Visible(nil, "0"); err == nil || !strings.Contains(err.Error(), "which has none") {
		t.Errorf("without devices: %v", err)
	}
}

func TestAssign(t *testing.T) {
	for _, c := range []struct {
		devices   []Device
		workers   int
		perWorker int
		want      [][]string
		says      string
	}{
		{eight(), 2, 0, [][]string{nil, nil}, ""},
		{nil, 2, 0, [][]string{nil, nil}, ""},
		{eight(), 2, 1, [][]string{{"GPU-h0"}, {"GPU-g1"}}, ""},
		{eight(), 2, 2, [][]string{{"GPU-h0", "GPU-g1"}, {"GPU-f2", "GPU-e3"}}, ""},
		{eight()[7:], 3, 1, [][]string{{"MIG-a1"}, {"MIG-a2"}, {"MIG-b"}}, ""},
		{eight(), 11, 1, nil, "10 are visible here: start fewer workers"},
		{nil, 1, 1, nil, "0 are visible here"},
		{eight(), 1, 8, nil, "MIG-a1 is a MIG instance and a process sees one at most: give each worker 1"},
		{eight(), 1 << 62, 4, nil, "10 are visible here"},
		{eight(), 0, 1, nil, "give 1 worker or more"},
		{eight(), 1, -1, nil, "0 GPUs or more"},
		{[]Device{{UUID: "GPU-x", MIG: true}}, 1, 1, nil, "0 are visible here"},
	} {
		got, err := Assign(c.devices, c.workers, c.perWorker)
		if c.says == "" && (err != nil || !reflect.DeepEqual(got, c.want)) {
			t.Errorf("%d workers of %d: %v, %v, want %v", c.workers, c.perWorker, got, err, c.want)
		}
		if c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%d workers of %d: %v, %v, want %q", c.workers, c.perWorker, got, err, c.says)
		}
	}
}

// No two workers share a device, and each worker gets as many as requested.
func TestAssignIsExclusive(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		devices := eight()[:rapid.IntRange(0, 7).Draw(t, "devices")]
		workers, perWorker := rapid.IntRange(1, 9).Draw(t, "workers"), rapid.IntRange(0, 9).Draw(t, "per worker")
		got, err := Assign(devices, workers, perWorker)
		if fits := workers*perWorker <= len(devices); fits != (err == nil) {
			t.Fatalf("%d workers of %d with %d devices: %v", workers, perWorker, len(devices), err)
		}
		seen := map[string]bool{}
		for _, ids := range got {
			if len(ids) != perWorker {
				t.Fatalf("got %v, want %d each", got, perWorker)
			}
			for _, id := range ids {
				if seen[id] {
					t.Fatalf("%s is given twice: %v", id, got)
				}
				seen[id] = true
			}
		}
	})
}
