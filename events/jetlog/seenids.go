package jetlog

import (
	"bufio"
	"cmp"
	"container/heap"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
)

// seenIDs finds repeated IDs in bounded memory. It keeps 24 bytes of each event, sorts
// as many as fit its memory, and spills each sorted run to one unnamed file. At the end
// it merges the runs:
//
//	record   16 bytes of the ID's SHA-256, 8 bytes of the sequence
//	run      records in order of the digest, then of the sequence
type seenIDs struct {
	dir  string // of the file; "" is the system's temporary directory
	most int    // records in memory

	mem  []seenID
	file *os.File
	runs []int64 // where each begins
	size int64
}

type seenID struct {
	digest [16]byte
	event  uint64
}

const (
	seenSize = 24
	// seenMost is 6 MiB of records: a million events need four runs.
	seenMost = 1 << 18
)

func (a seenID) compare(b seenID) int {
	return cmp.Or(slices.Compare(a.digest[:], b.digest[:]), cmp.Compare(a.event, b.event))
}

// add records one event. Sequences must be added in order.
func (s *seenIDs) add(id string, seq uint64) error {
	sum := sha256.Sum256([]byte(id))
	if s.mem = append(s.mem, seenID{[16]byte(sum[:16]), seq}); len(s.mem) < s.most {
		return nil
	}
	return s.spill()
}

func (s *seenIDs) spill() (err error) {
	if s.file == nil {
		if s.file, err = os.CreateTemp(s.dir, ".ckptstore-check-*"); err != nil {
			return fmt.Errorf("make room for the IDs of events: %w", err)
		}
		// The unlinked file vanishes however this process ends.
		if err := os.Remove(s.file.Name()); err != nil {
			return err
		}
	}
	slices.SortFunc(s.mem, seenID.compare)
	s.runs = append(s.runs, s.size)
	w := bufio.NewWriterSize(io.NewOffsetWriter(s.file, s.size), 1<<16)
	for _, e := range s.mem {
		b := binary.BigEndian.AppendUint64(e.digest[:], e.event)
		if _, err := w.Write(b); err != nil {
			return fmt.Errorf("spill the IDs of events: %w", err)
		}
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("spill the IDs of events: %w", err)
	}
	s.size += int64(len(s.mem)) * seenSize
	s.mem = s.mem[:0]
	return nil
}

// repeats calls visit for every event whose ID an earlier event has, in no particular
// order. before is the first event with that ID.
func (s *seenIDs) repeats(visit func(seq, before uint64)) error {
	slices.SortFunc(s.mem, seenID.compare)
	from := seenRuns{{next: s.mem}}
	for i, begin := range s.runs {
		end := s.size
		if i+1 < len(s.runs) {
			end = s.runs[i+1]
		}
		from = append(from, &seenRun{r: bufio.NewReaderSize(io.NewSectionReader(s.file, begin, end-begin), 1<<15)})
	}
	for _, r := range from {
		if err := r.fill(); err != nil {
			return err
		}
	}
	from = slices.DeleteFunc(from, func(r *seenRun) bool { return len(r.next) == 0 })
	heap.Init(&from)
	var first seenID // of those with the same digest; 0 before there is one
	for len(from) > 0 {
		r := from[0]
		e := r.next[0]
		if first.event != 0 && e.digest == first.digest {
			visit(e.event, first.event)
		} else {
			first = e
		}
		r.next = r.next[1:]
		if err := r.fill(); err != nil {
			return err
		}
		if len(r.next) == 0 {
			heap.Pop(&from)
		} else {
			heap.Fix(&from, 0)
		}
	}
	return nil
}

func (s *seenIDs) close() error {
	if s.file == nil {
		return nil
	}
	return s.file.Close()
}

// seenRun is the unread rest of a sorted run: in memory, and in the file.
type seenRun struct {
	next []seenID
	r    *bufio.Reader // nil: nothing
	one  [1]seenID
}

// fill reads the next record unless one is in memory.
func (r *seenRun) fill() error {
	if len(r.next) > 0 || r.r == nil {
		return nil
	}
	var b [seenSize]byte
	_, err := io.ReadFull(r.r, b[:])
	if errors.Is(err, io.EOF) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the IDs of events: %w", err)
	}
	r.one[0] = seenID{[16]byte(b[:16]), binary.BigEndian.Uint64(b[16:])}
	r.next = r.one[:]
	return nil
}

// seenRuns is a heap ordered by the next record of each run.
type seenRuns []*seenRun

var _ heap.Interface = (*seenRuns)(nil)

// Len implements [heap.Interface].
func (h seenRuns) Len() int { return len(h) }

// Less implements [heap.Interface].
func (h seenRuns) Less(i, j int) bool { return h[i].next[0].compare(h[j].next[0]) < 0 }

// Swap implements [heap.Interface].
func (h seenRuns) Swap(i, j int) { h[i], h[j] = h[j], h[i] }

// Push implements [heap.Interface].
func (h *seenRuns) Push(x any) { *h = append(*h, x.(*seenRun)) }

// Pop implements [heap.Interface].
func (h *seenRuns) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}
