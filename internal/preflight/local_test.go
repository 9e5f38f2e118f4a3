package preflight

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// What is bad is named in the order of the checks. A check that does not end is bad, unless it may be
// slow on a good node.
func TestExamine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		over := make(chan struct{})
		stuck := func(context.Context) error { <-over; return nil }
		asked := func(ctx context.Context) error { <-ctx.Done(); return errors.New("gives up") }
		bad := Examine(t.Context(), time.Second, []Check{
			{What: "good", Do: func(context.Context) error { return nil }},
			{What: "disk", Do: func(context.Context) error { return errors.New("read-only") }},
			{What: "stuck", Do: stuck},
			{What: "slow", Do: stuck, Patient: true},
			{What: "asked", Do: asked},
			{What: "asked and slow", Do: asked, Patient: true},
			{What: "patient and bad", Do: func(context.Context) error { return errors.New("bad") }, Patient: true},
		})
		for i, b := range bad {
			if strings.HasPrefix(b, "asked: ") { // the check and its limit end at the same time
				bad[i] = "asked"
			}
		}
		if want := []string{"disk: read-only", "stuck: no answer after 1s", "asked", "patient and bad: bad"}; !slices.Equal(bad, want) {
			t.Errorf("bad %q, want %q", bad, want)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if bad := Examine(ended, time.Second, []Check{{What: "stuck", Do: stuck}}); len(bad) > 0 {
			t.Errorf("a job that was stopped has %q", bad)
		}
		close(over)
		synctest.Wait()
	})
}

// The checks leave nothing behind, and name what is wrong.
func TestDirectories(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := errors.Join(SharedMemory(dir), Disk(dir), Disk(filepath.Join(dir, "made"))); err != nil {
		t.Error(err)
	}
	var left []string
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			left = append(left, path)
		}
		return err
	})
	if err != nil || len(left) > 0 {
		t.Errorf("left %q, %v", left, err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{SharedMemory(filepath.Join(dir, "absent")), SharedMemory(file), Disk(file)} {
		if err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("error %v", err)
		}
	}
}

func TestCompare(t *testing.T) {
	t.Parallel()
	const far = time.Minute
	for name, c := range map[string]struct {
		ahead    []time.Duration
		by       []time.Duration
		majority bool
	}{
		"none":                     {nil, []time.Duration{}, false},
		"one":                      {[]time.Duration{0}, []time.Duration{0}, true},
		"two that differ":          {[]time.Duration{0, far}, []time.Duration{0, far}, false},
		"one of three":             {[]time.Duration{0, -far, time.Second}, []time.Duration{0, -far, 0}, true},
		"the one to compare with":  {[]time.Duration{0, far, far, far}, []time.Duration{-far, 0, 0, 0}, true},
		"half of them":             {[]time.Duration{0, far, 0, far}, []time.Duration{0, far, 0, far}, false},
		"all within the limit":     {[]time.Duration{0, ClockLimit, 1}, []time.Duration{0, 0, 0}, true},
		"three that all differ":    {[]time.Duration{-far, 0, far}, []time.Duration{-far, 0, far}, false},
		"one over the limit alone": {[]time.Duration{0, 0, ClockLimit + 1}, []time.Duration{0, 0, ClockLimit + 1}, true},
	} {
		if got := Compare(c.ahead); !slices.Equal(got.By, c.by) || got.Majority != c.majority {
			t.Errorf("%s: %+v, want %v, %v", name, got, c.by, c.majority)
		}
	}
}

// Clocks differ at least by what Clock returns, however long the ways were, and the sign is right.
func TestClock(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		part := func(name string) time.Duration {
			return time.Duration(rapid.Int64Range(0, int64(time.Minute)).Draw(t, name))
		}
		there, took, back := part("there"), part("took"), part("back")
		ahead := part("ahead") - part("behind")
		sent := time.Unix(1000, 0)
		got := Clock(sent, there+took+back, sent.Add(there).Add(ahead), took)
		if got > 0 && ahead < got || got < 0 && ahead > got {
			t.Fatalf("the clock is %v ahead, and Clock returns %v", ahead, got)
		}
		if least := max(ahead, -ahead) - (there + back) - 2; max(got, -got) < least {
			t.Fatalf("the clock is %v ahead on ways of %v and %v, and Clock returns %v", ahead, there, back, got)
		}
	})
}
