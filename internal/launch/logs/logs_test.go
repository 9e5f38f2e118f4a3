package logs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// patience is how long a test waits for what must come.
const patience = 60 * time.Second

// ticking is a clock that advances by a millisecond each time it is read.
func ticking() func() time.Time {
	var n atomic.Int64
	return func() time.Time { return time.UnixMilli(1_800_000_000_000 + n.Add(1)) }
}

func say(t *testing.T, f *File, lines ...string) {
	t.Helper()
	for _, l := range lines {
		if n, err := f.Write([]byte(l)); n != len(l) || err != nil {
			t.Fatalf("write: %d, %v", n, err)
		}
	}
}

// all returns the lines of Read.
func all(t *testing.T, dir string, s Select) (texts []string) {
	t.Helper()
	err := Read(t.Context(), dir, s, nil, func(l Line) error {
		texts = append(texts, fmt.Sprintf("a%d r%d %s %s", l.Attempt, l.Rank, l.Stream, l.Text))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return texts
}

var everything = Select{Rank: -1, Tail: -1}

// Output of ranks is read in the order of time, and selected by attempt, rank,
// output, count and time.
func TestReadInOrder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "not", "made")
	if got := all(t, dir, everything); got != nil {
		t.Errorf("before anything was printed: %q", got)
	}
	now := ticking()
	d := NewDir(dir, Options{Now: now})
	r0, r1, e1, later := d.File(1, 0, Out), d.File(1, 1, Out), d.File(1, 1, Err), d.File(12, 0, Out)
	say(t, r0, "one\n")
	say(t, r1, "two\n")
	say(t, e1, "three") // without an end
	say(t, r0, "\n")
	since := now()
	say(t, later, "five\n")
	say(t, r1, "six\n")
	// An attempt comes after those before it, whatever the clocks of the nodes show.
	want := []string{"a1 r0 out one", "a1 r1 out two", "a1 r1 err three", "a1 r0 out ", "a1 r1 out six", "a12 r0 out five"}
	for name, c := range map[string]struct {
		s    Select
		want []string
	}{
		"all":      {everything, want},
		"rank":     {Select{Rank: 1, Tail: -1}, []string{want[1], want[2], want[4]}},
		"attempt":  {Select{Attempt: 12, Rank: -1, Tail: -1}, want[5:]},
		"stderr":   {Select{Rank: -1, Tail: -1, Streams: []Stream{Err}}, want[2:3]},
		"tail":     {Select{Rank: -1, Tail: 2}, want[4:]},
		"tail 0":   {Select{Rank: -1, Tail: 0}, nil},
		"tail all": {Select{Rank: -1, Tail: 100}, want},
		// All that is as long as the bound, and the line by which it is longer.
		"bytes":                {Select{Rank: -1, Tail: 100, Bytes: 6}, want[4:]},
		"bytes of an attempt":  {Select{Rank: -1, Tail: 100, Bytes: 4}, want[4:]},
		"bytes of a line":      {Select{Rank: -1, Tail: 100, Bytes: 3}, want[5:]},
		"bytes in one attempt": {Select{Attempt: 1, Rank: -1, Tail: 100, Bytes: 7}, want[2:5]},
		"bytes and lines":      {Select{Rank: -1, Tail: 3, Bytes: 100}, want[3:]},
		"since":                {Select{Rank: -1, Tail: -1, Since: since}, want[4:]},
	} {
		if got := all(t, dir, c.s); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	for _, f := range []*File{r0, r1, e1, later} {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	say(t, r0, "after the end\n") // an abandoned copier
	if got := all(t, dir, everything); !slices.Equal(got, want) {
		t.Errorf("after the end: %q", got)
	}
}

// The tail of long lines is that of the whole, although it is cut on the way.
func TestTailOfLongLines(t *testing.T) {
	dir := t.TempDir()
	d := NewDir(dir, Options{Now: ticking()})
	files := []*File{d.File(1, 0, Out), d.File(1, 1, Out)}
	long := strings.Repeat("x", 60_000)
	const lines = held / 60_000
	for i := range lines {
		for _, f := range files {
			say(t, f, fmt.Sprintf("%d %s\n", i, long))
		}
	}
	for _, f := range files {
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	want := all(t, dir, everything)
	for _, n := range []int{1, lines, 2*lines - 1, 2 * lines, 1000} {
		if got := all(t, dir, Select{Rank: -1, Tail: n}); len(want) != 2*lines || !slices.Equal(got, want[max(0, len(want)-n):]) {
			t.Errorf("tail %d of %d: %d lines", n, len(want), len(got))
		}
	}
	if got := all(t, dir, Select{Rank: -1, Tail: 1000, Bytes: 1 << 20}); !slices.Equal(got, want[len(want)-18:]) {
		t.Errorf("1 MiB: %d lines", len(got))
	}
}

// A file has at most its maximum size, and records what was dropped.
func TestRotation(t *testing.T) {
	dir := t.TempDir()
	d := NewDir(dir, Options{MaxSize: 400, Now: ticking()})
	f := d.File(1, 0, Out)
	for i := range 50 {
		say(t, f, fmt.Sprintf("line %02d\n", i))
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a1-r0.out", "a1-r0.out.1"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.Size() > 400 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("%d files, %v", len(entries), err)
	}
	got := all(t, dir, everything)
	if len(got) < 5 || got[len(got)-1] != "a1 r0 out line 49" {
		t.Fatalf("%q", got)
	}
	said := 0
	for _, l := range got {
		if strings.Contains(l, "ckptstore: this output has reached 400 bytes: what came before is in a1-r0.out.1, and what that had before is dropped") {
			said++
		}
	}
	if said == 0 || said > 2 {
		t.Errorf("dropped lines are reported %d times: %q", said, got)
	}
	for _, n := range []int{1, 3, len(got)} { // also across both files
		if tail := all(t, dir, Select{Rank: -1, Tail: n}); !slices.Equal(tail, got[len(got)-n:]) {
			t.Errorf("tail %d: %q", n, tail)
		}
	}
}

// A full disk neither fails nor blocks the writer: it is logged once.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	var failed []error
	d := NewDir(dir, Options{Failed: func(err error) { failed = append(failed, err) }})
	for rank := range 3 {
		f := d.File(1, rank, Out)
		if rank < 2 {
			var err error
			if f.f, err = os.OpenFile("/dev/full", os.O_WRONLY, 0); err != nil {
				t.Fatal(err)
			}
		}
		say(t, f, "one\n", "two\n")
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	if len(failed) != 1 || !errors.Is(failed[0], syscall.ENOSPC) || !strings.Contains(failed[0].Error(), dir) {
		t.Errorf("told %v", failed)
	}
	if _, err := os.Stat(filepath.Join(dir, "a1-r2.out")); !os.IsNotExist(err) {
		t.Errorf("there is a file of a rank that wrote later: %v", err)
	}
}

// Output goes through no symbolic link below the directory that the user named,
// and does not wait for a pipe.
func TestLinks(t *testing.T) {
	for _, at := range []string{"logs", "logs/run", "logs/run/job", "logs/run/job/a1-r0.out", "pipe"} {
		top, away := t.TempDir(), filepath.Join(t.TempDir(), "away")
		dir := filepath.Join(top, "logs", "run", "job")
		file := filepath.Join(dir, key{1, 0, Out}.name())
		path := filepath.Join(top, at)
		if at == "pipe" {
			path = file
		}
		before := "2026-11-21T23:24:11.123456Z before\n"
		err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(file, []byte(before), 0o600), os.Rename(path, away))
		if at == "pipe" {
			err = errors.Join(err, syscall.Mkfifo(path, 0o600))
		} else {
			err = errors.Join(err, os.Symlink(away, path))
		}
		if err != nil {
			t.Fatal(err)
		}
		var failed error
		f := NewDir(dir, Options{Top: top, Failed: func(err error) { failed = err }}).File(1, 0, Out)
		say(t, f, "one\n")
		if err := f.Close(); err != nil {
			t.Error(err)
		}
		sel := everything
		sel.Top = top
		read := Read(t.Context(), dir, sel, nil, func(Line) error { return errors.New("read") })
		for what, err := range map[string]error{"written": failed, "read": read} {
			if !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), path+" is ") {
				t.Errorf("%s: %s: %v", at, what, err)
			}
		}
		if err := filepath.WalkDir(away, func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			text, err := os.ReadFile(path)
			if string(text) != before {
				t.Errorf("%s has %q", path, text)
			}
			return err
		}); err != nil {
			t.Error(err)
		}
	}
}

