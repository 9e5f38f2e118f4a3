package netfs

import (
	"fmt"
	"os"
	"slices"
	"time"
)

// dirty is the data of one file that a client holds back. It is kept in an unnamed
// temporary file at the offsets of the file.
type dirty struct {
	data    *os.File
	extents []extent // ordered, neither overlapping nor adjacent
	changed time.Time
}

// extent is a range of bytes, end excluded.
type extent struct{ start, end int64 }

func newDirty() (*dirty, error) {
	f, err := os.CreateTemp("", "netfs-")
	if err != nil {
		return nil, fmt.Errorf("hold data back: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, fmt.Errorf("hold data back: %w", err)
	}
	return &dirty{data: f}, nil
}

// write holds data back.
func (d *dirty) write(data []byte, at int64) error {
	if _, err := d.data.WriteAt(data, at); err != nil {
		return err
	}
	d.extents = add(d.extents, extent{at, at + int64(len(data))})
	d.changed = time.Now()
	return nil
}

// read copies what is held back of the range at over buf.
func (d *dirty) read(buf []byte, at int64) error {
	for _, e := range d.extents {
		from, to := max(e.start, at), min(e.end, at+int64(len(buf)))
		if from >= to {
			continue
		}
		if _, err := d.data.ReadAt(buf[from-at:to-at], from); err != nil {
			return err
		}
	}
	return nil
}

// size returns the end of the last extent.
func (d *dirty) size() int64 {
	if d == nil || len(d.extents) == 0 {
		return 0
	}
	return d.extents[len(d.extents)-1].end
}

// add returns the extents with one more, merged with those that it touches.
func add(extents []extent, e extent) []extent {
	first := 0
	for first < len(extents) && extents[first].end < e.start {
		first++
	}
	last := first
	for ; last < len(extents) && extents[last].start <= e.end; last++ {
		e = extent{min(e.start, extents[last].start), max(e.end, extents[last].end)}
	}
	return slices.Replace(extents, first, last, e)
}
