package logs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/internal/beneath"
)

// Select selects which of a job's output to read.
type Select struct {
	Top     string    // a parent directory, below which no symbolic link is followed; empty: the directory itself
	Attempt int       // 0: all
	Rank    int       // -1: all
	Streams []Stream  // nil: both
	Tail    int       // the last lines of the selection; -1: all
	Since   time.Time // lines from then on; zero: all
}

// Line is a line of output.
type Line struct {
	Attempt int
	Rank    int
	Stream  Stream
	Time    time.Time
	Text    []byte // without its end; valid until the next line
}

func (s Select) wants(k key) bool {
	return (s.Attempt == 0 || s.Attempt == k.attempt) && (s.Rank < 0 || s.Rank == k.rank) &&
		(s.Streams == nil || slices.Contains(s.Streams, k.stream))
}

// found returns the keys of the selected files in a directory, in order.
func found(root beneath.Root, dir string, s Select) ([]key, error) {
	entries, err := root.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // nothing was written yet
	}
	if err != nil {
		return nil, fmt.Errorf("list output: %w", err)
	}
	var keys []key
	for _, e := range entries {
		if k, ok := parseName(e.Name()); ok && s.wants(k) {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b key) int {
		return cmp.Or(cmp.Compare(a.attempt, b.attempt), cmp.Compare(a.rank, b.rank), -cmp.Compare(a.stream, b.stream))
	})
	return keys, nil
}

// pollEvery is how often the files of a running job are polled.
const pollEvery = 100 * time.Millisecond

// askEvery is how often Read asks whether a silent job has ended.
const askEvery = time.Second

// Read visits the selected lines in the order of time. With ended, which reports
// whether the job has ended, it continues with later lines, until the end of the
// job or of ctx.
func Read(ctx context.Context, dir string, s Select, ended func(context.Context) (bool, error), visit func(Line) error) error {
	r := reader{dir: dir, root: beneath.At(cmp.Or(s.Top, dir)), sel: s, files: map[key]*tailed{}}
	defer r.close()
	if err := r.past(ctx, visit); err != nil {
		return err
	}
	if ended == nil {
		return r.rest(visit)
	}
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	var asked time.Time
	for {
		n, err := r.round(visit)
		if err != nil {
			return err
		}
		if n == 0 && time.Since(asked) >= askEvery {
			over, err := ended(ctx)
			if err != nil {
				return err
			}
			if over { // all that it wrote before its end is there now
				return r.drain(visit)
			}
			asked = time.Now()
		}
		if n > 0 {
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// reader is the state of one Read.
type reader struct {
	dir   string
	root  beneath.Root
	sel   Select
	files map[key]*tailed
}

func (r *reader) close() {
	for _, t := range r.files {
		t.close()
	}
}

// look opens the files that exist now.
func (r *reader) look() ([]*tailed, error) {
	keys, err := found(r.root, r.dir, r.sel)
	if err != nil {
		return nil, err
	}
	all := make([]*tailed, len(keys))
	for i, k := range keys {
		if r.files[k] == nil {
			r.files[k] = &tailed{key: k, path: filepath.Join(r.dir, k.name()), root: r.root}
		}
		all[i] = r.files[k]
	}
	return all, nil
}

// past visits the existing lines, merged by time.
func (r *reader) past(ctx context.Context, visit func(Line) error) error {
	files, err := r.look()
	if err != nil {
		return err
	}
	if r.sel.Tail >= 0 {
		for _, t := range files {
			if err := t.skipTo(r.sel.Tail); err != nil {
				return err
			}
		}
		last := make([]Line, 0, min(r.sel.Tail, 1<<10))
		keep := func(l Line) error {
			if len(last) == r.sel.Tail {
				if len(last) == 0 {
					return nil
				}
				last = last[1:]
			}
			l.Text = slices.Clone(l.Text)
			last = append(last, l)
			return nil
		}
		if err := r.merge(ctx, files, keep); err != nil {
			return err
		}
		for _, l := range last {
			if err := visit(l); err != nil {
				return err
			}
		}
		return nil
	}
	return r.merge(ctx, files, visit)
}

// merge visits the next lines of the files in the order of their times, up to the
// end of all files.
func (r *reader) merge(ctx context.Context, files []*tailed, visit func(Line) error) error {
	var heads []*tailed
	for _, t := range files {
		if more, err := t.next(); err != nil {
			return err
		} else if more {
			heads = append(heads, t)
		}
	}
	for n := 0; len(heads) > 0; n++ {
		if n%1024 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		first := 0
		for i, t := range heads {
			if t.line.Time.Before(heads[first].line.Time) {
				first = i
			}
		}
		t := heads[first]
		if !t.line.Time.Before(r.sel.Since) {
			if err := visit(t.line); err != nil {
				return err
			}
		}
		more, err := t.next()
		if err != nil {
			return err
		}
		if !more {
			heads = slices.Delete(heads, first, first+1)
		}
	}
	return nil
}

// round visits the lines written since the last round, and counts them.
func (r *reader) round(visit func(Line) error) (n int, err error) {
	files, err := r.look()
	if err != nil {
		return 0, err
	}
	err = r.merge(context.Background(), files, func(l Line) error {
		n++
		return visit(l)
	})
	return n, err
}

// drain visits the remaining lines of a job that has ended.
func (r *reader) drain(visit func(Line) error) error {
	for {
		n, err := r.round(visit)
		if err != nil {
			return err
		}
		if n > 0 {
			continue
		}
		return r.rest(visit)
	}
}

// rest visits the lines without an end.
func (r *reader) rest(visit func(Line) error) error {
	for _, t := range r.files {
		if t.rest() {
			if err := visit(t.line); err != nil {
				return err
			}
		}
	}
	return nil
}