// A redrawn line, such as a progress bar, is one line with all of its states:
// also if its end never comes, and in pieces if they are many.
func TestStatesOfALine(t *testing.T) {
	dir := t.TempDir()
	f := NewDir(dir, Options{Now: ticking()}).File(1, 0, Out)
	say(t, f, "\r", "1%\r", "2%\n", "next\n", "3%\r")
	if err := errors.Join(f.Close(), f.Close()); err != nil {
		t.Error(err)
	}
	if got, want := all(t, dir, everything), []string{"a1 r0 out \r1%\r2%", "a1 r0 out next", "a1 r0 out 3%\r"}; !slices.Equal(got, want) {
		t.Errorf("read %q, want %q", got, want)
	}
	many := NewDir(dir, Options{Now: ticking()}).File(2, 0, Out)
	for range 3 {
		say(t, many, strings.Repeat("x", longestText/2)+"\r")
	}
	say(t, many, "end\n")
	if err := many.Close(); err != nil {
		t.Error(err)
	}
	if got := all(t, dir, Select{Attempt: 2, Rank: -1, Tail: -1}); len(got) != 3 || !strings.HasSuffix(got[2], "x\rend") {
		t.Errorf("%d lines, the last %.20q", len(got), got[len(got)-1])
	}
}

// A line with room for only part of it is not there at all.
func TestTornLine(t *testing.T) {
	signal.Ignore(syscall.SIGXFSZ)
	defer signal.Reset(syscall.SIGXFSZ)
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &before); err != nil {
		t.Fatal(err)
	}
	limited := unix.Rlimit{Cur: 100, Max: before.Max}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &limited); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &before); err != nil {
			t.Error(err)
		}
	}()
	var failed []error
	dir := t.TempDir()
	f := NewDir(dir, Options{Now: ticking(), Failed: func(err error) { failed = append(failed, err) }}).File(1, 0, Out)
	say(t, f, "first\n", "second\n", "third\n")
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if got := all(t, dir, everything); !slices.Equal(got, []string{"a1 r0 out first", "a1 r0 out second"}) || len(failed) != 1 {
		t.Errorf("read %q, told %v", got, failed)
	}
}

