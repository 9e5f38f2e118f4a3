package preflight

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// LocalLimit bounds the examination of a node by itself.
	LocalLimit = 8 * time.Second
	// ClockLimit is how far the clock of a good node may differ from those of most nodes. The
	// log has the times of all nodes, and the signatures of requests to a bucket expire.
	ClockLimit = 10 * time.Second

	probeName   = ".ckptstore-preflight-" // prefix of the files of checks
	sharedBytes = 16 << 20                // that can be reserved in good shared memory
	diskBytes   = 1 << 20                 // that a good disk keeps
)

// Check is one question about a node, by itself.
type Check struct {
	What string // what is bad if Do returns an error
	Do   func(ctx context.Context) error
	// Patient checks may take longer on a good node than [LocalLimit]: they are then no reason to call
	// it bad.
	Patient bool
}

// Examine makes all checks at the same time, and returns what is bad, in their order; nothing if ctx
// ends. It abandons a check that does not end within limit.
func Examine(ctx context.Context, limit time.Duration, checks []Check) (bad []string) {
	type end struct {
		err  error
		late bool
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	ends := make([]chan end, len(checks))
	for i, c := range checks {
		ended := make(chan end, 1)
		ends[i] = ended
		go func() {
			err := c.Do(limited)
			ended <- end{err, limited.Err() != nil}
		}()
	}
	for i, c := range checks {
		var got end
		select {
		case got = <-ends[i]:
		case <-limited.Done():
			select {
			case got = <-ends[i]:
			default:
				got = end{fmt.Errorf("no answer after %v", limit), true}
			}
		}
		if got.err != nil && !(got.late && c.Patient) {
			bad = append(bad, c.What+": "+got.err.Error())
		}
	}
	if ctx.Err() != nil {
		return nil
	}
	return bad
}

// SharedMemory returns an error if a small save has no room in a directory of shared memory.
func SharedMemory(dir string) error {
	f, err := os.CreateTemp(dir, probeName)
	if err != nil {
		return err
	}
	err = errors.Join(os.Remove(f.Name()), unix.Fallocate(int(f.Fd()), 0, 0, sharedBytes))
	if errors.Is(err, unix.ENOSPC) {
		err = fmt.Errorf("%s has no room for %d MiB; remove what dead processes left there, or enlarge it: %w", dir, sharedBytes>>20, err)
	}
	return errors.Join(err, f.Close())
}

// Disk returns an error if the disk of a directory does not keep and return bytes. It makes the
// directory.
func Disk(dir string) (err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, probeName)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	want := bytes.Repeat([]byte("preflight "), diskBytes/10)
	if _, err := f.Write(want); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	// Else the bytes would come from the page cache. Filesystems in memory ignore it.
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	got, err := io.ReadAll(io.NewSectionReader(f, 0, diskBytes))
	if err == nil && !bytes.Equal(got, want) {
		err = fmt.Errorf("%s returns other bytes than were written", f.Name())
	}
	return err
}

// Clocks are compared clocks.
type Clocks struct {
	By       []time.Duration // by which each is ahead of the median; 0 within [ClockLimit]
	Majority bool            // most are within the limit, so the others are wrong
}

// Compare compares clocks, of which each is ahead of one of them by so much. Of two clocks that
// differ, neither is known to be wrong.
func Compare(ahead []time.Duration) Clocks {
	out := Clocks{By: make([]time.Duration, len(ahead))}
	if len(ahead) == 0 {
		return out
	}
	median, good := slices.Sorted(slices.Values(ahead))[(len(ahead)-1)/2], 0
	for i, a := range ahead {
		if by := a - median; by.Abs() > ClockLimit {
			out.By[i] = by
		} else {
			good++
		}
	}
	out.Majority = 2*good > len(ahead)
	return out
}

// Clock returns by how much the clock of a node is ahead of this one's, at least: theirs is its time
// between sent, here, and the receipt of its answer so much later, of which it was busy for took.
// The offset is 0 if the two may be equal.
func Clock(sent time.Time, later time.Duration, theirs time.Time, took time.Duration) (offset time.Duration) {
	doubt := (max(later-took, 0) + 1) / 2
	offset = theirs.Sub(sent) - doubt
	switch {
	case offset > doubt:
		return offset - doubt
	case offset < -doubt:
		return offset + doubt
	}
	return 0
}
