package staging

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"sync/atomic"
	"unsafe"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// The arena of a staging slot describes its own content, so that a trainer can
// finish the save of a dead trainer. All integers are little-endian.
//
//	 0  8  "CKPTSLOT"
//	 8  8  sealed: the generation whose bytes are complete, or another number
//	16  4  CRC-32C of the bytes from 20 to the end of the description
//	20  4  version of this layout: 1
//	24  8  generation: counts the uses of the slot, from 1
//	32  8  where the data begins, a multiple of 4096
//	40  8  size of the data
//	48  8  length of the description
//	56  8  zero
//	64     the description of the save
//	        4  attempt
//	        4  rank
//	       32  fingerprint of the rank's plan
//	        4  length of the checkpoint's ID, and the ID
//	        4  number of items, and for each of them, in the order of the plan:
//	           8  offset from the beginning of the file, a multiple of 64
//	           8  size
//	        the rank's plan, encoded, to the end
//
// The trainer writes all fields except sealed, which it sets to zero first. The
// worker copies the data and then stores the generation in sealed, ordered after
// the copy for every processor. A worker writes nothing else here.
//
// When the trainer has written the bytes to files it knows their digests, and
// puts them here too, ending where the data begins. A restore may then take the
// bytes of a committed checkpoint from the slot.
//
//	 0  8  the generation whose digests these are, or another number
//	 8  4  CRC-32C of the generation and of what follows
//	12  4  number of items
//	16     BLAKE3-256 of each item, in the order of the plan; zero of an item
//	       that another rank has written
const (
	slotMagic   = "CKPTSLOT"
	slotVersion = 1
	slotFixed   = 64 // bytes before the description
	sealedAt    = 8
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// maxID bounds the length of a checkpoint's ID in bytes, so that the header of a
// plan has the same size in all its saves.
const maxID = 256

// Layout is the layout of one rank's plan in a slot. It is the same in every save
// by that plan and never changes.
type Layout struct {
	at      map[string]Span // by Key: from the beginning of the file
	keys    []string        // by Key, of the items
	offsets []int64         // of them
	data    int64           // where the data begins
	end     int64           // size of the file
	bytes   int64           // of the items
	tail    []byte          // the description after the ID
}

// LayOut lays out the items of a plan; encoded is the plan's encoding.
func LayOut(items []checkpoint.Item, encoded []byte) *Layout {
	p := &Layout{at: make(map[string]Span, len(items))}
	sizes := make([]int64, len(items))
	for i, it := range items {
		sizes[i] = it.Bytes
		p.bytes += it.Bytes
	}
	offsets, size := Place(sizes)
	head := int64(slotFixed + 4 + 4 + len(checkpoint.Digest{}) + 4 + maxID + 4 + 16*len(items) + len(encoded))
	p.data = (head + digestsSize(len(items)) + arenaPage - 1) / arenaPage * arenaPage
	p.end = p.data + size
	p.tail = binary.LittleEndian.AppendUint32(make([]byte, 0, 4+16*len(items)+len(encoded)), uint32(len(items)))
	for i, it := range items {
		offsets[i] += p.data
		key := Key(it)
		p.at[key] = Span{offsets[i], it.Bytes}
		p.keys = append(p.keys, key)
		p.tail = binary.LittleEndian.AppendUint64(p.tail, uint64(offsets[i]))
		p.tail = binary.LittleEndian.AppendUint64(p.tail, uint64(it.Bytes))
	}
	p.offsets = offsets
	p.tail = append(p.tail, encoded...)
	return p
}

// Size returns the size of the file in bytes.
func (p *Layout) Size() int64 { return p.end }

// Offsets returns the offsets of the items in the file, in bytes and in the order
// of the plan. The caller must not change them.
func (p *Layout) Offsets() []int64 { return p.offsets }

// Header describes the content of a slot.
type Header struct {
	Part
	Generation uint64
	Spans      []Span              // of the items, in the order of the plan
	Plan       []byte              // of the rank, encoded
	Digests    []checkpoint.Digest // of the items; nil until they are written
}

// writeHeader begins a use of a slot, identified by its generation.
func writeHeader(data []byte, of Part, generation uint64, p *Layout) {
	storeSealed(data, 0)
	copy(data, slotMagic)
	le := binary.LittleEndian
	le.PutUint32(data[20:], slotVersion)
	le.PutUint64(data[24:], generation)
	le.PutUint64(data[32:], uint64(p.data))
	le.PutUint64(data[40:], uint64(p.end-p.data))
	le.PutUint64(data[56:], 0)
	le.PutUint64(data[p.digests():], 0) // an earlier use may have had the same generation
	b := data[slotFixed:slotFixed]
	b = le.AppendUint32(b, uint32(of.Attempt))
	b = le.AppendUint32(b, uint32(of.Rank))
	b = append(b, of.Fingerprint[:]...)
	b = le.AppendUint32(b, uint32(len(of.Checkpoint)))
	b = append(append(b, of.Checkpoint...), p.tail...)
	le.PutUint64(data[48:], uint64(len(b)))
	le.PutUint32(data[16:], crc32.Checksum(data[20:slotFixed+len(b)], castagnoli))
}

// loadSealed returns the generation that the worker has marked as complete.
func loadSealed(data []byte) uint64 {
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(&data[sealedAt])))
}

