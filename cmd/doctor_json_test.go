package cmd_test

import (
	"path/filepath"
	"strings"
	"testing"
)

// The counts in the doctor's JSON match its checks.
func TestDoctorJSON(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	type report struct {
		Store, Examined    string
		Warnings, Problems int
		Checks             []struct{ ID, Status, Saw, Do string }
	}
	for store, code := range map[string]int{filepath.Join(dir, "store"): 0, "/proc/no/store": 6} {
		text := output(t, code, "trainer", "doctor", "--json", "--store", store)
		schema(t, "doctor", text)
		var r report
		decode(t, text, &r)
		count := map[string]int{}
		for _, c := range r.Checks {
			count[c.Status]++
			if c.ID == "" || c.Saw == "" || c.Status == "problem" && c.Do == "" {
				t.Errorf("check %+v", c)
			}
		}
		if r.Store != store || count["warning"] != r.Warnings || count["problem"] != r.Problems || count["ok"] == 0 || (r.Problems > 0) != (code == 6) {
			t.Errorf("%s\n%v", text, count)
		}
		if code == 0 && r.Examined != dir || code == 6 && !strings.Contains(text, "store.write") {
			t.Errorf("examined %q, want %q", r.Examined, dir)
		}
	}
}
