package trainer

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// Without --max-node-failures, only the preflight excludes, and only a node with a spare. A number
// excludes always, and an explicit 0 never.
func TestExclusion(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		limit int
		given bool
		want  launch.Exclusion
	}{{0, false, launch.ExcludeSpared}, {0, true, launch.ExcludeNever}, {1, true, launch.ExcludeAlways}, {2, true, launch.ExcludeAlways}} {
		if got := exclusion(c.limit, c.given); got != c.want {
			t.Errorf("--max-node-failures %d, given: %v: %v, want %v", c.limit, c.given, got, c.want)
		}
	}
}

// The next job lets in the nodes that the last one has excluded, unless it takes over, or the last
// one has not ended in order and the exclusion is recent.
func TestExclusionsInherited(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	job := projections.Job{ID: "last", Nodes: []projections.JobNode{
		{Node: 0, Host: "a"},
		{Node: 1, Host: "b", LeftAt: now.Add(-5 * time.Minute), Lost: true},
		{Node: 1, Host: "c", LeftAt: now.Add(-5 * time.Minute), Excluded: true, Boot: "boot", Reason: "bad"},
		{Node: 2, Host: "d", LeftAt: now.Add(-2 * time.Hour), Excluded: true, Boot: "boot", Reason: "bad"},
	}}
	for name, c := range map[string]struct {
		ended    bool
		succeeds string
		later    time.Duration
		want     string
	}{
		"ended in order":     {true, "", 0, "[]"},
		"killed":             {false, "", 0, "[node 1 on c: bad]"},
		"killed, weeks ago":  {false, "", 500 * time.Hour, "[]"},
		"taken over":         {false, "last", 0, "[node 1 on c: bad node 2 on d: bad]"},
		"another taken over": {false, "before", 0, "[node 1 on c: bad]"},
	} {
		job.Ended = c.ended
		if got := fmt.Sprint(stillExcluded(job, c.succeeds, now.Add(c.later))); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// The trainers of a store at a URL trust each other by its token, whether the environment has it or names a file.
func TestJobToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("from-a-file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const url = "nats://logs:4222"
	for _, c := range []struct{ location, token, file, want string }{
		{"ckpts", "", "", ""}, {url, "given", "", "given"}, {url, "given", file, "given"}, {url, "", file, "from-a-file"},
	} {
		t.Setenv(store.EnvToken, c.token)
		t.Setenv(store.EnvTokenFile, c.file)
		if got, err := jobToken(c.location); err != nil || got != c.want {
			t.Errorf("%+v: %q, %v", c, got, err)
		}
	}
	t.Setenv(store.EnvTokenFile, "")
	if _, err := jobToken(url); !errors.Is(err, launch.ErrConfig) {
		t.Errorf("without a token: %v", err)
	}
}

// A trainer does not join the job of another run, or of another --rdzv-id, whose endpoint it was given.
func TestJobOfAnother(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		job  welcome
		line string
		want string // part of the error; empty: it joins
	}{
		"another run":                      {welcome{Run: "bert"}, "--name gpt", "it has --name bert, and this trainer was started with gpt"},
		"the same run":                     {welcome{Run: "bert"}, "--name bert", ""},
		"a trainer without a name":         {welcome{Run: "bert"}, "", ""},
		"another rendezvous":               {welcome{Run: "bert", RunID: "42"}, "--rdzv-id 43", "it has --rdzv-id 42, and this trainer was started with 43"},
		"the same rendezvous":              {welcome{Run: "bert", RunID: "42"}, "--rdzv-id 42", ""},
		"a rendezvous without an ID":       {welcome{Run: "bert"}, "--rdzv-id 42", ""},
		"a trainer without an ID":          {welcome{Run: "bert", RunID: "42"}, "--name bert", ""},
		"the same run, another rendezvous": {welcome{Run: "bert", RunID: "42"}, "--name bert --rdzv-id 43", "--rdzv-id 42"},
	} {
		o, _, err := options(t, nil, strings.Fields(c.line)...)
		if err != nil {
			t.Fatal(err)
		}
		err = o.expects(c.job, "node0:29400")
		if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, launch.ErrConfig) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}