func storeSealed(data []byte, generation uint64) {
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&data[sealedAt])), generation)
}

// errNoSlot reports that a file is not a staging slot, or that its header is
// incomplete.
var errNoSlot = errors.New("not a staging slot")

// readHeader reads the header of another process's slot and checks that every
// item is inside the file. sealed reports whether the bytes are complete.
func readHeader(data []byte) (h Header, sealed bool, err error) {
	bad := func(what string) (Header, bool, error) {
		return Header{}, false, fmt.Errorf("%w: %s", errNoSlot, what)
	}
	if len(data) < slotFixed || string(data[:len(slotMagic)]) != slotMagic {
		return bad("it does not begin with " + slotMagic)
	}
	// The rest describes the generation that was sealed before it was read.
	seal := loadSealed(data)
	le := binary.LittleEndian
	if v := le.Uint32(data[20:]); v != slotVersion {
		return bad(fmt.Sprintf("its layout has version %d", v))
	}
	n := le.Uint64(data[48:])
	if n > uint64(len(data)-slotFixed) {
		return bad("its description is longer than the file")
	}
	if crc32.Checksum(data[20:slotFixed+n], castagnoli) != le.Uint32(data[16:]) {
		return bad("its checksum is wrong")
	}
	if at, size := le.Uint64(data[32:]), le.Uint64(data[40:]); at > uint64(len(data)) || size > uint64(len(data))-at {
		return bad("its data is longer than the file")
	}
	b := data[slotFixed : slotFixed+n]
	if len(b) < 4+4+len(h.Fingerprint)+4 {
		return bad("its description is too short")
	}
	h.Generation = le.Uint64(data[24:])
	h.Attempt, h.Rank = int(le.Uint32(b)), int(le.Uint32(b[4:]))
	b = b[8+copy(h.Fingerprint[:], b[8:]):]
	id := le.Uint32(b)
	if b = b[4:]; uint64(id) > uint64(len(b)) {
		return bad("its checkpoint's ID is longer than its description")
	}
	h.Checkpoint, b = string(b[:id]), b[id:]
	if len(b) < 4 || uint64(le.Uint32(b))*16 > uint64(len(b)-4) {
		return bad("its items are longer than its description")
	}
	count := int(le.Uint32(b))
	b = b[4:]
	for range count {
		off, size := le.Uint64(b), le.Uint64(b[8:])
		if off > uint64(len(data)) || size > uint64(len(data))-off {
			return bad("an item is outside of the file")
		}
		h.Spans = append(h.Spans, Span{int64(off), int64(size)})
		b = b[16:]
	}
	h.Plan = append([]byte(nil), b...)
	h.Digests = readDigests(data[slotFixed+n:max(slotFixed+n, le.Uint64(data[32:]))], h.Generation, count)
	return h, h.Generation > 0 && seal == h.Generation, nil
}
