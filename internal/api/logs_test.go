package api

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/answer"
)

// TestLogs: the last lines of a selection come in the order of time, and of no more than the limits.
func TestLogs(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	dir := filepath.Join("logs", "bert", "job-1")
	at := filepath.Join(h.st.Dir(), dir)
	if err := os.MkdirAll(at, 0o700); err != nil {
		t.Fatal(err)
	}
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	write := func(name string, second, every int, lines ...string) {
		t.Helper()
		var text strings.Builder
		for i, line := range lines {
			fmt.Fprintf(&text, "%s %s\n", begin.Add(time.Duration(second+i*every)*time.Second).Format("2006-01-02T15:04:05.000000Z"), line)
		}
		if err := os.WriteFile(filepath.Join(at, name), []byte(text.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("a1-r0.out", 0, 2, "one", "three", "five <b>")
	write("a1-r1.err", 1, 2, "two", "four")
	write("a2-r0.out", 100, 1, "six")
	if err := os.MkdirAll(filepath.Join(at, events.EncodeName("t.1")), 0o700); err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(events.EncodeName("t.1"), "a1-r0.out"), 0, 1, "seven")
	h.record("bert", "main", &events.JobStarted{Job: "job-1", Host: "here", PID: 1, NProc: 2, NNodes: 1, Logs: dir}, &events.TrialCreated{})
	for _, c := range []struct {
		query, want string
		earlier     bool
	}{
		{"", "1.0out:one 1.1err:two 1.0out:three 1.1err:four 1.0out:five <b> 2.0out:six", false},
		{"lines=2", "1.0out:five <b> 2.0out:six", true},
		{"lines=6", "1.0out:one 1.1err:two 1.0out:three 1.1err:four 1.0out:five <b> 2.0out:six", false},
		{"attempt=1&rank=0&lines=3", "1.0out:one 1.0out:three 1.0out:five <b>", false},
		{"stream=err", "1.1err:two 1.1err:four", false},
		{"rank=-1&attempt=2", "2.0out:six", false},
		{"contains=" + url.QueryEscape("<b>"), "1.0out:five <b>", false},
		{"contains=o&lines=2", "1.1err:two 1.1err:four", true},
		{"contains=nothing", "", false},
		{"rank=7", "", false},
		{"job=job", "1.0out:one 1.1err:two 1.0out:three 1.1err:four 1.0out:five <b> 2.0out:six", false},
		{"trial=t.1", "1.0out:seven", false},
		{"trial=..", "", false},
		{"as_of=2&attempt=2", "2.0out:six", false},
	} {
		var got answer.LastLines
		r := h.get("/runs/bert/logs?"+c.query, &got)
		var lines []string
		for _, l := range got.Lines {
			lines = append(lines, fmt.Sprintf("%d.%d%s:%s", l.Attempt, l.Rank, l.Stream, l.Text))
		}
		if text := strings.Join(lines, " "); text != c.want || got.Earlier != c.earlier || got.Job != "job-1" || r.head.Get("Cache-Control") == forever {
			t.Errorf("%q: %q, earlier %v, want %q, %v; %v", c.query, text, got.Earlier, c.want, c.earlier, r.head)
		}
	}

	// An answer has at most a mebibyte of text.
	long := make([]string, 40)
	for i := range long {
		long[i] = fmt.Sprintf("%02d%s", i, strings.Repeat("x", 60_000))
	}
	write("a4-r0.out", 0, 1, long...)
	var got answer.LastLines
	if r := h.get("/runs/bert/logs?attempt=4&lines=1000", &got); len(r.body) > 1<<20+10_000 || len(got.Lines) != 17 || !got.Earlier || !strings.HasPrefix(got.Lines[16].Text, "39x") {
		t.Errorf("%d lines of %d bytes, earlier %v", len(got.Lines), len(r.body), got.Earlier)
	}

	// What is not output of a job is not read: a link, a directory outside of the store.
	outside := t.TempDir()
	secret := filepath.Join(outside, "a5-r0.out")
	if err := os.WriteFile(secret, []byte("2026-01-02T03:04:05.000000Z secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(secret, filepath.Join(at, "a5-r0.out")); err != nil {
		t.Fatal(err)
	}
	relative, err := filepath.Rel(h.st.Dir(), outside)
	if err != nil {
		t.Fatal(err)
	}
	h.record("out", "main", &events.JobStarted{Job: "job-2", Host: "here", PID: 1, NProc: 1, NNodes: 1, Logs: relative})
	h.record("other", "main", &events.JobStarted{Job: "job-4", Host: "here", PID: 1, NProc: 1, NNodes: 1, Logs: outside})
	h.record("none", "main", &events.JobStarted{Job: "job-3", Host: "here", PID: 1, NProc: 1, NNodes: 1})
	for _, c := range []struct {
		path   string
		status int
		text   string
	}{
		{"bert/logs?attempt=5", 403, "symbolic link"},
		{"out/logs", 404, "which is not below the store"},
		{"other/logs", 403, "which this server does not show: start it with --http-logs"},
		{"none/logs", 404, "the job kept none"},
		{"nothing/logs", 404, "nothing"},
		{"bert/logs?job=none", 404, "job of run bert"},
		{"bert/logs?lines=1001", 400, "lines"},
		{"bert/logs?stream=in", 400, "stream"},
	} {
		r := h.call("GET", Prefix+"/runs/"+c.path, readToken1, "")
		if r.status != c.status || !strings.Contains(r.body, c.text) || strings.Contains(r.body, "secret") {
			t.Errorf("%s: %d %s, want %d and %q", c.path, r.status, r.body, c.status, c.text)
		}
	}
	allowing := h.serve(h.st, Options{Logs: []string{filepath.Dir(outside)}})
	if r := h.callAt(t.Context(), allowing, "GET", Prefix+"/runs/other/logs", readToken1, ""); r.status != 200 || !strings.Contains(r.body, `"text":"secret"`) {
		t.Errorf("a directory that the server shows: %d %s", r.status, r.body)
	}
}
