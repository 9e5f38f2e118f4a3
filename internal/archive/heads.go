package archive

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"github.com/ckptstore/ckptstore/internal/durable"
)

// The heads of an archive are one file, which is searched without being read:
//
//	"CKPTHDS1"      8 bytes
//	end             8 bytes
//	lanes           4 bytes: how many
//	table           4 bytes a lane: where it is in the records
//	records         of each lane, in order: length 2 bytes, filter, sequence 8 bytes
//	CRC-32C         4 bytes, of all before it
const headsMagic = "CKPTHDS1"

const headsHead = len(headsMagic) + 8 + 4

func headsName(end uint64) string { return fmt.Sprintf("heads-%d", end) }

// writeHeads writes the heads of an archive that ends at end. It merges the heads of an
// earlier end with the segments since.
func writeHeads(dir, store string, had, end uint64) error {
	all := map[string]uint64{}
	if had > 0 {
		h, err := openHeads(dir, had)
		if err == nil {
			err = errors.Join(h.each(func(lane string, last uint64) { all[lane] = last }), h.close())
		}
		if err != nil {
			// The file is derived: the segments hold everything.
			clear(all)
			had = 0
		}
	}
	segments, err := list(dir)
	if err != nil {
		return err
	}
	next := had + 1
	for _, s := range segments { // the same as [Open] takes
		if s.First != next || s.Last > end {
			continue
		}
		next = s.Last + 1
		x, err := indexOf(s, store)
		if err != nil {
			return err
		}
		for _, l := range x.lanes {
			all[l.name] = max(all[l.name], l.sequences[len(l.sequences)-1])
		}
	}
	b := []byte(headsMagic)
	b = binary.LittleEndian.AppendUint64(b, end)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(all))) //nolint:gosec // fewer than trials that fit a disk
	names := slices.Sorted(maps.Keys(all))
	at := uint32(0)
	for _, name := range names {
		b = binary.LittleEndian.AppendUint32(b, at)
		at += uint32(2 + len(name) + 8) //nolint:gosec // as above
	}
	for _, name := range names {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(name))) //nolint:gosec // a subject
		b = append(b, name...)
		b = binary.LittleEndian.AppendUint64(b, all[name])
	}
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	return durable.WriteBelow(inside(dir), filepath.Join(dir, headsName(end)), b)
}

func indexOf(s Segment, store string) (index, error) {
	o, err := open(s, store)
	if err != nil {
		return index{}, err
	}
	x, err := o.look()
	return x, errors.Join(err, o.close())
}

// heads is an open file of heads.
type heads struct {
	f       *os.File
	n       int
	records int64 // offset of the records
	size    int64 // of the file without its checksum
}

func openHeads(dir string, end uint64) (_ *heads, err error) {
	f, err := inside(dir).Open(filepath.Join(dir, headsName(end)))
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%w: %s: %w", ErrDamaged, f.Name(), err), f.Close())
		}
	}()
	// The whole file is read once, in pieces, so that a search may trust it.
	sum := crc32.New(castagnoli)
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	h := &heads{f: f, size: info.Size() - 4}
	if _, err := io.Copy(sum, io.NewSectionReader(f, 0, max(0, h.size))); err != nil {
		return nil, err
	}
	var head [headsHead]byte
	var tail [4]byte
	if _, err := f.ReadAt(head[:], 0); err != nil {
		return nil, err
	}
	if _, err := f.ReadAt(tail[:], h.size); err != nil {
		return nil, err
	}
	if !bytes.HasPrefix(head[:], []byte(headsMagic)) || binary.LittleEndian.Uint64(head[len(headsMagic):]) != end || binary.LittleEndian.Uint32(tail[:]) != sum.Sum32() {
		return nil, errors.New("its magic, end or checksum does not match")
	}
	h.n = int(binary.LittleEndian.Uint32(head[len(headsMagic)+8:]))
	h.records = int64(headsHead) + 4*int64(h.n)
	return h, nil
}

func (h *heads) close() error { return h.f.Close() }

// at returns the i-th lane.
func (h *heads) at(i int) (name string, last uint64, err error) {
	var b [8]byte
	if _, err = h.f.ReadAt(b[:4], int64(headsHead)+4*int64(i)); err != nil {
		return "", 0, err
	}
	at := h.records + int64(binary.LittleEndian.Uint32(b[:4]))
	if _, err = h.f.ReadAt(b[:2], at); err != nil {
		return "", 0, err
	}
	text := make([]byte, int(binary.LittleEndian.Uint16(b[:2]))+8)
	if _, err = h.f.ReadAt(text, at+2); err != nil {
		return "", 0, err
	}
	n := len(text) - 8
	return string(text[:n]), binary.LittleEndian.Uint64(text[n:]), nil
}

// find returns the last sequence of a lane; 0 if there is none.
func (h *heads) find(lane string) (last uint64, err error) {
	i, found := sort.Find(h.n, func(i int) int {
		name, _, rerr := h.at(i)
		err = errors.Join(err, rerr)
		return strings.Compare(lane, name)
	})
	if err != nil || !found {
		return 0, err
	}
	_, last, err = h.at(i)
	return last, err
}

func (h *heads) each(do func(lane string, last uint64)) error {
	for i := range h.n {
		name, last, err := h.at(i)
		if err != nil {
			return err
		}
		do(name, last)
	}
	return nil
}
