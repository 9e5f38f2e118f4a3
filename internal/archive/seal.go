package archive

import (
	"bufio"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/zeebo/blake3"

	"github.com/ckptstore/ckptstore/internal/durable"
)

const (
	segmentMagic = "CKPTSEG1"
	endMagic     = "CKPTEND1"
	trailerSize  = 8 + len(Digest{}) + len(endMagic)
)

// Limits are the sizes at which a segment is full.
type Limits struct {
	Messages int
	Bytes    int64 // of messages, before compression
}

// DefaultLimits keep the memory for sealing a segment, or for reading its index, to a
// few MiB.
var DefaultLimits = Limits{Messages: 1 << 15, Bytes: 32 << 20}

// Link identifies the segment that another segment follows. The zero Link stands before
// the first.
type Link struct {
	Last   uint64 // sequence
	Digest Digest
}

// Seal writes the messages that follow after into one segment of dir and returns its
// link. On return the file is durable under its name and was read back. Seal takes
// messages until they end or the limits are reached, and leaves the rest. The first
// must have the sequence after.Last+1, and the others follow without a gap.
//
// Without a message Seal creates no file and returns after.
func Seal(dir, store string, after Link, limits Limits, messages iter.Seq2[Message, error]) (Link, error) {
	w := &writer{store: store, after: after}
	link, err := w.seal(dir, limits, messages)
	if err != nil {
		return after, fmt.Errorf("seal the log from event %d: %w", after.Last+1, err)
	}
	return link, nil
}

type writer struct {
	store string
	after Link

	out    *bufio.Writer
	sum    hash.Hash
	offset int64
	index  index
	raw    []byte // of the open frame
	packed []byte
	last   uint64
	bytes  int64
	latest map[string]uint64
	lanes  map[string][]uint64
}

func (w *writer) seal(dir string, limits Limits, messages iter.Seq2[Message, error]) (link Link, err error) {
	root := inside(dir)
	f, err := root.OpenFile(filepath.Join(dir, durable.TempPrefix+rand.Text()), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return link, err
	}
	defer func() {
		if f != nil {
			err = errors.Join(err, f.Close(), root.Remove(f.Name()))
		}
	}()
	sum := blake3.New()
	w.sum, w.out = sum, bufio.NewWriterSize(io.MultiWriter(f, sum), 1<<20)
	w.last, w.latest, w.lanes = w.after.Last, map[string]uint64{}, map[string][]uint64{}
	w.index.first = w.after.Last + 1
	if err := w.head(); err != nil {
		return link, err
	}
	for m, err := range messages {
		if err == nil {
			err = w.add(m)
		}
		if err != nil {
			return link, err
		}
		if w.last-w.after.Last >= uint64(limits.Messages) || w.bytes >= limits.Bytes { //nolint:gosec // positive
			break
		}
	}
	if w.last == w.after.Last {
		return w.after, nil
	}
	digest, err := w.finish()
	if err != nil {
		return link, err
	}
	if err := f.Sync(); err != nil {
		return link, err
	}
	path := filepath.Join(dir, segmentName(w.index.first, w.last))
	if err := root.Rename(f.Name(), path); err != nil {
		return link, err
	}
	err = f.Close()
	f = nil
	if err == nil {
		err = root.SyncDir(dir)
	}
	if err != nil {
		return link, err
	}
	got, err := Verify(path, w.store, w.after)
	if err == nil && got.Digest != digest {
		err = fmt.Errorf("%w: %s has another digest than what was written", ErrDamaged, path)
	}
	return got, err
}

func (w *writer) write(b []byte) error {
	n, err := w.out.Write(b)
	w.offset += int64(n)
	return err
}

func (w *writer) head() error {
	b := []byte(segmentMagic)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(w.store))) //nolint:gosec // an identity is short
	b = append(b, w.store...)
	b = binary.LittleEndian.AppendUint64(b, w.index.first)
	return w.write(append(b, w.after.Digest[:]...))
}

func (w *writer) add(m Message) error {
	if m.Sequence != w.last+1 {
		return fmt.Errorf("event %d follows event %d", m.Sequence, w.last)
	}
	if err := m.check(); err != nil {
		return err
	}
	if len(w.raw) == 0 {
		w.index.frames = append(w.index.frames, place{first: m.Sequence, offset: w.offset})
	}
	before := len(w.raw)
	w.raw = appendMessage(w.raw, m)
	w.bytes += int64(len(w.raw) - before)
	w.last = m.Sequence
	w.latest[m.Subject] = m.Sequence
	if name := laneOf(m.Subject); name != "" {
		w.lanes[name] = append(w.lanes[name], m.Sequence)
	}
	if len(w.raw) >= frameBytes {
		return w.flush()
	}
	return nil
}

// flush closes the open frame.
func (w *writer) flush() error {
	if len(w.raw) == 0 {
		return nil
	}
	w.packed = appendFrame(w.packed[:0], w.raw)
	w.raw = w.raw[:0]
	return w.write(w.packed)
}

// finish writes the index and the trailer.
func (w *writer) finish() (d Digest, err error) {
	if err := w.flush(); err != nil {
		return d, err
	}
	for name, last := range w.latest {
		w.index.subjects = append(w.index.subjects, subject{name, last})
	}
	slices.SortFunc(w.index.subjects, func(a, b subject) int { return strings.Compare(a.name, b.name) })
	for name, sequences := range w.lanes {
		w.index.lanes = append(w.index.lanes, lane{name, sequences})
	}
	slices.SortFunc(w.index.lanes, func(a, b lane) int { return strings.Compare(a.name, b.name) })
	at := w.offset
	if err := w.write(appendFrame(nil, w.index.encode())); err != nil {
		return d, err
	}
	if err := w.write(binary.LittleEndian.AppendUint64(nil, uint64(at))); err != nil { //nolint:gosec // not negative
		return d, err
	}
	if err := w.out.Flush(); err != nil {
		return d, err
	}
	w.sum.Sum(d[:0])
	if err := w.write(append(d[:], endMagic...)); err != nil {
		return d, err
	}
	return d, w.out.Flush()
}
