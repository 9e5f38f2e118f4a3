package archive

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"github.com/zeebo/blake3"
)

// file is an open segment.
type file struct {
	Segment
	f      *os.File
	before Digest // of the segment before
	digest Digest
	ends   int64 // where the messages end and the index begins

	once  sync.Once
	index index
	err   error // of reading the index
}

// open opens a segment and checks its head, its end and its name. Messages are checked
// frame by frame when they are read; [Verify] checks all of them.
func open(s Segment, store string) (_ *file, err error) {
	f, err := inside(filepath.Dir(s.Path)).Open(s.Path)
	if errors.Is(err, os.ErrNotExist) {
		err = fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if err != nil {
		return nil, err
	}
	o := &file{Segment: s, f: f}
	if err := o.parse(store); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", s.Path, err), f.Close())
	}
	return o, nil
}

func (o *file) parse(store string) error {
	head := make([]byte, len(segmentMagic)+2)
	if _, err := o.f.ReadAt(head, 0); err != nil || string(head[:len(segmentMagic)]) != segmentMagic {
		return fmt.Errorf("%w: it does not begin as a segment does", ErrDamaged)
	}
	n := int(binary.LittleEndian.Uint16(head[len(segmentMagic):]))
	rest := make([]byte, n+8+len(Digest{}))
	if _, err := o.f.ReadAt(rest, int64(len(head))); err != nil {
		return fmt.Errorf("%w: its head is cut off", ErrDamaged)
	}
	if got := string(rest[:n]); got != store {
		return fmt.Errorf("%w: it belongs to %s, want %s", ErrForeign, got, store)
	}
	if first := binary.LittleEndian.Uint64(rest[n:]); first != o.First {
		return fmt.Errorf("%w: it begins at event %d", ErrDamaged, first)
	}
	copy(o.before[:], rest[n+8:])
	info, err := o.f.Stat()
	if err != nil {
		return err
	}
	begins := int64(len(head) + len(rest))
	at := info.Size() - int64(trailerSize)
	if at < begins {
		return fmt.Errorf("%w: it is cut off", ErrDamaged)
	}
	trailer := make([]byte, trailerSize)
	if _, err := o.f.ReadAt(trailer, at); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if string(trailer[8+len(Digest{}):]) != endMagic {
		return fmt.Errorf("%w: it does not end as a segment does", ErrDamaged)
	}
	copy(o.digest[:], trailer[8:])
	o.ends = int64(binary.LittleEndian.Uint64(trailer)) //nolint:gosec // checked here
	if o.ends < begins || o.ends > at {
		return fmt.Errorf("%w: its index is not in it", ErrDamaged)
	}
	return nil
}

func (o *file) close() error { return o.f.Close() }

// look reads the index, once.
func (o *file) look() (index, error) {
	o.once.Do(func() {
		raw, _, err := readFrame(o.f, o.ends, 1<<62)
		if err == nil {
			o.index, err = decodeIndex(raw, o.First)
		}
		if err != nil {
			o.err = fmt.Errorf("%s: %w", o.Path, err)
		}
	})
	return o.index, o.err
}

// frame returns the messages of one frame.
func (o *file) frame(x index, i int) (messages []Message, err error) {
	limit, next := o.ends, o.Last+1
	if i+1 < len(x.frames) {
		limit, next = x.frames[i+1].offset, x.frames[i+1].first
	}
	raw, end, err := readFrame(o.f, x.frames[i].offset, limit)
	if err == nil && end != limit {
		err = fmt.Errorf("%w: frame at byte %d ends before the next", ErrDamaged, x.frames[i].offset)
	}
	for seq := x.frames[i].first; err == nil && seq < next; seq++ {
		var m Message
		if m, raw, err = cutMessage(raw, seq); err == nil {
			messages = append(messages, m)
		}
	}
	if err == nil && len(raw) > 0 {
		err = fmt.Errorf("%w: frame at byte %d has more than its messages", ErrDamaged, x.frames[i].offset)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", o.Path, err)
	}
	return messages, nil
}

// Verify reads a whole segment and returns the link to the next. Every byte must be as
// sealed, and the segment must follow after. It returns [ErrDamaged] or [ErrForeign]
// otherwise.
func Verify(path, store string, after Link) (Link, error) {
	s, ok := parseSegment("", filepath.Base(path))
	if !ok {
		return Link{}, fmt.Errorf("%s is not the name of a segment", path)
	}
	s.Path = path
	o, err := open(s, store)
	if err != nil {
		return Link{}, err
	}
	defer func() { _ = o.close() }()
	if o.First != after.Last+1 || o.before != after.Digest {
		return Link{}, fmt.Errorf("%w: %s does not follow event %d", ErrDamaged, path, after.Last)
	}
	info, err := o.f.Stat()
	if err != nil {
		return Link{}, err
	}
	sum := blake3.New()
	if _, err := io.Copy(sum, io.NewSectionReader(o.f, 0, info.Size()-int64(len(Digest{})+len(endMagic)))); err != nil {
		return Link{}, fmt.Errorf("read %s: %w", path, err)
	}
	if got := Digest(sum.Sum(nil)); got != o.digest {
		return Link{}, fmt.Errorf("%w: %s: its bytes are not what was sealed", ErrDamaged, path)
	}
	x, err := o.look()
	for i := 0; err == nil && i < len(x.frames); i++ {
		_, err = o.frame(x, i)
	}
	return Link{Last: o.Last, Digest: o.digest}, err
}
