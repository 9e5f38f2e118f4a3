package archive

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
)

// inside is the root from which an archive's directory and its files are reached: no
// symbolic link is followed in the place of any of them.
func inside(dir string) beneath.Root { return beneath.At(filepath.Dir(dir)) }

// list is the segments of a directory, in order. Other files are passed over.
func list(dir string) (all []Segment, err error) {
	entries, err := inside(dir).ReadDir(dir)
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
// was sealed early. Those that do not follow are set aside: see [SetAside]. That they
// are of the same log, the caller finds out: a log that was put back from a copy may
// have gone on otherwise.
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
			err = setAside(s.Path)
		}
		if err != nil {
			return end, fmt.Errorf("segments ahead of event %d: %w", end.Last, err)
		}
	}
	return link, nil
}

// At is the last message of the segment that a link stands for.
func At(dir, store string, link Link) (m Message, err error) {
	all, err := list(dir)
	if err != nil {
		return m, err
	}
	for _, s := range all {
		if s.Last != link.Last {
			continue
		}
		f, err := open(s, store)
		if err != nil {
			return m, err
		}
		if f.digest != link.Digest {
			return m, errors.Join(fmt.Errorf("%w: %s has another digest", ErrDamaged, s.Path), f.close())
		}
		x, err := f.look()
		var messages []Message
		if err == nil {
			messages, err = f.frame(x, len(x.frames)-1)
		}
		if err := errors.Join(err, f.close()); err != nil {
			return m, err
		}
		return messages[len(messages)-1], nil
	}
	return m, fmt.Errorf("%w: no segment ends at event %d", ErrDamaged, link.Last)
}

// SetAside renames the segments behind a sequence, to names that no archive looks
// at. Nothing refers to them, but they may be the only copy of what they hold. It
// returns how many there were.
func SetAside(dir string, behind uint64) (n int, err error) {
	all, err := list(dir)
	if err != nil {
		return 0, err
	}
	for _, s := range all {
		if s.Last > behind {
			if err := setAside(s.Path); err != nil {
				return n, fmt.Errorf("set segment %s aside: %w", s.Path, err)
			}
			n++
		}
	}
	return n, nil
}

func setAside(path string) error {
	root := inside(filepath.Dir(path))
	for i := 1; ; i++ {
		to := fmt.Sprintf("%s.aside-%d", path, i)
		// A link fails where a rename would replace.
		err := root.Link(path, root, to)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err == nil {
			err = root.Remove(path)
		}
		return err
	}
}

// VerifyAhead reads the segments from had to end, all of them, as [Verify] does.
func VerifyAhead(dir, store string, had, end Link) error {
	all, err := list(dir)
	if err != nil {
		return err
	}
	link := had
	for _, s := range all {
		if s.First != link.Last+1 || s.Last > end.Last {
			continue
		}
		if link, err = Verify(s.Path, store, link); err != nil {
			return err
		}
	}
	if link != end {
		return fmt.Errorf("%w: the segments behind event %d end at event %d, want %d", ErrDamaged, had.Last, link.Last, end.Last)
	}
	return nil
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
	root := inside(dir)
	entries, err := root.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		old := strings.HasPrefix(e.Name(), "heads-") && e.Name() != headsName(end.Last)
		if strings.HasPrefix(e.Name(), durable.TempPrefix) {
			// Another process may be writing it just now.
			info, ierr := e.Info()
			old = ierr == nil && time.Since(info.ModTime()) > time.Hour
		}
		if old {
			err = errors.Join(err, root.Remove(filepath.Join(dir, e.Name())))
		}
	}
	return err
}
