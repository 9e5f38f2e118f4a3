package staging

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

const digestsFixed = 16 // bytes before the digests of a slot

// digestsSize is the room for the digests of so many items, in bytes.
func digestsSize(items int) int64 { return digestsFixed + int64(items)*int64(len(checkpoint.Digest{})) }

// digests is where the digests of a slot are.
func (p *Layout) digests() int64 { return p.data - digestsSize(len(p.offsets)) }

// writeDigests says in a slot what is in it, in the order of its items. A slot
// that is cut off in the middle of this has none.
func writeDigests(data []byte, p *Layout, generation uint64, digests []checkpoint.Digest) {
	b := data[p.digests():p.data]
	le := binary.LittleEndian
	le.PutUint64(b, 0)
	le.PutUint32(b[12:], uint32(len(digests)))
	for i, d := range digests {
		copy(b[digestsFixed+i*len(d):], d[:])
	}
	le.PutUint32(b[8:], digestsSum(b, generation))
	le.PutUint64(b, generation)
}

func digestsSum(b []byte, generation uint64) uint32 {
	var g [8]byte
	binary.LittleEndian.PutUint64(g[:], generation)
	return crc32.Update(crc32.Checksum(g[:], castagnoli), castagnoli, b[12:])
}

// readDigests are the digests of a generation, at the end of what lies between
// the description and the data, or nil: without them, those of the bytes are
// taken.
func readDigests(between []byte, generation uint64, items int) []checkpoint.Digest {
	at := int64(len(between)) - digestsSize(items)
	if at < 0 {
		return nil
	}
	b, le := between[at:], binary.LittleEndian
	if generation == 0 || le.Uint64(b) != generation || le.Uint32(b[12:]) != uint32(items) || le.Uint32(b[8:]) != digestsSum(b, generation) {
		return nil
	}
	out := make([]checkpoint.Digest, items)
	for i := range out {
		copy(out[i][:], b[digestsFixed+i*len(out[i]):])
	}
	return out
}