// A reader that follows gets every line once and in the order of each output,
// over rotations that it keeps up with, and ends with the job.
func TestFollow(t *testing.T) {
	dir := t.TempDir()
	const ranks, lines = 3, 400
	d := NewDir(dir, Options{MaxSize: 1 << 20})
	seen := map[int]int{}
	var over atomic.Bool
	var writers sync.WaitGroup
	got := make(chan int, ranks*lines)
	for rank := range ranks {
		writers.Go(func() {
			f := d.File(1, rank, Out)
			for i := range lines {
				say(t, f, fmt.Sprintf("%d %s\n", i, strings.Repeat("x", 5000)))
			}
			if err := f.Close(); err != nil {
				t.Error(err)
			}
			if rank == 0 { // the reader is at it while the others are not done
				select {
				case <-got:
				case <-time.After(patience):
					t.Error("nothing was read")
				}
			}
		})
	}
	go func() { writers.Wait(); over.Store(true) }()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := Read(ctx, dir, everything, func(context.Context) (bool, error) { return over.Load(), nil }, func(l Line) error {
		number, _, _ := bytes.Cut(l.Text, []byte(" "))
		if string(number) == "ckptstore:" {
			return nil
		}
		if string(number) != fmt.Sprint(seen[l.Rank]) {
			return fmt.Errorf("rank %d: line %s, want %d", l.Rank, number, seen[l.Rank])
		}
		seen[l.Rank]++
		got <- l.Rank
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for rank := range ranks {
		if seen[rank] != lines {
			t.Errorf("rank %d: %d lines", rank, seen[rank])
		}
	}
}

// A line cut by a crash is shown at the end of the job, with the time of the line
// before it.
func TestCutLine(t *testing.T) {
	dir := t.TempDir()
	f := NewDir(dir, Options{Now: ticking()}).File(1, 0, Err)
	say(t, f, "whole\n")
	if err := errors.Join(f.Close(), appendTo(filepath.Join(dir, "a1-r0.err"), "2026-11-2")); err != nil {
		t.Fatal(err)
	}
	var last Line
	err := Read(t.Context(), dir, everything, func(context.Context) (bool, error) { return true, nil }, func(l Line) error {
		last = l
		return nil
	})
	if err != nil || string(last.Text) != "2026-11-2" || last.Time.IsZero() {
		t.Errorf("%+v, %v", last, err)
	}
	if !slices.Equal(all(t, dir, everything), []string{"a1 r0 err whole", "a1 r0 err 2026-11-2"}) {
		t.Errorf("%q", all(t, dir, everything))
	}
}

func appendTo(path, text string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

func TestRoutes(t *testing.T) {
	parse := func(text string) PerRank {
		p, err := ParsePerRank(text)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	type to struct{ file, terminal bool }
	both, onlyFile, onlyTerminal, nowhere := to{true, true}, to{true, false}, to{false, true}, to{false, false}
	for _, c := range []struct {
		redirects, tee string
		shown          []int
		rank           int
		out, err       to
	}{
		{"0", "0", nil, 0, onlyTerminal, onlyTerminal},
		{"0", "3", nil, 0, both, both},
		{"3", "0", nil, 0, onlyFile, onlyFile},
		{"1", "0", nil, 0, onlyFile, onlyTerminal},
		{"3", "1", nil, 0, both, onlyFile},
		{"0", "2", nil, 0, onlyTerminal, both},
		{"0:3,1:2", "0", nil, 0, onlyFile, onlyFile},
		{"0:3,1:2", "0", nil, 1, onlyTerminal, onlyFile},
		{"0:3,1:2,", "0", nil, 2, onlyTerminal, onlyTerminal},
		{"0", "3", []int{1}, 0, onlyFile, onlyFile},
		{"0", "3", []int{1}, 1, both, both},
		{"0", "0", []int{1}, 0, nowhere, nowhere},
	} {
		r := Routes{Redirects: parse(c.redirects), Tee: parse(c.tee), Shown: c.shown}
		var got [2]to
		for i, s := range []Stream{Out, Err} {
			got[i].file, got[i].terminal = r.Of(c.rank, s)
		}
		if got != [2]to{c.out, c.err} {
			t.Errorf("%+v: %+v", c, got)
		}
	}
	for _, bad := range []string{"", "4", "-1", "0:4", "0", "a:1", "0:1,0:2", "1,2", "0:"} {
		if _, err := ParsePerRank(bad); (err == nil) != (bad == "0") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// Files that are not ours are not read.
func TestNames(t *testing.T) {
	for _, name := range []string{"a1-r0.out.1", "a01-r0.out", "a1-r0.log", "a1-r0.outx", "a-r0.out", "x"} {
		if k, ok := parseName(name); ok {
			t.Errorf("%s is taken for %+v", name, k)
		}
	}
	if k, ok := parseName("a12-r345.err"); !ok || k != (key{12, 345, Err}) {
		t.Errorf("%+v %v", k, ok)
	}
}

// The last lines are those of the newest attempts: files of earlier ones are not read, and at most
// the files of one attempt are open.
func TestLastLinesOfManyAttempts(t *testing.T) {
	dir := t.TempDir()
	d := NewDir(dir, Options{Now: ticking()})
	if err := os.Mkdir(filepath.Join(dir, "a1-r0.out"), 0o700); err != nil { // cannot be read
		t.Fatal(err)
	}
	for attempt := 2; attempt <= 9; attempt++ {
		for rank := range 4 {
			f := d.File(attempt, rank, Out)
			say(t, f, fmt.Sprintf("first of %d\nlast of %d\n", attempt, attempt))
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := all(t, dir, Select{Rank: -1, Tail: 10}); len(got) != 10 || got[0] != "a8 r3 out first of 8" || got[9] != "a9 r3 out last of 9" {
		t.Errorf("last lines: %q", got)
	}
	opened := func() (n int) {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(to, dir) {
				n++
			}
		}
		return n
	}
	if err := os.Remove(filepath.Join(dir, "a1-r0.out")); err != nil {
		t.Fatal(err)
	}
	most := 0
	if err := Read(t.Context(), dir, everything, nil, func(Line) error { most = max(most, opened()); return nil }); err != nil {
		t.Fatal(err)
	}
	if most != 4 {
		t.Errorf("%d files were open, want the 4 of one attempt", most)
	}
}

// 64 ranks, 50 attempts, two outputs, 200 lines each: 50 ms and one file at a time for the last 200 lines;
// 48 s and 6,400 descriptors when the files of all attempts were merged.
func BenchmarkLastLines(b *testing.B) {
	dir := b.TempDir()
	d := NewDir(dir, Options{Now: ticking()})
	for attempt := range 50 {
		for rank := range 64 {
			for _, stream := range []Stream{Out, Err} {
				f := d.File(attempt+1, rank, stream)
				for line := range 200 {
					if _, err := fmt.Fprintf(f, "step %d of attempt %d\n", line, attempt); err != nil {
						b.Fatal(err)
					}
				}
				if err := f.Close(); err != nil {
					b.Fatal(err)
				}
			}
		}
	}
	for b.Loop() {
		if err := Read(b.Context(), dir, Select{Rank: -1, Tail: 200}, nil, func(Line) error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}
