package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/beneath"
)

// The log as it was before a server started over it, when that server may
// rewrite what it cannot read: copyName until the store is open, damagedName
// when it was found to be damaged, and of a second time damagedName-2:
//
//	STORE/log.damaged/   files of the stream CKPT
//	  msgs/7.blk         its events
//	  NOT-KEPT           names of files for which there was no room, one a line
const (
	copyName    = ".log-copy"
	damagedName = "log.damaged"
	notKeptName = "NOT-KEPT"
)

// succeed takes the store over from its last owner.
func succeed(ctx context.Context, s *Store, dir string, lock *os.File) (own *ownership, err error) {
	if err := sound(dir); err != nil {
		return nil, fmt.Errorf("own the store %s: %w", dir, err)
	}
	err = guarded(s, dir, func() (err error) {
		own, err = takeOwnership(ctx, s, dir, lock)
		return err
	})
	if err != nil {
		return nil, err
	}
	return own, nil
}

// guarded does what starts a server over the log, under the store's lock, and
// keeps the log as the last owner has left it when it is found to be damaged.
func guarded(s *Store, dir string, do func() error) error {
	if err := recovering(dir); err != nil { // since this process looked
		return err
	}
	if err := plainLog(dir); err != nil {
		return fmt.Errorf("own the store %s: %w", dir, err)
	}
	s.ballast().release()
	if err := s.space.check(keepToOwn); err != nil {
		return fmt.Errorf("own the store %s: %w", dir, err)
	}
	card := filepath.Join(dir, cardName)
	had, lack := keepLog(s, dir, exists(card), maxCopy)
	if lack != nil {
		s.opts.Logger.Warn("the log is opened without a copy of all that its server may change, should it be damaged", "error", lack)
	}
	// Who owned the store before is not whom to wait for, or to end.
	if err := removed(card); err != nil {
		return err
	}
	if err := do(); err != nil {
		return keepCopy(dir, had, lack, err)
	}
	if err := os.RemoveAll(filepath.Join(dir, copyName)); err != nil {
		s.opts.Logger.Warn("a copy of the log is left over", "error", err)
	}
	return nil
}

// keepLog copies the files aside that the server may rewrite: all of them if it
// will not find them as it left them, because its last owner was killed or its
// index is gone. Then it reads the blocks one by one, cuts off what is damaged,
// and goes on behind it. Otherwise that is the last block alone. A copy from an
// earlier try that did not end is the better one and stays. Evidence that has
// all of it already is had, and then nothing is copied. The error is that some
// or all of it could not be copied.
func keepLog(s *Store, dir string, killed bool, limit int64) (had string, err error) {
	to := filepath.Join(dir, copyName)
	if exists(to) {
		return "", notKept(to)
	}
	streams, err := streamsOf(filepath.Join(dir, "log"))
	if err != nil || len(streams) != 1 {
		return "", err // what is wrong then, the server says
	}
	// With an index it compares the last block with that, and cuts that one.
	c := copying{root: beneath.At(dir), from: streams[0], to: to, all: killed || !exists(filepath.Join(streams[0], "msgs", "index.db")), limit: limit, space: s.space}
	if err := c.list(); err != nil || len(c.blocks) == 0 {
		return "", err
	}
	for _, had := range slices.Backward(incidents(dir)) {
		if same, err := c.within(had); same || err != nil {
			return had, err
		}
	}
	return "", c.run()
}

// incidents are the logs that were found to be damaged, the oldest first.
func incidents(dir string) (found []string) {
	for path := filepath.Join(dir, damagedName); exists(path); path = nextIncident(dir, len(found)) {
		found = append(found, path)
	}
	return found
}

// nextIncident is the name of the one after n.
func nextIncident(dir string, n int) string {
	if n == 0 {
		return filepath.Join(dir, damagedName)
	}
	return filepath.Join(dir, fmt.Sprintf("%s-%d", damagedName, n+1))
}

// keepCopy ends what keepLog began when the store could not be opened: if that
// is because it is damaged, the copy gets its lasting name, and the error says
// where it is, and what it lacks. After any other error it waits for the next
// try.
func keepCopy(dir, had string, lack, why error) error {
	from := filepath.Join(dir, copyName)
	if !errors.Is(why, ErrDamaged) || errors.As(why, new(viewsError)) {
		return why
	}
	if exists(from) {
		had = nextIncident(dir, len(incidents(dir)))
		if err := os.Rename(from, had); err != nil {
			return errors.Join(why, fmt.Errorf("keep the copy of the log: %w", err))
		}
		lack = notKept(had)
	}
	switch {
	case had != "" && lack != nil:
		return fmt.Errorf("%w (of the log's files as they were before they were first opened, some are in %s; %v)", why, had, lack) //nolint:errorlint // it is not what went wrong
	case had != "":
		return fmt.Errorf("%w (the log's files as they were before they were first opened are in %s; remove that when it is no longer needed)", why, had)
	case lack != nil:
		return fmt.Errorf("%w (there is no copy of the log's files as they were before they were opened: %v)", why, lack) //nolint:errorlint // as above
	}
	return why
}

// notKept is the error that a copy is not whole; nil if it is.
func notKept(dir string) error {
	text, err := beneath.At(filepath.Dir(dir)).ReadFile(filepath.Join(dir, notKeptName))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	names := strings.Fields(string(text))
	if err != nil || len(names) == 0 {
		return fmt.Errorf("what the copy %s of the log lacks is not known: %w", dir, err)
	}
	return fmt.Errorf("there was no room, or no time, for a copy of %d more files, %s to %s, which the log's server may have changed", len(names), names[len(names)-1], names[0])
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
