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

// inside returns the root from which an archive's directory and its files are reached.
// It follows no symbolic link in place of any of them.
func inside(dir string) beneath.Root { return beneath.At(filepath.Dir(dir)) }

// list returns the segments of a directory, in order. It skips other files.
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

// Ahead returns the last segment in dir that follows end, directly or after others: the
// messages sealed early. It sets aside segments that do not follow: see [SetAside]. The
// caller must check that the segments belong to the same log: a log restored from a
// copy may have continued differently.
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

// At returns the last message of the segment that a link identifies.
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

// SetAside renames the segments after a sequence to names that no archive reads.
// Nothing refers to them, but they may be the only copy of their messages. It returns
// the number of renamed segments.
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
		// Link fails where Rename would replace.
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

// VerifyAhead reads all segments from had to end, as [Verify] does.
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
		return fmt.Errorf("%w: the segments after event %d end at event %d, want %d", ErrDamaged, had.Last, link.Last, end.Last)
	}
	return nil
}

// Extend prepares an archive that ended at had to end at end. The segments up to there
// are sealed; Extend writes everything else that the archive needs. It is durable on
// return.
func Extend(dir, store string, had, end Link) error {
	if err := writeHeads(dir, store, had.Last, end.Last); err != nil {
		return fmt.Errorf("heads of the archive: %w", err)
	}
	return nil
}

// Tidy removes files that an archive that ends at end does not need: heads of an
// earlier end, and partly written files.
func Tidy(dir string, end Link) error {
	root := inside(dir)
	entries, err := root.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		old := strings.HasPrefix(e.Name(), "heads-") && e.Name() != headsName(end.Last)
		if strings.HasPrefix(e.Name(), durable.TempPrefix) {
			// Another process may still be writing it.
			info, ierr := e.Info()
			old = ierr == nil && time.Since(info.ModTime()) > time.Hour
		}
		if old {
			err = errors.Join(err, root.Remove(filepath.Join(dir, e.Name())))
		}
	}
	return err
}
