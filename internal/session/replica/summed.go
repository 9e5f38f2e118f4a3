package replica

import (
	"encoding/binary"
	"io"

	"github.com/ckptstore/ckptstore/internal/crc32c"
)

// summed reads a block of a slot, and after it the CRC-32C of these bytes in sumSize bytes. Each piece is
// summed while it is in the cache. A profile of both ends has the copies of whole blocks of 4 MiB through
// memory, two on each side, as half of what a copied byte costs: more than TLS.
type summed struct {
	slot    io.ReaderAt
	at, end int64 // what is left of the block
	sum     uint32
	tail    []byte // what is left of the checksum; nil: the block has not ended
}

var _ io.Reader = (*summed)(nil)

// Read implements [io.Reader].
func (s *summed) Read(p []byte) (n int, err error) {
	if s.at < s.end {
		p = p[:min(int64(len(p)), s.end-s.at)]
		n, err = s.slot.ReadAt(p, s.at)
		s.sum, s.at = crc32c.Update(s.sum, p[:n]), s.at+int64(n)
		if n == len(p) {
			err = nil // io.EOF of the whole slot
		}
		return n, err
	}
	if s.tail == nil {
		s.tail = binary.LittleEndian.AppendUint32(nil, s.sum)
	}
	n = copy(p, s.tail)
	if s.tail = s.tail[n:]; n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}
