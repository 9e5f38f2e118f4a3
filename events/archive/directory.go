package archive

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// list is the segments of a directory, in order. Other files are passed over.
func list(dir string) (all []Segment, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list the archive: %w", err)
	}
	for _, e := range entries {
		if s, ok := parseSegment(dir, e.Name()); ok {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b Segment) int { return cmp.Or(cmp.Compare(a.First, b.First), cmp.Compare(a.Last, b.Last)) })
	return all, nil
}

// Ahead is the last segment in dir that follows end, directly or after others: what
// was sealed early. Those that do not fit are removed: nothing refers to them.
func Ahead(dir, store string, end Link) (Link, error) {
	all, err := list(dir)
	if err != nil {
		return end, err
	}
	link := end
	for _, s := range all {
		if s.Last <= end.Last {
			continue
		}
		f, err := open(s, store)
		fits := err == nil && s.First == link.Last+1 && f.before == link.Digest
		if fits {
			link = Link{Last: s.Last, Digest: f.digest}
		}
		if f != nil {
			err = f.close()
		}
		if !fits {
			err = os.Remove(s.Path)
		}
		if err != nil {
			return end, fmt.Errorf("segments ahead of event %d: %w", end.Last, err)
		}
	}
	return link, nil
}

// Extend makes what an archive that ends at end needs beside the segments up to
// there, which are sealed, when it ended at had before. It is durable on return.
func Extend(dir, store string, had, end Link) error {
	if err := writeHeads(dir, store, had.Last, end.Last); err != nil {
		return fmt.Errorf("heads of the archive: %w", err)
	}
	return nil
}

// Tidy removes what an archive that ends at end does not need: heads of an earlier
// end, and files whose writing was cut.
func Tidy(dir string, end Link) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		old := strings.HasPrefix(e.Name(), "heads-") && e.Name() != headsName(end.Last)
		if old || strings.HasPrefix(e.Name(), tempPrefix) {
			err = errors.Join(err, os.Remove(filepath.Join(dir, e.Name())))
		}
	}
	return err
}
